"""Findings about the data that the small release of the mutations cannot show."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import soundfile

from recipes.asr.checks import CHECKS, check_text_table, check_texts
from recipes.asr.recipe import AsrRecipe
from recipes.tts.recipe import TtsRecipe
from sbkit.check.check import Check, check_run
from sbkit.check.checked_run import CheckedRun, Finding
from sbkit.check.data import (
    check_channels,
    check_data,
    check_labels,
    check_silence,
)
from sbkit.data.columns import CUT_SHORT
from sbkit.data.manifest import Excluded
from sbkit.data.splits import Splits
from sbkit.text.normalization import language_table, normalize
from sbkit.text.transcripts import transcript_normalizer
from sbkit.text.vocabulary import ensure_labels
from sbkit.train.recipe import Recipe
from sbkit.train.setup import RunData, declare_run, prepare_labels
from tests.runs import ROOT
from tests.stores import Utterance, make_store

LONG_TEXT = "by the old river in the wide valley " * 99
TONE = (3000 * np.sin(np.arange(64_000) / 5)).astype("<i2")


def spoken(
    id: str, text: str, *, sentence: str = "", speaker: str = "", divisor: int = 1
) -> Utterance:
    audio = (TONE // divisor).tobytes()
    return Utterance(id, text, sentence or text, speaker, len(TONE), audio)


def splits_of(train: str = "", dev: str = "", test: str = "") -> Splits:
    """Make splits of three different sentences of the same letters, each split of a speaker."""
    stores = {}
    for name, speaker in {"train": train, "dev": dev, "test": test}.items():
        texts = [f"the quick brown fox {name} x{'o' * n}" for n in range(3)]
        divisor = 3 * len(stores) + 1
        rows = (
            spoken(f"{name}{n}", text, speaker=speaker, divisor=divisor + n)
            for n, text in enumerate(texts)
        )
        stores[name] = make_store(rows)
    return Splits(stores["train"], {"dev": stores["dev"]}, {"test": stores["test"]})


def run_on(
    splits: Splits, folder: Path, recipe: type[Recipe] = AsrRecipe, **settings: Any
) -> CheckedRun:
    """Make a run of splits, without what the checks of data do not read."""
    settings |= {"output_folder": str(folder)}
    spec = declare_run(ROOT / "hparams/ctc.yaml", settings, recipe=AsrRecipe)
    labels, files = prepare_labels(spec, AsrRecipe(), splits)
    data = RunData(spec=spec, recipe=recipe(), splits=splits, labels=labels, label_files=files)
    copy: Any = SimpleNamespace(hparams={})
    parts: Any = dict.fromkeys(("brain", "reached", "helpers", "learnable", "dry_run"))
    return CheckedRun(data=data, copy=copy, highest_factor=1.0, **parts)


CYRILLIC_O = "\N{CYRILLIC SMALL LETTER O}"
CHANGED = [  # sentences, what is noted
    (["No digits", "I have 3,50!"], "digits: 1 0, 1 3, 1 5 ('I have 3,50!' is trained as 'i have "),
    (["a € or $", "b €"], "dropped symbols: 2 €, 1 $ ('b €' is trained as 'b')"),
    (["Oh [noise] no &amp; [noise]", "<unk>"], "dropped tags: 2 [noise], 1 <unk> ('<unk>' is tr"),
    (["the fox is here", "the fox", f"the f{CYRILLIC_O}x"], f"another script: 1 {CYRILLIC_O} ("),
    (["so\xadft words", "\ufeffa fox"], "deleted characters: 1 U+00AD, 1 U+FEFF ('\\ufeffa fox'"),
    (["so\u200dft ශ්\u200dරී"], "deleted characters: 1 U+200D ("),
    (["a nan", "NaN", "nan", "nan"], "stand for a missing text: 2 nan, 1 NaN ('NaN' is tr"),
    (["It cost 3.50 €", "$5 or 10 %"], ""),
    (["a fox' tail, 'yes', it's", "fox'"], "edge of words: 2 fox' (\"fox'\" is trained as 'fox')"),
    (["Speaker B: yes", "A: no, to: me"], "names of speakers: 1 Speaker B:, 1 A: ("),
    (
        [f"language {x}<asr_text>{y}" for x in ("English", "None") for y in ("no", "no", "no")],
        "equal beginnings before a mark: 3 language English<asr_text>, 3 language None<asr_text>",
    ),
    (["Sure, the text is: a fox"] * 3 + ["on a: b", "a"], "3 Sure, the text is: ('Sure, the t"),
    (
        [f"{x}<end> of text" for x in ("fox", "no", "a")] + ["a"],
        "equal ends after a mark: 3 <end> of text (",
    ),
    (["to do: a", "to do: b", "a to do: a", "b: a"], ""),
    (["to do: a", "to do: b", "to do: c", "d", "e", "f"], ""),  # not most of them
    (["please go", "please stop", "please, wait", "please"], ""),
    (["at 3:15", "at 3:20", "at 3:30"], "digits: 4 3, 2 0"),
    (["hel@@ lo", "so"], "another tool: 1 @@ ('hel@@ lo' is trained as 'hel lo')"),
    (["h i | y o u |", "h i <space>", "so</w>"], "1 h i |, 1 y o u |, 1 <space>, 1 </w> ("),
    (["it's\\n so", r"a\tb f\u00fcr it\'s"], r"another tool: 1 \n, 1 \t ("),
    (["it &apos;s", "we do n't", "so 's", "it&amp;#39;s"], "1 it 's, 1 do n't, 1 so 's ("),
    (["f%C3%BCr", "f=C3=BCr", "a\ufffdo, -LRB- b"], "1 %C3%BC, 1 =C3=BC, 1 a\ufffdo, 1 -LRB- ("),
    (["d?j?, no", "a? b?", "NI?O", "se\u00bfor"], "tool: 1 d?j?, 1 NI?O, 1 se\u00bfor ("),
    (["Really?Yes", "what.is?x", "the dogs tails", "Quoi ??"], ""),
    (
        ["it\u00e2\u20ac\u2122s so"],
        "another encoding than its own: 1 it\u00e2\u20ac\u2122s for it\u2019s (",
    ),
    (['"Yes." \N{EM DASH} he said\N{HORIZONTAL ELLIPSIS}', "A\tb\u2009c"], ""),
]


CHANGED_IN = [  # with the language
    ("fa", ["\u064a\u06cc", "\u06cc"], "2 \u06cc (U+06CC), 1 \u064a (U+064A) ('\u06cc"),
    ("yo", ["ẹ́", "e̩"], "look alike: 1 ẹ (U+1EB9), 1 U+0329 ("),
    ("ro", ["ș", "Ş"], "look alike: 1 ş (U+015F), 1 ș (U+0219) ("),
    ("ml", ["അവൻ", "അവന്\u200d"], "1 ൻ (U+0D7B), 1 ്\u200d (U+0D4D U+200D) ("),
    ("gn", ["ko'ẽ aʼe", "mbaʼe"], "look alike: 2 ʼ (U+02BC), 1 ' (U+0027) ("),
    ("uk", ["п'ять пʼять"], ""),
    ("vi", ["ậ ẹ ă", "é"], ""),
    ("sr", ["он", "да", "ono"], "another script: 2 o (U+006F), 1 n (U+006E) ('o"),
    ("ja", ["ラーメンと漢字"], ""),
    ("my", ["ကၽြန္ေတာ္", "မ္မ"], "not in the order of Unicode: 2 U+1039 ("),
    ("xx", ["ó:nen a: b·c"], "become spaces: 1 : ('ó:nen"),
    ("el", ["α·β"], "become spaces: 1 · ("),
    ("kk", ["QIZ qız"], "become i, beside \u0131: 1 I ('QIZ qız' is trained as 'qiz qız')"),
    ("kk-Latn", ["QIZ qız"], ""),
    ("xx", ["a¨ `b´"], "dropped symbols: 1 ¨ ("),
    ("fr", ["l' homme", "qu' il, c'est"], "another tool: 1 l' homme, 1 qu' il ("),
    ("zh", ["什么?你"], ""),
    ("ru", ["Где?там Я»", "так"], "1 Где?там ("),
]


def misread(texts: Sequence[str], written_as: str, read_as: str) -> list[str]:
    return [text.encode(written_as).decode(read_as, "replace") for text in texts]


GERMAN = ["für Sie", "geöffnet", "große Öfen"]
RUSSIAN = ["привет, как дела", "введите номер конференции", "Спасибо за звонок"]
CHINESE = ["请输入您的密码", "会议现在开始 ok"]
MISREAD = [  # language, texts, the encodings they were written in and read as, what is noted
    ("de", GERMAN, "utf-8", "cp1252", "fÃ¼r for für"),
    ("de", GERMAN, "utf-8", "gb18030", "f眉r for für"),
    ("de", misread(GERMAN, "utf-8", "cp1252"), "utf-8", "cp1252", "fÃƒÂ¼r for für"),
    ("de", GERMAN, "cp1252", "mac-roman", "¸ for ü"),
    ("hu", ["őt és fűtő", "csövek", "kérem"], "cp1250", "cp1252", "õ for ő"),
    ("ru", RUSSIAN, "utf-8", "cp1251", "РїСЂРёРІРµС‚, for привет,"),
    ("ru", RUSSIAN, "cp1251", "cp1252", "î for о"),
    ("ru", RUSSIAN, "koi8-r", "cp1251", "Т for р"),
    ("zh", CHINESE, "gb18030", "cp1252", "ÇëÊäÈëÄúµÄÃÜÂë for 请输入您的密码"),
    ("xx", ["für café"], "utf-8", "cp1252", "fÃ¼r for für"),
    *((language, texts, "utf-8", "utf-8", "") for language, texts in (
        ("de", [*GERMAN, "„GROß“"]), ("fr", ["JOSÉ’S CAFÉ", "É»"]),
        ("sv", ["en idé på kafé", "Ärlig", "Öar"]),
        ("ru", RUSSIAN), ("be", ["сам", "фон"]), ("sr", ["žao čas š"]), ("zh", [*CHINESE, "撣語"]),
        ("xx", ["Gуам Farsıça"]), ("uk", ["Ті"]), ("th", ["ยก", "ยท"]), ("ur", ["سگ"]),
        ("hr", ["Müller Über", *["Još češće žuri"] * 9]), ("lv", ["Café Noël", *["Šķūņi, Čā"] * 9]),
    )),
]  # fmt: skip


@pytest.mark.parametrize(("language", "texts", "written_as", "read_as", "noted"), MISREAD)
def test_text_of_another_encoding_is_an_error_without_advice_for_a_language(
    language: str, texts: Sequence[str], written_as: str, read_as: str, noted: str, tmp_path: Path
) -> None:
    normalize = transcript_normalizer(language_table(language))
    rows = [
        spoken(f"{n}", normalize(text), sentence=text)
        for n, text in enumerate([*misread(texts, written_as, read_as)] * 20)
    ]
    splits = replace(splits_of(), train=make_store(rows), valid={}, test={})
    run = run_on(splits, tmp_path, language=language)
    findings = [
        f for f in check_data(run) if "equal" not in f.problem and "copies" not in f.problem
    ]
    stopping = [f.problem for f in findings if f.stops]
    assert [noted in problem and "another encoding" in problem for problem in stopping] == (
        [True] if noted else []
    )
    assert not noted or not any("loan words" in f.fix or "letter is" in f.fix for f in findings)


@pytest.mark.parametrize(
    ("language", "sentences", "noted"), [*(("en", *case) for case in CHANGED), *CHANGED_IN]
)
def test_what_transcripts_become_is_noted_once(
    language: str, sentences: Sequence[str], noted: str, tmp_path: Path
) -> None:
    numbers = "" if "digits" in noted or language != "en" else "en"
    normalize = transcript_normalizer(replace(language_table(language), numbers=numbers))
    rows = [
        spoken(f"{n}", normalize(sentence), sentence=sentence, divisor=4)
        for n, sentence in enumerate(sentences)
    ]
    splits = replace(splits_of("ann", "bob", "cy"), train=make_store(rows))
    run = run_on(splits, tmp_path, language=language)
    findings = [f for f in check_data(run) if f.problem.startswith("Texts have")]
    assert not any(finding.stops for finding in findings)
    assert bool(findings) == bool(noted)
    assert not noted or sum(noted in finding.problem for finding in findings) == 1


KEPT = {"case": "keep", "punctuation": [".", "?"]}


@pytest.mark.parametrize(
    ("texts", "noted"),
    [
        (["Hello there. OK?", "Is it you?", "NASA"], []),
        (
            ["hello there", "is it you"],
            ["0 of 2 transcripts of train have any capital", "have: . ?"],
        ),
        (
            ["HELLO THERE", "IS IT YOU", "Is it you?", "No."],
            ["2 of 4 transcripts of train have nothing but capitals"],
        ),
        (["Hello there.", "No."], ["`text.punctuation` declares marks that few or no transcripts"]),
        (["你好.", "是?"], []),  # without case
    ],
)
def test_capitals_and_marks_that_are_declared_occur_in_train(
    texts: Sequence[str], noted: Sequence[str], tmp_path: Path
) -> None:
    train = make_store(spoken(f"a{n}", text) for n, text in enumerate(texts))
    splits = replace(splits_of(), train=train, valid={}, test={})
    run = run_on(splits, tmp_path, text=KEPT)
    findings = [f for f in check_text_table(run) if f.where == run.spec.place("text")]
    assert len(findings) == len(noted) and not any(f.stops for f in findings)
    assert all(part in f.problem for part, f in zip(noted, findings, strict=True))
    assert [*check_text_table(run_on(splits, tmp_path / "plain"))] == []


def test_spaces_of_train_that_the_language_does_not_expect_are_noted(tmp_path: Path) -> None:
    for language, spaces, noted in (
        ("hak", False, "no "),
        ("th", True, "a WER"),
        ("zh", False, ""),
    ):
        table = replace(language_table(language), spaces=spaces)
        run = run_on(replace(splits_of(), table=table), tmp_path / language, language=language)
        assert [noted in f.fix for f in check_text_table(run) if "spaces" in f.problem] == (
            [True] if noted else []
        )


def test_one_text_for_all_clips_is_noted(tmp_path: Path) -> None:
    train = make_store(spoken(f"a{n}", "see sentence") for n in range(3))
    run = run_on(Splits(train, {"dev": train}, {}), tmp_path / "run")
    (finding,) = check_texts(run)
    assert finding.problem == "All 3 transcripts of train are 'see sentence'"
    assert not finding.stops


@pytest.mark.parametrize(
    ("num_silent", "num_sampled", "stops"), [(2, 3, False), (3, 3, True), (3, 2, True)]
)
def test_training_does_not_start_if_all_sampled_clips_are_silent(
    num_silent: int,
    num_sampled: int,
    stops: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sbkit.check.data.MAX_SAMPLED_CLIPS", num_sampled)
    rows = [spoken(f"a{n}", "hi", divisor=9999 if n < num_silent else 1) for n in range(3)]
    run = run_on(replace(splits_of(), train=make_store(rows)), tmp_path)
    (finding,) = check_silence(run)
    assert f"{min(num_silent, num_sampled)} of 3 in train" in finding.problem
    assert finding.stops == stops


@pytest.mark.parametrize(("rows", "advice"), [(60, "Nothing needs to be"), (3, "Correct these")])
def test_rare_foreign_characters_are_tolerated(rows: int, advice: str, tmp_path: Path) -> None:
    texts = ["the fox café", *["the quick fox"] * (rows - 1)]
    test = make_store(spoken(f"test{n}", text) for n, text in enumerate(texts))
    splits = replace(splits_of(), valid={}, test={"test": test})
    run = run_on(splits, tmp_path / "run")
    (finding,) = check_texts(run)
    assert f"1 of {rows} in test" in finding.problem
    assert advice in finding.fix
    assert not finding.stops


def test_check_data_counts_rows_left_out_by_reason(tmp_path: Path) -> None:
    lost = [Excluded(f"bad{n}", "unreadable audio", "it is empty", "train") for n in range(2)]
    lost.append(Excluded("cut", CUT_SHORT, "`duration` is 2.4 s", "train"))
    outside = [Excluded(f"long{n}", "longer than 9 s", "12.00 s", "train") for n in range(8)]
    splits = replace(splits_of(), excluded=lost, out_of_range=outside)
    run = run_on(splits, tmp_path / "run")
    cut, unusable, long = sorted(check_data(run), key=lambda finding: finding.problem)
    assert cut.problem == "The table cuts 1 clip of train short: cut (`duration` is 2.4 s)"
    assert unusable.problem.startswith(
        "train is without 2 rows (unreadable audio): bad0 (it is empty), bad1"
    )
    assert long.problem.startswith("train is without 8 rows (longer than 9 s): long0 (12.00 s), ")
    assert long.where == run.spec.place("max_seconds")


@pytest.mark.parametrize(
    ("sentence", "language", "replaced", "advice"),
    [
        ("In beiden Händen in Kopfho\u0308he, Straße", "en", "ä", "tables have these letters: de."),
        ("¿Cuántos niños están aquí?", "en", "á", "Set `language: es`"),
        ("Très bien, vous êtes déjà là, ça va?", "en", "ê", "Set `language: fr`"),
        ("Tôi không biết đường đi đến ga", "en", "ế", "Set `language: vi`"),
        ("Jag är på väg hem när det börjar snöa", "en", "ä", "Set `language: sv`"),
        ("In beiden Händen in Kopfhöhe, Straße", "de", "", ""),
        ("Ёлка и ещё решётка", "ru", "ё", "Nothing needs"),
        (f"The naïve fox has a café {LONG_TEXT}", "en", "é", "loan words"),
    ],
)
def test_check_data_names_the_language_of_replaced_letters(
    sentence: str, language: str, replaced: str, advice: str, tmp_path: Path
) -> None:
    text = normalize(sentence, language)
    rows = (spoken(f"a{n}", text, sentence=sentence) for n in range(30))
    splits = replace(splits_of(), train=make_store(rows), valid={}, test={})
    run = run_on(splits, tmp_path / "run", language=language)
    findings = [f for f in check_data(run) if "replaces" in f.problem]
    assert len(findings) == bool(replaced)
    for finding in findings:
        assert replaced in finding.problem
        assert advice in finding.fix
        assert finding.stops == ("Set `language" in finding.fix)


@pytest.mark.parametrize(
    ("sentences", "language", "stops", "advice"),
    [
        (["Привет, как дела"], "en", True, "such as ru, "),
        (["Привет, как дела", "and now a sentence in English"], "en", False, ""),
        (["Это новый большой Windows"], "ru", False, ""),
        (["A sentence in English"], "ru", True, "such as "),
        (["แมวกินน้ำ"], "en", True, "such as th."),
        (["今天天气很好", "OK"], "en", True, "such as ja, zh."),
        (["ሰላም እንዴት ነህ"], "de", True, "texts."),
        (["Ово је наш град", "Ovo je naš grad"], "sr", False, ""),
        (["これはJavaのテストです"], "ja", False, ""),
    ],
)
def test_text_in_another_script_than_that_of_the_language_is_an_error(
    sentences: list[str], language: str, stops: bool, advice: str, tmp_path: Path
) -> None:
    normalize = transcript_normalizer(language_table(language))
    rows = (spoken(f"{s}{n}", normalize(s), sentence=s) for n in range(9) for s in sentences)
    splits = Splits(make_store(rows), {}, {})
    run = run_on(splits, tmp_path / "run", language=language)
    findings = [f for f in check_data(run) if "another script than those" in f.problem]
    assert [f.stops for f in findings] == [True] * stops
    assert all(advice in f.fix and f.where == run.spec.place("language") for f in findings)


def test_dev_without_any_transcript_is_an_error(tmp_path: Path) -> None:
    for dev in ([""], ["", "one"]):
        valid = {"dev": make_store(spoken(f"dev{n}", text) for n, text in enumerate(dev))}
        run = run_on(replace(splits_of(), valid=valid), tmp_path / "run")
        (finding,) = (f for f in check_texts(run) if "without a transcript" in f.problem)
        assert finding.stops == (dev == [""])


def test_two_speakers_of_a_voice_are_noted_with_the_way_to_take_one(tmp_path: Path) -> None:
    train = [spoken(f"a{n}", f"text {n}", speaker=s) for n, s in enumerate(("bob", "ann", "bob"))]
    splits = replace(splits_of("", "ann", "ann"), train=make_store(train))
    run = run_on(splits, tmp_path / "run", TtsRecipe)
    (finding,) = (f for f in check_data(run) if "speaker" in f.problem)
    assert finding.problem == "One voice is trained on 2 speakers: bob, ann"
    assert (finding.fix, finding.stops) == ("Keep one of them: `where: {speaker: bob}`.", False)


def test_checks_of_texts_skip_labels_that_are_not_text(tmp_path: Path) -> None:
    run = run_on(splits_of(), tmp_path / "run")
    names = ensure_labels(tmp_path / "labels.txt", ["en", "fr"])
    run = replace(run, data=SimpleNamespace(**{**vars(run.data), "labels": names}))
    assert [*check_texts(run), *check_text_table(run)] == []  # though there is text, and `encode`


@pytest.mark.parametrize(
    ("speakers", "num_findings"),
    [
        (("ann", "ann", "ann"), 0),  # no split could part a single speaker
        (("ann", "bob", "bob"), 1),
        (("ann", "bob", ""), 0),
    ],
)
def test_check_data_finds_a_shared_speaker_unless_it_is_the_only_one(
    tmp_path: Path, speakers: tuple[str, str, str], num_findings: int
) -> None:
    run = run_on(splits_of(*speakers), tmp_path / "run")
    findings = list(check_data(run))
    assert len(findings) == num_findings
    assert all("speaker" in finding.problem and not finding.stops for finding in findings)


@pytest.mark.parametrize(("divisors", "stops"), [((1, 20), False), ((1, 2, 20), True)])
def test_set_is_worthless_if_more_than_half_of_its_clips_were_trained_on(
    divisors: Sequence[int], stops: bool, tmp_path: Path
) -> None:
    test = make_store(spoken(f"test{n}", f"a fox {n}", divisor=n) for n in divisors)
    run = run_on(replace(splits_of(), test={"test": test}), tmp_path / "run")
    (finding,) = (f for f in check_data(run) if "so its score measures memory" in f.problem)
    assert finding.stops == stops


def test_rows_whose_column_names_another_split_are_noted(tmp_path: Path) -> None:
    stores = splits_of("ann", "bob", "cy")
    column = ["train", "dev", "test-clean"]
    train = stores.train.add_column("split", column)
    dev = stores.valid["dev"].add_column("split", ["validation", "dev", ""])
    splits = replace(stores, train=train, valid={"dev": dev})
    run = run_on(splits, tmp_path / "run")
    (finding,) = check_data(run)
    assert "train has rows whose column `split` names another split: " in finding.problem
    assert finding.problem.endswith(": 1 dev, 1 test-clean")


def findings_on(run: Path, checks: Sequence[Check], **settings: object) -> list[Finding]:
    settings["output_folder"] = str(run)
    declared = declare_run(ROOT / "hparams/ctc.yaml", settings, recipe=AsrRecipe)
    return check_run(declared, checks=checks).findings


def test_default_corpus_has_no_findings(asterisk_english: Path, tmp_path: Path) -> None:
    checks = (check_labels, *CHECKS, check_data, check_silence)
    assert findings_on(tmp_path / "run", checks, data_folder=str(asterisk_english)) == []


# Rates of the model, and of the files of train; and what is noted. Those of dev: 16 and 44.1 kHz
RATES = [
    (16_000, [8_000] * 3, "train (3 of 3: 8,000 Hz)"),
    (
        48_000,
        [16_000, 8_000, 16_000],
        "train (2 of 3: 16,000 Hz, 1 of 3: 8,000 Hz), dev (1 of 2: 16",
    ),
    (16_000, [8_000] + [16_000] * 19, ""),
    (16_000, [8_000] + [16_000] * 18, "train (1 of 19: 8,000 Hz)"),
    (24_000, [22_050] * 3, "dev (1 of 2: 16,000 Hz)"),
]


@pytest.mark.parametrize(("rate", "train", "noted"), RATES)
def test_files_that_lack_the_high_band_of_the_model_are_noted_by_split(
    rate: int, train: list[int], noted: str, tmp_path: Path
) -> None:
    """A codec for 48 kHz was trained on files of 16 kHz, and no line or report said so."""
    tables = {}
    for split, rates in {"train": train, "dev": [16_000, 44_100]}.items():
        rows = ["path,text"]
        for number, file_rate in enumerate(rates):
            file = tmp_path / f"{split}{number}.wav"
            soundfile.write(file, np.random.default_rng().normal(0, 0.1, file_rate), file_rate)
            rows.append(f"{file},{split} {number * 'a'}")
        tables[split] = str(tmp_path / f"{split}.csv")
        Path(tables[split]).write_text("\n".join(rows))
    findings = findings_on(tmp_path / "run", [check_data], manifest=tables, sample_rate=rate)
    problems = [f"{f.where}: {f.problem}" for f in findings if "lower rate" in f.problem]
    assert len(problems) == bool(noted)
    assert all("sample_rate" in problem and noted in problem for problem in problems)


def test_channels_that_cancel_each_other_out_are_noted(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    speech = random.normal(0, 0.1, 32_000)
    turns = np.repeat([1.0, 0.0, 1.0, 0.0], 8_000)
    pairs = {
        "call": (speech * turns, speech * (1 - turns)),
        "opposite": (speech, -speech),
        "equal": (speech, speech),
    }
    tables = {}
    for split, count in (("train", 4), ("dev", 1), ("test", 1)):
        rows = ["path,text"]
        for name, pair in pairs.items():
            for number in range(count):
                file = tmp_path / f"{split}-{name}-{number}.wav"
                soundfile.write(file, np.stack(pair, 1) * (1 - 0.1 * number), 16_000)
                rows.append(f"{file},{split} {name} {number}")
        tables[split] = str(tmp_path / f"{split}.csv")
        Path(tables[split]).write_text("\n".join(rows))
    findings = findings_on(tmp_path / "run", [check_channels], manifest=tables)
    assert [finding.problem.partition(" (")[0] for finding in findings] == [
        "The two channels of clips cancel each other out, but are downmixed: 4 of 12 in train, 1 "
        "of 3 in dev, 1 of 3 in test",
    ]
    assert not any(finding.stops for finding in findings)

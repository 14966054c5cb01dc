"""Ranges, keys that nothing reads, the target machine, and the run folder."""

import re
import shutil
from pathlib import Path

import pytest

from sbkit.base.errors import BAD_INPUT, ConfigError, SbkitError
from sbkit.check.check import check_run
from sbkit.check.checked_run import Finding
from sbkit.check.settings import check_needs, check_run_folder, check_unread
from sbkit.config.document import read_document
from sbkit.config.hparams import RunSpec, make_spec, read_spec
from sbkit.config.overrides import parse_overrides
from sbkit.distributed.device import device_counter_for, resolve_placement
from sbkit.train.recipe import load_recipe
from sbkit.train.setup import declare_run, keys_of, require_files_of_run
from tests.check.harness import declared_run
from tests.checkpoint.saves import training
from tests.runs import ROOT, TINY, TINY_VOICE, Workplace, contents_of, times_of

OPTIONS = ("--number_of_epochs=2", "--average_checkpoints=2")


LM_ORDERS = ["word_lm_order=1", "token_lm_order=1"]
OFF = (
    *("word_lm_order=0", "token_lm_order=0", "ctc_weight=1", "average_checkpoints=2"),
    *("pause_prob=0", "time_masks=0", "freq_masks=0", "encoder_module=transformer"),
    *("manifest={train: a.csv}", "init_from=null"),
)
NEEDS = {  # of each key: another value, and what each turns it on
    "lm_text": ("a.txt", LM_ORDERS),
    "beam_size": ("7", [*LM_ORDERS, "ctc_weight=0.99"]),
    "label_smoothing": ("0.3", ["ctc_weight=0.99"]),
    "ema_decay": ("0.9", ["average_checkpoints=1"]),
    "split_shares": ("{dev: 0.3}", ["manifest={all: a.csv}"]),
    "init_from_differs": ("[text]", ["init_from=a"]),
    "pause_seconds": ("3.5", ["pause_prob=0.01"]),
    "time_width": ("3", ["time_masks=1"]),
    "max_time_fraction": ("0.3", ["time_masks=1"]),
    "freq_width": ("3", ["freq_masks=1"]),
    "kernel_size": ("3", ["encoder_module=conformer"]),
    "keep_better_start": ("False", ["init_from=a"]),
}


def noted(folder: Path, text: str, *options: str) -> set[str]:
    """Return the keys of the notes on a YAML and its options."""
    (folder / "own.yaml").write_text(text)
    overrides = parse_overrides([f"--{option}" for option in options])
    findings = [*check_needs(declare_run(folder / "own.yaml", overrides))]
    assert not any(finding.stops for finding in findings)
    return {finding.problem.split("`")[1] for finding in findings}


def test_value_that_others_turn_off_is_noted_if_the_user_gave_it(tmp_path: Path) -> None:
    base = f"base: {ROOT}/hparams/ctc.yaml\n"
    copy = (ROOT / "hparams/ctc.yaml").read_text()
    changed = [f"{key}: {value}" for key, (value, _) in NEEDS.items()]
    options = [f"{key}={value}" for key, (value, _) in NEEDS.items()]
    own = base + "\n".join(changed)
    assert noted(tmp_path, own, *OFF) == noted(tmp_path, base, *OFF, *options) == {*NEEDS}
    assert noted(tmp_path, base, *OFF) == noted(tmp_path, copy, *OFF) == set()
    lines = [line for line in copy.splitlines() if line.split(":")[0] not in NEEDS]
    assert noted(tmp_path, "\n".join([*changed, *lines]), *OFF) == {*NEEDS}
    without = f"{base}attention_rescoring: False\n"
    assert noted(tmp_path, without, *OFF) == set()  # it is off in any case
    assert noted(tmp_path, without, *OFF, "attention_rescoring=True") == {"attention_rescoring"}
    for option in {option for _, turn_on in NEEDS.values() for option in turn_on}:
        still_off = {key for key, (_, turn_on) in NEEDS.items() if option not in turn_on}
        assert noted(tmp_path, own, *OFF, option) == still_off


FORMS: dict[str, tuple[object, object]] = {  # of `needs`: a value in this form, and another
    "above 0": (1, 0),
    "below 1": (0.5, 1),
    "1": (1, 2),
    "set": ("a", None),
    "a mapping with `all`": ({"all": "a.csv"}, {"train": "a.csv"}),
    "conformer or branchformer": ("conformer", "transformer"),
}


def spec_of(yaml: Path, overrides: dict[str, object]) -> RunSpec:
    """Declare a run without the sizes of its pretrained encoder."""
    document = read_document(yaml)
    return make_spec(document, overrides, keys=keys_of(document, overrides))


@pytest.mark.parametrize("yaml", ["codec.yaml", "ctc.yaml", "ctc_pretrained.yaml", "vad.yaml"])
def test_advice_about_a_value_that_others_turn_off_is_accepted(yaml: str) -> None:
    def notes(key: str, overrides: dict[str, object]) -> list[str]:
        spec = spec_of(ROOT / "hparams" / yaml, overrides)
        return [f.problem for f in check_needs(spec) if f.problem.startswith(f"`{key}` needs ")]

    folder = {"data_folder": "/data"}
    spec = spec_of(ROOT / "hparams" / yaml, folder)
    settings = spec.settings
    num_checked = 0
    for key, declared in spec.keys.items():
        needs = {name: need.text for name, need in declared.needs.items()}
        value = settings.get(key)
        other = not value if isinstance(value, bool) else "a" if value is None else value
        other = other + 1 if isinstance(value, float) or type(value) is int else other
        has_effect = other is not False or key in spec.defaults
        if not needs or key not in settings or not has_effect or isinstance(value, list):
            continue
        changes = {**folder, key: other}
        off = {name: FORMS[form][1] for name, form in needs.items() if name in settings}
        (note,) = notes(key, off | changes)
        advised = re.findall(rf"`(\w+)` ({'|'.join(map(re.escape, FORMS))})", note)
        assert dict(advised) == needs
        for name, form in advised:
            if name in settings:
                assert not notes(key, off | changes | {name: FORMS[form][0]})
        if key not in spec.document.own_keys:  # else the YAML gives it as well
            assert not notes(key, folder | off)
        num_checked += 1
    assert num_checked > 1


@pytest.mark.parametrize(
    ("yaml", "key", "file"),
    [
        ("vad", "checkpointer.checkpoints_dir", "checkpoints"),
        ("ctc", "tokenizer.model_file", "tokenizer.model"),
        ("ctc", "decoder.language_models", "lm.safetensors"),
        ("tts", "labels.file", "symbols.txt"),
        ("whisper", "decoder_tokenizer.file", "decoder_tokenizer.json"),
    ],
)
def test_objects_of_a_run_use_its_own_files(yaml: str, key: str, file: str, tmp_path: Path) -> None:
    """Texts were encoded with the tokenizer of the run, and decoded with another one."""
    spec = read_spec(ROOT / f"hparams/{yaml}.yaml", {"output_folder": f"{tmp_path}/./run"})
    recipe = load_recipe(spec)
    require_files_of_run(spec, recipe)
    with pytest.raises(
        ConfigError, match=f"uses its own {spec.folder / file}, but `{key}`"
    ) as told:
        require_files_of_run(spec.with_overrides(**{key: f"/elsewhere/{file}"}), recipe)
    assert told.value.keys == (*key.split("."),)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("yaml", "options"),
    [
        ("codec", ("--d_model=16", "--d_ffn=32")),
        ("ctc", TINY),
        ("ctc_large", (*TINY, "--vocab_size=50", "--num_workers=0", "--precision=fp32")),
        ("ctc_speechbrain", ()),
        ("ctc_streaming", TINY),
        ("tts", TINY_VOICE),
        ("vad", ()),
    ],
)
def test_every_yaml_passes_the_check_but_for_a_key_that_nothing_reads(
    yaml: str, options: tuple[str, ...], workplace: Workplace, tmp_path: Path
) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(f"base: {ROOT / 'hparams' / yaml}.yaml\nforgotten_setting: 3\n")
    options = ("--device=cpu", "--batch_seconds=6", *options)
    run = tmp_path / "run"
    with declared_run(workplace, run, *options, recipe=None, yaml=file, tiny=()) as declared:
        findings = check_run(declared).findings
        # The convolutions of SpeechBrain see padding, as ctc_speechbrain.yaml says itself.
        (finding,) = (finding for finding in findings if finding.check != "padding")
        assert finding.where == f"{file}:2"


def test_target_counts_as_the_machine() -> None:
    for target, device, expected_device in (
        ("cuda:8", None, "cuda:0"),
        ("cuda:8", "cuda:7", "cuda:7"),
        ("cpu", None, "cpu"),
    ):
        placement = resolve_placement(device, "fp32", count=device_counter_for(target))
        assert str(placement.device) == expected_device
    with pytest.raises(SbkitError, match="but the target has"):
        resolve_placement("mps", "fp32", count=device_counter_for("cuda:8"))
    for target in ("cuda:0", "gpu"):
        with pytest.raises(SbkitError, match="`--target` "):
            device_counter_for(target)


@pytest.fixture(scope="module")
def trained(workplace: Workplace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("trained") / "run"
    assert workplace.train_here(run, *OPTIONS) == 0
    return run


def check_resumed(workplace: Workplace, run: Path, *options: str) -> list[Finding]:
    with declared_run(workplace, run, *OPTIONS, *options) as declared:
        return check_run(declared, checks=[check_run_folder]).findings


@pytest.mark.parametrize(
    ("yaml", "options", "where"),
    [
        ("vad", ("--rnn.hidden_size=24", "--speech_lin.in_features=24", "--d_model=48"), "d_model"),
        (
            "codec",
            (
                *("--d_model=16", "--d_ffn=32", "--adversarial_weight=0.1"),
                "--optimizers.discriminator.opt_class.lr=0.0001",
                "--discriminator_lr=0.0003",
            ),
            "discriminator_lr",
        ),
    ],
)
def test_key_of_a_recipe_whose_references_are_replaced_is_named(
    yaml: str, options: tuple[str, ...], where: str, workplace: Workplace, tmp_path: Path
) -> None:
    file = ROOT / "hparams" / f"{yaml}.yaml"
    options = ("--device=cpu", "--batch_seconds=6", *options)
    run = tmp_path / "run"
    with declared_run(workplace, run, *options, recipe=None, yaml=file, tiny=()) as declared:
        (finding,) = check_run(declared, checks=[check_unread]).findings
        assert finding.where == f"override of {where}"
        assert finding.problem.startswith(f"`{where}` has no effect, because `")


@pytest.mark.slow
def test_run_resumed_with_more_epochs_is_healthy_and_untouched(
    workplace: Workplace, trained: Path
) -> None:
    before = times_of(trained)
    assert check_resumed(workplace, trained, "--number_of_epochs=3") == []
    assert times_of(trained) == before


@pytest.mark.slow
def test_replaced_tokenizer_is_found(workplace: Workplace, trained: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    model = (run / "tokenizer.model").read_bytes()
    swapped = bytearray(model)
    first, second = model.index(b"\n\x01e") + 2, model.index(b"\n\x01t") + 2
    swapped[first], swapped[second] = model[second], model[first]  # the letters under other ids
    (run / "tokenizer.model").write_bytes(swapped)
    (finding,) = check_resumed(workplace, run)
    assert "the labels in tokenizer.model: " in finding.problem
    assert finding.stops
    before = contents_of(run, "lm.*")
    models = ("--word_lm_order=2", "--token_lm_order=2")
    assert workplace.train_here(run, *OPTIONS, *models) == BAD_INPUT
    assert contents_of(run, "lm.*") == before


@pytest.mark.slow
def test_finished_run_refuses_another_corpus_and_keeps_its_results(
    workplace: Workplace, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    release = Path(shutil.copytree(workplace.release, tmp_path / "release"))
    other = Workplace(release, workplace.cache)
    before = contents_of(trained)
    assert other.train_here(trained, *OPTIONS) == 0  # the same corpus has moved
    assert "stay as they are" in capsys.readouterr().out
    after = contents_of(trained)
    for name in ("summary.json", "wer_test.txt", "train_log.jsonl"):
        assert after[name] == before[name]

    lines = (release / "train.tsv").read_text().splitlines()
    (release / "train.tsv").write_text("\n".join(lines[:-2]) + "\n")
    for check_first in ("True", "False"):
        assert other.train_here(trained, *OPTIONS, f"--check={check_first}") == BAD_INPUT
        error = capsys.readouterr().err
        assert "the data of `train`: " in error
        assert contents_of(trained) == after


@pytest.mark.slow
def test_second_run_in_a_held_folder_is_refused_and_writes_nothing(
    workplace: Workplace, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    before = times_of(run)
    with training(run):
        assert workplace.train_here(run, *OPTIONS, "--max_seconds=3") == BAD_INPUT
    assert f"{run}, " in capsys.readouterr().err
    assert times_of(run) == before


def test_config_prints_the_parts_as_a_tree(
    workplace: Workplace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--freeze={CNN: always, Transformer.encoder.2: 9}", "--num_encoder_layers=4")
    arguments = workplace.arguments(tmp_path / "run", *options)
    workplace.sbkit("config", *arguments, "--parts")
    table, outside = capsys.readouterr().out.split("outside of `model`")
    for facts in (
        r"CNN +ConvFrontEnd +[\d,]+ +no +float32, int64 +\S+$",
        r"0-1 +ConformerBlock +2 x [\d,]+ +yes +float32 +\S+ +opt_class$",
        r"2 +ConformerBlock +[\d,]+ +except in steps 1 to 9 +float32 +\S+ +opt_class$",
    ):
        assert re.search(rf"(?m)^ +{facts}", table), table
    assert "compute_features" in outside and not (tmp_path / "run").exists()

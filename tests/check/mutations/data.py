"""One fault each in labels, alignment and the data."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import numpy as np
import soundfile
from sentencepiece import sentencepiece_model_pb2

from recipes.asr.recipe import AsrRecipe
from sbkit.text.tokenizer import Tokenizer, ensure_tokenizer
from tests.check.harness import Edit, changed, error, mutation, note
from tests.runs import rows_of

Row = dict[str, str]
LETTERS = f"{ascii_lowercase} '"


def rewrite(release: Path, split: str, rows: list[Row]) -> None:
    lines = ["\t".join(rows[0]), *("\t".join(row.values()) for row in rows)]
    (release / f"{split}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")


def sentences(split: str, change: Callable[[str], str], num_rows: int | None = 1) -> Edit:
    def edit(release: Path) -> None:
        rows = rows_of(release / f"{split}.tsv")
        for row in rows[:num_rows]:
            row["sentence"] = change(row["sentence"])
        rewrite(release, split, rows)

    return edit


def six_times(text: str) -> str:
    return " ".join([text] * 6)


def roomy(*edits: Edit) -> Edit:
    """Make train three times as large first, so that losing two clips is tolerated."""

    def edit(release: Path) -> None:
        rows = rows_of(release / "train.tsv")
        more = [row | {"path": f"{n}{row['path']}"} for n in (1, 2) for row in rows]
        for row in more:
            samples, rate = soundfile.read(release / "clips" / row["path"][1:])
            volume = 0.5 + 0.2 * int(row["path"][0])
            soundfile.write(release / "clips" / row["path"], samples * volume, rate)
        rewrite(release, "train", rows + more)
        for edit_more in edits:
            edit_more(release)

    return edit


def with_silence(release: Path) -> None:
    clip = release / "clips" / rows_of(release / "train.tsv")[0]["path"]
    samples, rate = soundfile.read(clip)
    soundfile.write(clip, 0 * samples, rate)


def with_recordings_in_dev(release: Path) -> None:
    for row in rows_of(release / "dev.tsv"):
        samples, rate = soundfile.read(clip := release / "clips" / row["path"])
        soundfile.write(clip, np.resize(samples, 35 * rate), rate)


def with_cut_file(release: Path) -> None:
    clip = release / "clips" / rows_of(release / "train.tsv")[0]["path"]
    clip.write_bytes(clip.read_bytes()[: clip.stat().st_size // 2])


def with_torn_row(release: Path) -> None:
    with (release / "train.tsv").open("a", encoding="utf-8") as file:
        file.write("allison\tno sentence\n")


def with_shared_sentence(release: Path) -> None:
    text = rows_of(release / "train.tsv")[0]["sentence"]
    sentences("test", lambda _: f"{text.upper()}!")(release)


def with_train_as_dev(release: Path) -> None:
    shutil.copy2(release / "train.tsv", release / "dev.tsv")


def tokenizer_of(letters: str, **names: str) -> Edit:
    """Put a tokenizer of these letters into the run folder; ``names`` renames its pieces."""

    def edit(run: Path) -> None:
        file = run / "tokenizer.model"
        ensure_tokenizer(
            model_file=file, token_type="char", vocab_size=None, texts=lambda: [letters]
        )
        model = sentencepiece_model_pb2.ModelProto()
        model.ParseFromString(file.read_bytes())
        for name, piece in names.items():
            setattr(model.trainer_spec, name, piece)
        file.write_bytes(model.SerializeToString())

    return edit


class Overflowing(Tokenizer):
    """Ends each transcript with an id beyond the vocabulary."""

    def encode(self, text: str) -> list[int]:
        return [*super().encode(text), self.vocab_size]


class WrongBlank(Tokenizer):
    """Takes the most common letter for the blank."""

    def __init__(self, *, model_file: Path) -> None:
        super().__init__(model_file=model_file)
        self.vocabulary = replace(self.vocabulary, blank=self.pieces().index("e"))


def tokenizing(tokenizer: type[Tokenizer]) -> type[AsrRecipe]:
    def prepare_labels(self: AsrRecipe, settings: Any, splits: Any) -> Tokenizer:
        return tokenizer(model_file=AsrRecipe.prepare_labels(settings, splits).model_file)

    return changed(prepare_labels=prepare_labels)


SEQ_LIN = "seq_lin: !new:torch.nn.Linear\n    in_features: !ref <d_model>\n    out_features: "


MUTATIONS = [
    mutation(
        "a head and an embedding of sizes typed by hand",
        error("run", "seq_lin", "has 20"),
        text=(
            (f"{SEQ_LIN}!ref <tokenizer.vocab_size>", f"{SEQ_LIN}20"),
            ("vocab_size: !ref <tokenizer.vocab_size>", "vocab_size: 60"),
        ),
    ),
    mutation(
        "a tokenizer of another text",
        note("texts", "data_folder", "in train", "`output_folder`"),
        run=tokenizer_of(LETTERS.replace("v", "")),
    ),
    mutation(
        "a blank that is a letter",
        error("texts", "tokenizer", "15 of 16 in train", "outside 0 to"),
        recipe=tokenizing(WrongBlank),
    ),
    mutation(
        "a start that is the end",
        error("run", "tokenizer", "'bos': 3, 'eos': 3"),
        run=tokenizer_of(LETTERS, bos_piece="</s>"),
    ),
    mutation(
        "a label beyond the vocabulary",
        error("texts", "tokenizer", "4 of 4 in test"),
        recipe=tokenizing(Overflowing),
    ),
    mutation(
        "only recordings in dev, to which no decoder can be fitted",
        error("run", "eval_batch_seconds", "utterances of dev, but all 4 recordings there are"),
        release=with_recordings_in_dev,
        options=("--eval_batch_seconds=20", "--word_lm_order=2"),
    ),
    mutation(
        "a report by a column that no test set has",
        error("run", "report_by", "names `dialect`"),
        options=("--report_by=[dialect]",),
    ),
    mutation(
        "a subsampling twice as wide",
        error("alignment", "data_folder", "80 ms frames", "in train", "token_type: bpe"),
        note("padding", "model"),  # of convolutions without lengths
        yaml="hparams/ctc_speechbrain.yaml",
        text=(
            ("    subsampling: 4\n", "    subsampling: 8\n"),
            ("strides: [2, 2]", "strides: [4, 2]"),
            ("<n_mels> // 4 *", "<n_mels> // 8 *"),
        ),
    ),
    mutation(
        "all transcripts with more characters than frames",  # Parakeet's are of 80 ms
        error("run", "token_type", "all 16 transcripts", "token_type: bpe"),
        release=sentences("train", six_times, num_rows=None),
    ),
    mutation(
        "a speed at which nothing fits",
        error("alignment", "speeds", "in train"),
        options=("--speeds=[1.0, 2.5]",),
    ),
    *(
        mutation(
            f"a transcript too long for its clip in {split}",
            note("alignment", "data_folder", f"1 of {rows} in {split}"),
            release=sentences(split, six_times),
        )
        for split, rows in (("train", 16), ("test", 4))
    ),
    mutation(
        "a clip cut in the middle of its file",
        note("data", "data_folder", "train is without 1 row", "unreadable"),
        release=roomy(with_cut_file),
    ),
    mutation(
        "a clip of silence",
        note("silence", "data_folder", "1 of 16 in train", "silent"),
        release=with_silence,
    ),
    mutation(
        "an empty transcript in test",
        note("texts", "data_folder", "1 of 4 in test", "a transcript"),
        release=sentences("test", lambda _: "…"),
    ),
    mutation(
        "an empty transcript and a torn row in train",
        note("data", "data_folder", "empty transcript"),
        note("data", "data_folder", "wrong number of fields"),
        release=roomy(sentences("train", lambda _: "…"), with_torn_row),
    ),
    mutation(
        "a sentence in two splits",
        note("data", "data_folder", "1 of 4 sentences in test"),
        release=with_shared_sentence,
    ),
    mutation(
        "a validation set that is the training set",
        error("data", "data_folder", "16 of 16 clips in dev are in train"),
        note("data", "data_folder", "15 of 15 sentences in dev"),
        release=with_train_as_dev,
    ),
    mutation(
        "a misspelled manifest in the YAML",
        error("run", "manifest.train", "trian.tsv does not exist"),
        text=(("manifest: null", "manifest: {train: trian.tsv, dev: a.tsv}"),),
        options=("--data_folder=null",),
    ),
]

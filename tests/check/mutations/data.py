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

from sbkit.text.tokenizer import Tokenizer, ensure_tokenizer
from sbkit.train.recipe import Recipe
from tests.check.harness import Edit, Expected, Mutation
from tests.runs import rows_of

Row = dict[str, str]
LETTERS = f"{ascii_lowercase} '"


# -- edits of a release ------------------------------------------------------------------------


def rewrite(release: Path, split: str, rows: list[Row]) -> None:
    lines = ["\t".join(rows[0]), *("\t".join(row.values()) for row in rows)]
    (release / f"{split}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")


def sentence(split: str, change: Callable[[str], str]) -> Edit:
    """Change the first sentence of a split."""

    def edit(release: Path) -> None:
        first, *rest = rows_of(release / f"{split}.tsv")
        rewrite(release, split, [first | {"sentence": change(first["sentence"])}, *rest])

    return edit


def longer(times: int) -> Callable[[str], str]:
    return lambda text: " ".join([text] * times)


def audio(split: str, change: Callable[[np.ndarray], np.ndarray]) -> Edit:
    """Change the first clip of a split."""

    def edit(release: Path) -> None:
        clip = release / "clips" / rows_of(release / f"{split}.tsv")[0]["path"]
        samples, rate = soundfile.read(clip)
        soundfile.write(clip, change(samples), rate)

    return edit


def roomy(*edits: Edit) -> Edit:
    """Make train three times as large first, so that losing one clip is tolerated."""

    def edit(release: Path) -> None:
        rows = rows_of(release / "train.tsv")
        more = [row | {"path": f"{n}{row['path']}"} for n in (1, 2) for row in rows]
        for row in more:
            samples, rate = soundfile.read(release / "clips" / row["path"][1:])
            soundfile.write(
                release / "clips" / row["path"], samples * (0.5 + 0.2 * int(row["path"][0])), rate
            )
        rewrite(release, "train", rows + more)
        for apply in edits:
            apply(release)

    return edit


def with_cut_file(release: Path) -> None:
    clip = release / "clips" / rows_of(release / "train.tsv")[0]["path"]
    clip.write_bytes(clip.read_bytes()[: clip.stat().st_size // 2])


def with_torn_row(release: Path) -> None:
    with (release / "train.tsv").open("a", encoding="utf-8") as file:
        file.write("allison\tno sentence\n")


def with_long_transcripts(release: Path) -> None:
    rows = rows_of(release / "train.tsv")
    rewrite(release, "train", [row | {"sentence": longer(6)(row["sentence"])} for row in rows])


def with_shared_sentence(release: Path) -> None:
    text = rows_of(release / "train.tsv")[0]["sentence"]
    sentence("test", lambda _: f"{text.upper()}!")(release)


def with_train_as_dev(release: Path) -> None:
    shutil.copy2(release / "train.tsv", release / "dev.tsv")


# -- edits of the tokenizer --------------------------------------------------------------------


def tokenizer_of(letters: str, **names: str) -> Edit:
    """Put a tokenizer of these letters into the run folder; ``names`` renames its pieces."""

    def edit(run: Path) -> None:
        file = run / "tokenizer.model"
        ensure_tokenizer(model_file=file, kind="char", vocab_size=None, texts=lambda: [letters])
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


def tokenizing(tokenizer: type[Tokenizer]) -> Callable[[Recipe], Recipe]:
    def edit(recipe: Recipe) -> Recipe:
        def prepare_labels(knobs: Any, splits: Any) -> Tokenizer:
            return tokenizer(model_file=recipe.prepare_labels(knobs, splits).model_file)

        return replace(recipe, prepare_labels=prepare_labels)

    return edit


SEQ_LIN = "seq_lin: !new:torch.nn.Linear\n    in_features: !ref <d_model>\n    out_features: "


MUTATIONS = [
    Mutation(
        name="a head and an embedding of sizes typed by hand",
        text=(
            (f"{SEQ_LIN}!ref <tokenizer.vocab_size>", f"{SEQ_LIN}20"),
            ("vocab_size: !ref <tokenizer.vocab_size>", "vocab_size: 60"),
        ),
        expected=(
            Expected("labels", "seq_lin", ("has 20",)),
            Expected("labels", "Transformer", ("has 60",)),
        ),
    ),
    Mutation(
        name="a tokenizer of another text",
        run=tokenizer_of(LETTERS.replace("v", "")),
        expected=(Expected("labels", "data_folder", ("in train", "--output_folder"), False),),
    ),
    Mutation(
        name="a blank that is a letter",
        recipe=tokenizing(WrongBlank),
        expected=(Expected("labels", "tokenizer", ("15 of 16 in train", "outside 0 to")),),
    ),
    Mutation(
        name="a start that is the end",
        run=tokenizer_of(LETTERS, bos_piece="</s>"),
        expected=(Expected("labels", "tokenizer", ("'bos': 3, 'eos': 3",)),),
    ),
    Mutation(
        name="a label beyond the vocabulary",
        recipe=tokenizing(Overflowing),
        expected=(Expected("labels", "tokenizer", ("4 of 4 in test",)),),
    ),
    Mutation(
        name="a report by a column that no test set has",
        options=("--report_by=[dialect]",),
        expected=(Expected("splits", "report_by", ("names `dialect`",)),),
    ),
    Mutation(
        name="a subsampling twice as wide",
        yaml="hparams/ctc_speechbrain.yaml",
        text=(("strides: [2, 2]", "strides: [4, 2]"), ("<n_mels> // 4 *", "<n_mels> // 8 *")),
        expected=(
            Expected("alignment", "data_folder", ("80 ms frames", "in train", "--token_type=bpe")),
            Expected("padding", "model", stops=False),  # of convolutions without lengths
        ),
    ),
    Mutation(
        name="all transcripts with more characters than frames",  # Parakeet's are of 80 ms
        release=with_long_transcripts,
        expected=(
            Expected(
                "loaders",
                "token_type",
                ("all 16 transcripts", "frames of 40 ms", "frames, ", "--token_type=bpe"),
            ),
        ),
    ),
    Mutation(
        name="a speed at which nothing fits",
        options=("--speeds=[1.0, 2.5]",),
        expected=(Expected("alignment", "speeds", ("in train",)),),
    ),
    *(
        Mutation(
            name=f"a transcript too long for its clip in {split}",
            release=sentence(split, longer(6)),
            expected=(Expected("alignment", "data_folder", (f"1 of {rows} in {split}",), False),),
        )
        for split, rows in (("train", 16), ("dev", 4), ("test", 4))
    ),
    Mutation(
        name="a clip cut in the middle of its file",
        release=roomy(with_cut_file),
        expected=(
            Expected("data", "data_folder", ("train is without 1 row", "unreadable"), stops=False),
        ),
    ),
    Mutation(
        name="a row that is torn",
        release=roomy(with_torn_row),
        expected=(Expected("data", "data_folder", ("wrong number of fields",), stops=False),),
    ),
    Mutation(
        name="a clip of silence",
        release=audio("train", np.zeros_like),
        expected=(Expected("silence", "data_folder", ("1 of 16 in train", "silent"), stops=False),),
    ),
    Mutation(
        name="an empty transcript in test",
        release=sentence("test", lambda text: "…"),
        expected=(
            Expected("labels", "data_folder", ("1 of 4 in test", "a transcript"), stops=False),
        ),
    ),
    Mutation(
        name="an empty transcript in train",
        release=roomy(sentence("train", lambda text: "…")),
        expected=(Expected("data", "data_folder", ("empty transcript",), stops=False),),
    ),
    Mutation(
        name="a sentence in two splits",
        release=with_shared_sentence,
        expected=(Expected("data", "data_folder", ("1 of 4 sentences in test",), stops=False),),
    ),
    Mutation(
        name="a validation set that is the training set",
        release=with_train_as_dev,
        expected=(
            Expected("data", "data_folder", ("16 of 16 clips in dev are in train",)),
            Expected("data", "data_folder", ("15 of 15 sentences in dev",), stops=False),
        ),
    ),
    Mutation(
        name="one step an epoch",
        options=("--batch_seconds=100000",),
        expected=(Expected("batches", "--batch_seconds", ("of train make 1",), stops=False),),
    ),
    Mutation(
        name="a misspelled manifest on the command line",
        options=("--data_folder=null", "--manifest", "train=trian.tsv", "--manifest", "dev=a.tsv"),
        expected=(Expected("splits", "--manifest", ("trian.tsv does not exist",)),),
    ),
    Mutation(
        name="a misspelled manifest in the YAML",
        text=(("manifest: null", "manifest: {train: trian.tsv, dev: a.tsv}"),),
        options=("--data_folder=null",),
        expected=(Expected("splits", "manifest.train", ("trian.tsv does not exist",)),),
    ),
]

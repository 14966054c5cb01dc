"""One fault each in values, the machine, the run folder, the export and the cost."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from speechbrain import Stage

from recipes.asr.recipe import AsrBrain
from sbkit.base.checksums import write_checksums
from sbkit.check.check import CHECKS
from sbkit.check.settings import check_unread
from tests.check.harness import Expected, Mutation

EIGHT_GPUS = {"target": "cuda:8"}
LARGE_BATCHES = ("--device=cuda", "--batch_seconds=60", "--concat_prob=0.0")
FEW_STEPS = Expected("batches", "--batch_seconds", ("of train make 1",), stops=False)
CTC_LIN = "ctc_lin: !new:torch.nn.Linear\n    in_features: "


class NotesStages(AsrBrain):
    def on_stage_end(self, stage: Stage, stage_loss: float, epoch: int | None = None) -> None:
        super().on_stage_end(stage, stage_loss, epoch)
        print_note(self.hparams)


def print_note(hparams: Any) -> None:
    print([f"{note}" for note in [hparams.stage_note]])


def undeclared(run: Path) -> None:
    with checkpoint(run) as folder:
        torch.save({"0.conv1.bias": torch.zeros(5)}, folder / "model.ckpt")


def cut_short(run: Path) -> None:
    with checkpoint(run) as folder:
        (folder / "model.ckpt").write_bytes(bytes(100))
    (folder / "model.ckpt").write_bytes(bytes(99))


@contextmanager
def checkpoint(run: Path) -> Iterator[Path]:
    """Yield a folder for files; afterwards it is a whole checkpoint."""
    folder = run / "checkpoints" / "CKPT+2026-11-20+10-00-00+00"
    folder.mkdir(parents=True)
    (folder / "CKPT.yaml").write_text("unixtime: 1.0\n")
    yield folder
    write_checksums(folder)


RANGES = [
    Mutation(
        name="numbers out of their range",
        options=("--log_every=0", "--ctc_weight=0", "--concat_prob=2", "--time_masks=-1"),
        text=(("stall_seconds: 120", "stall_seconds: -1"),),
        expected=(
            Expected("ranges", "log_every", ("`log_every` must be a whole number", "is 0")),
            Expected("ranges", "ctc_weight", ("from 0.01 to 1", "is 0")),
            Expected("ranges", "concat_prob", ("a number from 0 to 1", "is 2")),
            Expected("ranges", "time_masks", ("of at least 0", "is -1")),
            Expected("ranges", "stall_seconds", ("a number from 0 to 86400", "is -1")),
        ),
    ),
    Mutation(
        name="an argument out of the range of its class",
        text=(("    time_masks: !ref <time_masks>\n", "    time_masks: -1\n"),),
        expected=(Expected("ranges", "spec_augment.time_masks", ("at least 0", "is -1")),),
    ),
    Mutation(
        name="lists instead of words",
        text=(
            ("\nprecision: fp32", "\nprecision: [bf16]"),
            ("audio_store: pcm", "audio_store: [pcm]"),
        ),
        expected=(
            Expected("placement", "precision", ("one of fp32, bf16, fp16", "['bf16']")),
            Expected("splits", "audio_store", ("one of pcm, flac, none", "['pcm']")),
        ),
    ),
    Mutation(
        name="language models without a decoder",
        options=("--word_lm_order=1",),
        text=(("decoder: !new:sbkit", "another_decoder: !new:sbkit"),),
        expected=(Expected("brain", "word_lm_order", ("belong to a `decoder`", "has none")),),
    ),
]

UNREAD = [
    Mutation(
        name="a knob that nothing reads",
        text=(("lr: 0.0025", "learning_pace: 3\nlr: 0.0025"),),
        expected=(Expected("unread", "learning_pace", ("has no effect",)),),
    ),
    Mutation(
        name="a misspelled knob that the data needs",
        text=(("\nspeeds: ", "\nspeedz: "),),
        expected=(
            Expected("unread", "speedz", ("Did you mean `speeds`?",)),
            Expected("loaders", ".yaml:1", ("`speeds`, which is not in the YAML",)),
        ),
    ),
    Mutation(
        name="a misspelled knob that the step needs",
        text=(("\nlabel_smoothing: ", "\nlabel_smothing: "),),
        expected=(
            Expected("unread", "label_smothing", ("Did you mean `label_smoothing`?",)),
            Expected("dry_run", ".yaml:1", ("`label_smoothing`, which is not in the YAML",)),
        ),
    ),
    Mutation(
        name="a knob that only a replaced part of the base read",
        yaml="hparams/ctc_streaming.yaml",
        text=(("\nCNN:", "\nspec_augment: null\nwidth: 3\nCNN:"),),
        options=("--time_masks=1",),
        expected=tuple(
            Expected("unread", key, (f"Nothing reads `{key}`",)) for key in ("width", "time_masks")
        ),
        checks=(check_unread,),
    ),
    Mutation(
        name="healthy knob that is read at the end of a stage",
        text=(("lr: 0.0025", "stage_note: 3\nlr: 0.0025"),),
        recipe=lambda recipe: replace(recipe, brain=NotesStages),
        expected=(),
    ),
    Mutation(
        name="freezing that ends after the run",
        options=("--freeze={CNN: 1, Transformer: 10000}",),
        expected=(
            Expected(
                "freezing", "freeze", ("of Transformer does not end", "never learn"), stops=False
            ),
        ),
    ),
]

MACHINE = [
    Mutation(
        name="a device that this machine lacks",
        options=("--device=cuda:99",),
        expected=(Expected("placement", "device", ("torch finds", "cuda:99")),),
    ),
    Mutation(
        name="a device and two precisions that the target lacks",
        options=(*LARGE_BATCHES, "--device=cuda:9", "--precision=fp8", "--eval_precision=fp4"),
        expected=(
            Expected("placement", "device", ("the target has 8 devices", "cuda:9")),
            Expected("placement", "precision", ("'fp8'",)),
            Expected("placement", "eval_precision", ("'fp4'",)),
            FEW_STEPS,
        ),
        **EIGHT_GPUS,
    ),
    Mutation(
        name="batches too small for eight processes",
        options=("--device=cuda",),
        expected=(Expected("batches", "batch_seconds", ("8 processes",), stops=False),),
        **EIGHT_GPUS,
    ),
    Mutation(
        name="healthy on eight GPUs", options=LARGE_BATCHES, expected=(FEW_STEPS,), **EIGHT_GPUS
    ),
    Mutation(
        name="more checkpoints than any disk holds",
        options=("--average_checkpoints=1000000000",),
        checks=CHECKS,
        expected=(Expected("cost", "output_folder", ("are free", "full disk")),),
    ),
]

RUN_FOLDER = [
    Mutation(
        name="a checkpoint cut short, and no other",
        run=cut_short,
        expected=(
            Expected("run_folder", "mutated.yaml:1", ("No checkpoint in", "all 1 are damaged")),
        ),
    ),
    Mutation(
        name="checkpoints without the run configuration",
        run=undeclared,
        expected=(Expected("run_folder", ".yaml:1", ("run_config.json must be", "Put it back")),),
    ),
    Mutation(
        name="initial weights that are nowhere",
        options=("--init_from=/nowhere",),
        expected=(Expected("initial_weights", "init_from", ("/nowhere is neither",)),),
    ),
    Mutation(
        name="a size that only running code could compute",
        text=((f"{CTC_LIN}!ref <d_model>", f"{CTC_LIN}!apply:builtins.max [!ref <d_model>, 1]"),),
        expected=(Expected("export", "ctc_lin", ("!apply:builtins.max",), stops=False),),
    ),
]

MUTATIONS = [*RANGES, *UNREAD, *MACHINE, *RUN_FOLDER]

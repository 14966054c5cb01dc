"""One fault each in values, the machine, the run folder, the export and the cost."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from recipes.asr.recipe import AsrRecipe
from sbkit.base.checksums import write_checksums
from sbkit.base.ranges import NonNegative
from sbkit.check.dry_run import check_unused
from sbkit.check.settings import check_freezing, check_schedule, check_unread
from sbkit.config.keys import Key
from tests.check.harness import changed, error, mutation, note
from tests.check.parts import TestNotes
from tests.models.pretrained.folders import CONFIGS, FRAMES

EIGHT_GPUS = {"target": "cuda:8"}
LARGE_BATCHES = ("--device=cuda", "--batch_seconds=60", "--concat_prob=0.0")
FEW_STEPS = note("batches", "batch_seconds", "of train make 1")
CTC_LIN = "ctc_lin: !new:torch.nn.Linear\n    in_features: "
ADAPTED: dict[str, Any] = {
    "yaml": "hparams/ctc_pretrained.yaml",
    "tiny": (
        *("--device=cpu", "--batch_seconds=6", "--mask_channel_length=4"),
        *("--word_lm_order=0", "--token_lm_order=0", "--lora={rank: 2, projections: [q_proj]}"),
        f"--encoder_config={json.dumps({'model_type': 'hubert', **CONFIGS['hubert'], **FRAMES})}",
    ),
    "checks": (check_freezing, check_unused),
}
COMPUTED_SIZE = (f"{CTC_LIN}!ref <d_model>", f"{CTC_LIN}!apply:builtins.max [!ref <d_model>, 1]")


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


MUTATIONS = [
    # -- ranges
    mutation(
        "numbers out of their range",
        error("ranges", "log_every", "is 0"),
        error("ranges", "ctc_weight", "is 0"),
        error("ranges", "concat_prob", "is 2"),
        error("ranges", "time_masks", "is -1"),
        error("ranges", "stall_seconds", "is -1"),
        options=("--log_every=0", "--ctc_weight=0", "--concat_prob=2", "--time_masks=-1"),
        text=(("weight_decay: 0.01", "weight_decay: 0.01\nstall_seconds: -1"),),
    ),
    mutation(
        "lists instead of words",
        error("ranges", "precision", "fp32 or bf16 or fp16", "['bf16']"),
        error("ranges", "eval_precision", "fp32 or bf16 or fp16", "'fp4'"),
        error("ranges", "audio_store", "pcm or flac or lazy", "['pcm']"),
        error("ranges", "language", "but is ['en', 'it']", "For several, write mul"),
        error("ranges", "token_type", "char or bpe or unigram", "'word'"),
        text=(
            ("\nprecision: fp32", "\nprecision: [bf16]\neval_precision: fp4"),
            ("audio_store: pcm", "audio_store: [pcm]"),
            ("language: en", "language: [en, it]"),
            ("token_type: char", "token_type: word"),
        ),
    ),
    mutation(
        "language models without a decoder",
        error("run", "word_lm_order", "belong to a `decoder`", "there is none"),
        options=("--word_lm_order=1",),
        text=(("decoder: !new:sbkit", "another_decoder: !new:sbkit"),),
    ),
    mutation(
        "a tokenizer of no size",
        error("run", "vocab_size", "needs a `vocab_size` such as 500, but it is null"),
        options=("--token_type=bpe",),
    ),
    mutation(
        "batches shorter than a clip",
        error("run", "batch_seconds", "is 1, but the longest utterance"),
        options=("--batch_seconds=1",),
    ),
    mutation(
        "no clip of a length to train on",
        error("run", "min_seconds", "None of the 16", "30"),
        options=("--min_seconds=30",),
    ),
    # -- keys without an effect
    mutation(
        "a setting that nothing reads",
        error("unread", "learning_pace", "Nothing in this run reads `learning_pace`"),
        text=(("lr: 0.0025", "learning_pace: 3\nlr: 0.0025"),),
        checks=(check_unread,),
    ),
    mutation(
        "settings that own code may read before a test, one of them by its `keys`",
        note("unread", "test_note", "declare it in the recipe's `keys`"),
        text=(("lr: 0.0025", "test_note: 3\ndeclared_note: 3\nlr: 0.0025"),),
        checks=(check_unread,),
        recipe=changed(brain=TestNotes, keys={**AsrRecipe.keys, "declared_note": Key(NonNegative)}),
    ),
    mutation(
        "checkpoints outside of the run",
        error(
            "run",
            "checkpointer.checkpoints_dir",
            "Write `checkpoints_dir: !ref <output_folder>/checkpoints`",
        ),
        options=("--checkpointer.checkpoints_dir=/elsewhere",),
    ),
    mutation(
        "a misspelled setting that the data needs",
        error("run", "min_secondz", "`min_seconds`, which is not in the YAML", "Is `min_secondz`"),
        text=(("\nmin_seconds: ", "\nmin_secondz: "),),
    ),
    mutation(
        "a setting that only a replaced part of the base read",
        error("unread", "width", "Nothing in this run reads `width`"),
        error("unread", "learning_rate", "Did you mean `lr`?"),
        error(
            *("unread", "time_masks", "because `spec_augment` is taken out (", ":15)"),
            "fix: Leave out `time_masks`.",
        ),
        yaml="hparams/ctc_streaming.yaml",
        text=(("\nCNN:", "\nspec_augment: null\nwidth: 3\nlearning_rate: 1\nCNN:"),),
        options=("--time_masks=1",),
        checks=(check_unread,),
    ),
    mutation(
        "values of the user's beside the keys that were referred to there",
        error(
            "unread",
            "number_of_epochs",
            "`number_of_epochs` has no effect, because `epoch_counter.limit` is 2 (override of "
            "epoch_counter.limit)",
            "Leave out `number_of_epochs`, or let `epoch_counter.limit` refer to it.",
        ),
        error("unread", "lr", "`lr` has no effect, because `opt_class.lr` is 0.1 (", ".yaml:15)"),
        note("unread", "weight_decay", "`opt_class.weight_decay` is 0.3 (override of"),
        yaml="hparams/ctc_streaming.yaml",
        text=(
            (
                "\nCNN:",
                "\nopt_class: !name:torch.optim.AdamW {lr: 0.1, weight_decay: !ref <weight_decay>}"
                "\nlr: 0.2\nCNN:",
            ),
        ),
        options=(
            *("--epoch_counter.limit=2", "--number_of_epochs=5", "--weight_decay=0.3"),
            "--opt_class.weight_decay=0.3",
        ),
        checks=(check_unread,),
    ),
    mutation(
        "a rate that no optimizer refers to",
        error("unread", "lr", "`lr` has no effect, because `opt_class.lr` is not declared"),
        text=(("    lr: !ref <lr>\n", ""),),
        checks=(check_unread,),
    ),
    mutation(
        "adapters below a frozen part",
        error(
            "freezing", "freeze", "adapters of `Transformer`", "layers.0.attention.q_proj.lora_a"
        ),
        note("freezing", "freeze", "keeps CNN, Transformer.body at random weights"),
        options=("--freeze={CNN: always, Transformer.body: always}",),
        **ADAPTED,
    ),
    mutation(
        "adapters of one layer that may learn",
        note("freezing", "freeze", "keeps CNN, Transformer at random weights"),
        options=(
            "--freeze={CNN: always, Transformer: always, Transformer.body.encoder.layers.2: 0}",
        ),
        **ADAPTED,
    ),
    mutation(
        "adapters that learn at last",
        note("freezing", "freeze", "keeps CNN, Transformer at random weights"),
        options=("--freeze={CNN: always, Transformer: 1000}",),
        **ADAPTED,
    ),
    mutation(
        "an adapter of the user's own below a frozen part",
        error("freezing", "freeze", "adapters of `CNN`", "`CNN.adapter.weight`"),
        note("freezing", "freeze", "keeps CNN at random weights"),
        text=(("sbkit.models.frontend.ConvFrontEnd", "tests.check.parts.AdaptedFrontEnd"),),
        options=("--freeze=[CNN]",),
        checks=(check_freezing,),
    ),
    mutation(
        "more steps than the run has: of freezing, at random weights, and of a warm-up",
        note("freezing", "freeze", "keeps CNN, ctc_lin at random weights for the whole run of"),
        note("freezing", "freeze", "would freeze seq_lin only after the"),
        note("schedule", "lr_schedule", "reaches only"),
        options=("--freeze={CNN: 1000, ctc_lin: always, Transformer: 1, seq_lin: [999, always]}",),
        text=(
            ("sbkit.train.schedule.WarmupCosine", "speechbrain.nnet.schedulers.NoamScheduler"),
            ("warmup_fraction: !ref", "lr_initial: !ref <lr>\n    n_warmup_steps: 900 #"),
        ),
        checks=(check_freezing, check_schedule),
    ),
    # -- the machine
    mutation(
        "a device that the target lacks",
        error("placement", "device", "the target has 8 devices", "cuda:9"),
        FEW_STEPS,
        options=(*LARGE_BATCHES, "--device=cuda:9"),
        **EIGHT_GPUS,
    ),
    mutation(
        "batches too small for eight processes",
        note("batches", "batch_seconds", "8 processes"),
        options=("--device=cuda",),
        **EIGHT_GPUS,
    ),
    mutation("healthy on eight GPUs", FEW_STEPS, options=LARGE_BATCHES, **EIGHT_GPUS),
    # -- the run folder and the export
    mutation(
        "a checkpoint cut short, and no other",
        error("run_folder", "output_folder", "has only damaged checkpoints (1)"),
        run=cut_short,
    ),
    mutation(
        "checkpoints without the run configuration",
        error("run_folder", "output_folder", "run_config.json must hold"),
        run=undeclared,
    ),
    mutation(
        "initial weights that are nowhere",
        error("initial_weights", "init_from", "/nowhere has neither"),
        options=("--init_from=/nowhere",),
    ),
    mutation(
        "a size that only running code could compute",
        error("export", "ctc_lin", "!apply:builtins.max"),
        text=(COMPUTED_SIZE,),
    ),
]

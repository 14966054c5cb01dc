"""A task without text and labels: a generator and a discriminator of sound.

Its Brain has no `metrics`, and two optimizers. `write_yaml` declares it for train.py.

Legend: B utterances, S samples.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from speechbrain import Stage
from torch import Tensor
from torch.nn.functional import softplus

from recipes.prepare import COMMON_RANGES, corpus_of, prepare_transcripts
from sbkit.data.batch import Batch, Loaders, collate_audio, make_loaders
from sbkit.data.splits import Splits
from sbkit.distributed.device import Placement
from sbkit.models.loss import Loss
from sbkit.tasks.task import Task
from sbkit.train.brain import Brain
from sbkit.train.recipe import Recipe
from tests.runs import ROOT

SAMPLES = 1600  # at the start of each clip; no clip is shorter
OBJECTS = f"""
generator: !new:torch.nn.Sequential
    - !new:torch.nn.Linear [{SAMPLES}, 8]
    - !new:torch.nn.Dropout [!ref <dropout>]
    - !new:torch.nn.Linear [8, {SAMPLES}]

discriminator: !new:torch.nn.Linear [{SAMPLES}, 1]

model: !new:torch.nn.ModuleList
    - [!ref <generator>, !ref <discriminator>]

optimizers:
    generator:
        parts: [generator]
        opt_class: !name:torch.optim.AdamW
            lr: !ref <lr>
    discriminator:
        parts: [discriminator]
        opt_class: !name:torch.optim.SGD
            lr: !ref <lr>
            momentum: 0.9

lr_schedule: !new:sbkit.train.schedule.WarmupCosine
    warmup_fraction: !ref <warmup_fraction>

epoch_counter: !new:speechbrain.utils.epoch_loop.EpochCounter
    limit: !ref <number_of_epochs>

checkpointer: !new:sbkit.checkpoint.checkpointer.Checkpointer
    checkpoints_dir: !ref <output_folder>/checkpoints
    recoverables:
        model: !ref <model>
        epochs: !ref <epoch_counter>
"""
UNUSED = "token_type|vocab_size|n_mels|time_.*|freq_.*|max_time.*|cnn_.*|d_.*|nhead|num_.*_layers"
UNUSED += "|encoder_module|kernel_size|ctc_.*|inter_.*|label_.*|weight_decay|.*_lm_order|lm_text"
UNUSED += "|decoder_type|beam_size|attention_rescoring|remove_vector.*"


def write_yaml(folder: Path) -> Path:
    """Write the knobs of ctc.yaml that the task reads, and its own objects."""
    knobs, _ = (ROOT / "hparams/ctc.yaml").read_text(encoding="utf-8").split("# ======== objects")
    knobs = re.sub(rf"(?m)^({UNUSED}):.*\n", "", knobs)
    knobs = knobs.replace("recipes.asr.recipe.ASR", f"{__name__}.ADVERSARIAL")
    knobs = re.sub(r"(?m)^ckpt_interval_minutes:.*", "ckpt_interval_steps: 1", knobs)
    file = folder / "adversarial.yaml"
    file.write_text(f"{knobs}\n{OBJECTS}", encoding="utf-8")
    return file


class AdversarialBrain(Brain):
    """Train the generator to repeat a clip, and the discriminator to find generated ones."""

    def compute_forward(self, batch: Batch, stage: Stage) -> tuple[Tensor, Tensor]:
        """Return the start of each clip, and the generator's copy of it: (B, S) each."""
        clips = batch.audio[:, :SAMPLES].float() / 2**15
        generated: Tensor = self.hparams.generator(clips)
        return clips, generated

    def compute_objectives(
        self, predictions: tuple[Tensor, Tensor], batch: Batch, stage: Stage
    ) -> dict[str, Loss]:
        """Return the loss of each optimizer, from one forward pass."""
        clips, generated = predictions
        real, fake = (self.hparams.discriminator(audio).squeeze(1) for audio in predictions)
        distance = (generated - clips).square().sum(1)
        generator_loss = Loss((distance + softplus(-fake)) * batch.weights, batch.weights)
        discriminator_loss = Loss((softplus(-real) + softplus(fake)) * batch.weights, batch.weights)
        return {"generator": generator_loss, "discriminator": discriminator_loss}


def collate(rows: Sequence[Mapping[str, Any]]) -> Batch:
    """Pad clips to a batch."""
    return Batch(**collate_audio(rows, 16_000))


def load(hparams: Mapping[str, Any], splits: Splits, labels: None, placement: Placement) -> Loaders:
    """Plan the batches of every split."""
    return make_loaders(splits, hparams, collate=collate, placement=placement)


TASK = Task(name=f"{__name__}.TASK", model_name="generator", metrics={})
ADVERSARIAL = Recipe(
    task=TASK,
    prepare_splits=prepare_transcripts,
    make_loaders=load,
    brain=AdversarialBrain,
    corpus=corpus_of,
    ranges=COMMON_RANGES,
)

"""The corpus of all sides of `tools/bench_train`, and sbkit's side: as train.py runs it."""

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from recipes.AsteriskPrompts import corpus
from sbkit.audio.io import read_audio
from sbkit.base.units import at_speed
from sbkit.config.overrides import parse_command
from sbkit.train.setup import RunSetup
from tools.bench_gpu import COPIES, write_split

MP3_RATE = 48_000


def make_side(
    make: Callable[[RunSetup], Any], yaml: Path, arguments: Sequence[str], folder: Path
) -> Any:
    """Prepare the corpus and the labels of all sides, and make one of them.

    A side has ``model``, ``batches`` of one epoch after the other, and ``step``.
    """
    _, overrides = parse_command([str(yaml), *arguments])
    if not overrides.get("data_folder"):
        overrides["data_folder"] = str(convert(folder / "release"))
    setup = RunSetup(
        yaml, {"check": False, "output_folder": str(folder / make.__name__), **overrides}
    )
    setup.build_hparams()
    return make(setup)


def convert(release: Path) -> Path:
    """Write the default corpus as 48 kHz mp3, the format of Common Voice, unless it exists.

    Each training clip is listed several times: its 419 are too few for either side to fill batches
    with clips of similar lengths, as in a corpus of many hours.
    """

    def read_clips(split: str) -> Iterator[tuple[Any, list[str]]]:
        for clip in corpus.read({"language": "en"}, split):
            copies = COPIES if split == "train" else 1
            yield read_audio(clip.path, MP3_RATE), [clip.sentence] * copies

    for split in ("train", "dev", "test"):
        if not (release / f"{split}.tsv").exists():
            write_split(release, split, read_clips(split), MP3_RATE, "mp3")
    return release


class SbkitSide:
    """Train as `Brain.fit` does, without writing files."""

    def __init__(self, setup: RunSetup) -> None:
        self._setup = setup
        self.brain = setup.make_brain(setup.make_loaders())
        self.brain.on_fit_start()
        self.brain.training_step.train_mode()
        self.model = self.brain.modules
        self.batches = self._batches()

    def _batches(self) -> Iterator[Any]:
        loader: Any = self._setup.make_loaders().train
        for epoch in count(1):
            self._setup.build_hparams()["epoch_counter"].current = epoch
            self.brain.step = 0
            loader.batch_sampler.set_epoch(epoch)
            for batch in loader:  # the learning rate follows from the share of the run
                self.brain.epoch_share = self.brain.step / len(loader)
                yield batch

    def step(self, batch: Any) -> tuple[float, float]:
        """Train one step, and return its seconds of audio without and with padding."""
        self.brain.step += 1
        self.brain.fit_batch(batch)
        percents = [g.speed_percent for g in batch.speed_groups for _ in range(g.num_utterances)]
        lengths = [*map(at_speed, batch.audio_lengths.tolist(), percents)]
        return batch.seconds, batch.seconds * max(lengths) * len(lengths) / sum(lengths)

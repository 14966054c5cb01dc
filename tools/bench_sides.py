"""Two sides of `tools/bench_train`: sbkit as train.py runs it, and SpeechBrain's recipe."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import soundfile
import torch
from speechbrain import Stage
from torchaudio.functional import resample

from recipes.prepare import corpus_of, read_manifest
from sbkit.audio.io import read_audio
from sbkit.base.units import at_speed
from sbkit.config.overrides import parse_command
from sbkit.data.splits import read_column, sample_counts
from sbkit.evaluate.wer import ScoredUtterance, total_scores
from sbkit.train.run import Run
from tools import bench_speechbrain as theirs

MP3_RATE = 48_000
COPIES = 8  # of a training clip; with one, SpeechBrain's 200 buckets make updates of 8 s


def make_side(
    make: Callable[[Run], Any],
    yaml: Path,
    more: Sequence[str],
    sizes: Mapping[str, Any],
    folder: Path,
) -> Any:
    """Prepare the corpus and the labels of all sides, and make one of them.

    Each has ``batches`` of one epoch after the other, and ``model``.
    """
    _, overrides = parse_command([str(yaml), *more])
    overrides = {**sizes, "output_folder": str(folder / make.__name__), **overrides}
    if not overrides.get("data_folder"):
        overrides["data_folder"] = str(convert(folder / "release"))
    run = Run(yaml, overrides)
    run.build_hparams()
    return make(run)


def convert(release: Path) -> Path:
    """Write the default corpus as 48 kHz mp3, the format of Common Voice, unless it exists.

    It has 419 training clips, too few for either side to fill its batches with clips of like
    lengths, as a corpus of many hours does. So each is listed several times.
    """
    knobs = {"data_folder": None, "language": "en", "splits": None}
    corpus = corpus_of(knobs)
    for split in ("train", "dev", "test"):
        table = release / f"{split}.tsv"
        if table.exists():
            continue
        (release / "clips").mkdir(parents=True, exist_ok=True)
        rows = ["path\tsentence"]
        for clip in read_manifest(corpus, knobs, split):
            samples = torch.from_numpy(read_audio(clip.path)) / 32768
            audio = resample(samples, 16_000, MP3_RATE).numpy()
            first = release / "clips" / f"{split}-{len(rows)}.mp3"
            soundfile.write(first, audio, MP3_RATE, format="MP3")
            for _ in range(COPIES if split == "train" else 1):
                file = first.with_stem(f"{split}-{len(rows)}")
                if file != first:
                    file.hardlink_to(first)
                rows.append(f"{file.name}\t{clip.sentence}")
        table.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return release


class Ours:
    """Train as `Brain.fit` does, without writing files."""

    def __init__(self, run: Run) -> None:
        self._run, self.brain = run, run.make_brain()
        self.brain.loaders = run.make_loaders()
        self.brain.on_fit_start()
        self.brain.training_step.train_mode()
        self.model = self.brain.modules
        self.batches = self._batches()

    def _batches(self) -> Iterator[Any]:
        loader: Any = self._run.make_loaders().train
        for epoch in count(1):
            self._run.build_hparams()["epoch_counter"].current, self.brain.step = epoch, 0
            loader.batch_sampler.set_epoch(epoch)
            for batch in loader:  # the learning rate follows from the place in the run
                self.brain.epoch_share = self.brain.step / len(loader)
                yield batch

    def step(self, batch: Any) -> tuple[float, float]:
        """Train one step, and return its seconds of audio without and with padding."""
        self.brain.step += 1
        self.brain.fit_batch(batch)
        clips = zip(batch.audio_lengths.tolist(), _percents(batch), strict=True)
        lengths = [at_speed(samples, percent) for samples, percent in clips]
        return batch.seconds, batch.seconds * max(lengths) * len(lengths) / sum(lengths)

    def cer(self) -> float:
        """Return the character error rate of the first validation set, greedy."""
        brain, scored = self.brain, list[ScoredUtterance]()
        brain.modules.eval()
        for batch in map(brain.to_device, next(iter(self._run.make_loaders().valid.values()))):
            with torch.no_grad(), brain.evaluation_ctx:
                outputs = brain.compute_forward(batch, Stage.VALID)
            scored += brain.score(outputs, batch)
        brain.training_step.train_mode()
        return total_scores(scored).cer


def _percents(batch: Any) -> list[int]:
    return [
        group.speed_percent for group in batch.speed_groups for _ in range(group.num_utterances)
    ]


class Theirs:
    """Train as SpeechBrain's `Brain.fit` does, on the same clips and labels."""

    def __init__(self, run: Run) -> None:
        self._tokenizer = run.prepare_labels()
        self.brain = self.make_brain(run)
        self.model = self.brain.modules.train()
        train, self._dev_items = items_of(run, "train"), items_of(run, "dev")
        evaluated = {**run.knobs, "batch_seconds": run.knobs["eval_batch_seconds"]}
        self._train, self._dev = (
            self.make_loader(theirs.make_dataset(items, self._tokenizer), knobs)
            for items, knobs in ((train, run.knobs), (self._dev_items, evaluated))
        )
        self.batches = self._batches()

    def make_brain(self, run: Run) -> Any:
        """Make a Brain with as many parameters as the run's model."""
        knobs, vocab_size = run.knobs, self._tokenizer.vocabulary.size
        parameters = sum(p.numel() for p in run.build_hparams()["model"].parameters())
        return theirs.make_brain(
            theirs.modules_of_size(knobs, vocab_size, parameters),
            device=str(run.choose_placement().device),
            precision=knobs["precision"],
            ctc_weight=knobs["ctc_weight"],
        )

    def make_loader(self, dataset: Any, knobs: Mapping[str, Any]) -> Any:
        """Batch by seconds."""
        return theirs.make_loader(dataset, knobs["batch_seconds"], knobs["num_workers"])

    def _batches(self) -> Iterator[Any]:
        for epoch in count(1):
            self._train.batch_sampler.set_epoch(epoch)
            yield from self._train

    def step(self, batch: Any) -> tuple[float, float]:
        """Train one step, and return its seconds of audio without and with padding."""
        brain = self.brain
        brain.step += 1
        loss = brain.fit_batch(batch)
        brain.avg_train_loss = brain.update_average(loss, brain.avg_train_loss)
        return float(batch.duration.sum()), batch.sig.data.numel() / theirs.RATE

    def cer(self) -> float:
        """Return the character error rate of the first validation set, greedy."""
        transcripts = theirs.transcribe(self.brain, self._dev, self._tokenizer)
        return total_scores(
            ScoredUtterance(id, self._dev_items[id]["text"], text) for id, text in transcripts
        ).cer


def items_of(run: Run, split: str) -> dict[str, dict[str, Any]]:
    """Return the clips that sbkit has in a split, with their normalized texts, by name."""
    listed = read_manifest(corpus_of(run.knobs), run.knobs, split)
    paths = {clip.id: clip.path for clip in listed}
    rows = run.prepare_splits().named()[split]
    ids, texts = (read_column(rows, name) for name in ("id", "text"))
    seconds = sample_counts(rows) / run.knobs["sample_rate"]
    return {
        name: {"wav": str(paths[name]), "text": text, "duration": length}
        for name, text, length in zip(ids, texts, seconds.tolist(), strict=True)
    }

"""What Lhotse (1.33) reads: its manifests, its cuts, and data folders of Kaldi and WeNet.

<data_folder>/[NAME_]recordings_SPLIT.jsonl.gz, [NAME_]supervisions_SPLIT.jsonl.gz
              [NAME_]cuts_SPLIT.jsonl.gz
              SPLIT/cuts.jsonl.gz, or cuts.000000.jsonl.gz and further ones
              SPLIT/wav.scp, text and, if any, segments, utt2spk, utt2lang, spk2gender
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from sbkit.base.errors import DataError
from sbkit.base.imports import require_package
from sbkit.base.units import MICROSECONDS, SAMPLE_RATE
from sbkit.data.corpus import Corpus, SettingValues, named_folder, splits_by_prefix
from sbkit.data.filesystem import UNPACKING_ERRORS
from sbkit.data.manifest import Clip, Excluded
from sbkit.text.languages import single_language_tag

if TYPE_CHECKING:
    from lhotse import Recording, SupervisionSegment

MANIFEST = re.compile(r"(?:.+_)?(?:supervisions|cuts)_([^.]+)\.jsonl(?:\.gz)?")
# By full names, as the folder of all clips of Common Voice takes seconds to list
IN_FOLDERS = ("wav.scp", "cuts.jsonl", "cuts.jsonl.gz", "cuts.000000.jsonl.gz")


class Lhotse(Corpus):
    """Each supervision is a clip."""

    layout = "manifests or cuts of Lhotse, or data folders of Kaldi"

    @classmethod
    def recognizes(cls, settings: SettingValues) -> bool:
        """Check whether a folder has such files."""
        return bool(_find_splits(settings))

    def splits(self) -> Mapping[str, Sequence[str]]:
        """Return the splits of each role: train*, dev* and test*."""
        return splits_by_prefix(self.available())

    def available(self) -> list[str]:
        return [*_find_splits(self.settings)]

    def files(self) -> list[Path]:
        """Return the folders of the manifests."""
        files = chain.from_iterable(_find_splits(self.settings).values())
        return [*dict.fromkeys(file.parent for file in files)]

    def read(self, split: str) -> Iterator[Clip | Excluded]:
        """Yield the clips, with the columns speaker, language and gender."""
        require_package("lhotse", extra="corpora")
        for file in _find_splits(self.settings)[split]:
            read = _read_supervisions if "supervisions_" in file.name else _read_cuts
            read = _read_kaldi if file.name == "wav.scp" else read
            try:
                yield from (self._to_clip(file, *row) for row in read(file))
            # Lhotse asserts, and takes the fields that it needs from mappings.
            except (*UNPACKING_ERRORS, AssertionError, LookupError, TypeError) as error:
                raise DataError(
                    f"{file} cannot be read by Lhotse ({type(error).__name__}: {str(error)[:200]})."
                ) from error

    def _to_clip(
        self, file: Path, recording: "Recording | None", speech: "SupervisionSegment"
    ) -> Clip | Excluded:
        if recording is None:
            detail = f"{speech.recording_id} is none"
            return Excluded(speech.id, "not a part of a recording", detail)
        columns: Mapping[str, object] = self.settings.get("columns") or {}
        if speech.text is None and columns.get("text", "") is not None:
            return Excluded(speech.id, "no transcript", "its supervision has no text")
        changes = {type(change).__name__ for change in recording.transforms or ()}
        if changes - {"Resample"}:  # sbkit resamples, too
            return Excluded(speech.id, "changed sound", ", ".join(sorted(changes)))
        source = next((s for s in recording.sources if speech.channel in s.channels), None)
        if source is None:
            return Excluded(speech.id, "not one channel", f"it has the channels {speech.channel}")
        if source.type != "file":
            raise DataError(
                f"{file}: the audio of {speech.id} is not a file but of the type {source.type}. "
                "Write files by Lhotse: CutSet.from_cuts(cut.drop_custom('shard_origin') for cut "
                f"in CutSet.from_shar(in_dir={str(file.parent)!r}).save_audios('audio'))"
                ".to_file('cuts_train.jsonl.gz')"
            )
        start, end = max(speech.start, 0), min(speech.end, recording.duration)
        if start >= end:
            times = f"from {speech.start:g} to {speech.end:g} s of {recording.duration:g} s"
            return Excluded(speech.id, "outside of its recording", times)
        labels = {
            "speaker": speech.speaker,
            "language": speech.language or single_language_tag(self.settings["language"]),
            "gender": speech.gender,
        }
        return Clip(
            speech.id,
            file.parent / source.source,
            speech.text or "",
            {name: label for name, label in labels.items() if label},
            start=round(start * MICROSECONDS),
            end=round(end * MICROSECONDS) if end < math.inf else None,
            # Channels count from 0 in a file, but may have any numbers here.
            channel=source.channels.index(speech.channel) if len(source.channels) > 1 else None,
        )


def _find_splits(settings: SettingValues) -> dict[str, list[Path]]:
    """Return the manifests of each split, or the wav.scp of a folder of Kaldi."""
    folder = named_folder(settings)
    splits: dict[str, list[Path]] = defaultdict(list)
    if folder is None:
        return splits
    for file in sorted(folder.glob("*.jsonl*")):
        if match := MANIFEST.fullmatch(file.name):
            splits[match[1]].append(file)
    for file in sorted(file for name in IN_FOLDERS for file in folder.glob(f"*/{name}")):
        pattern = "wav.scp" if file.name == "wav.scp" else "cuts.*jsonl*"
        splits[file.parent.name] = sorted(file.parent.glob(pattern))
    return splits


Rows = Iterator[tuple["Recording | None", "SupervisionSegment"]]


def _read_supervisions(file: Path) -> Rows:
    from lhotse import RecordingSet, SupervisionSet

    manifest = RecordingSet.from_file(
        file.with_name(file.name.replace("supervisions_", "recordings_"))
    )
    recordings = {recording.id: recording for recording in manifest or ()}
    for speech in SupervisionSet.from_file(file) or ():
        yield recordings.get(speech.recording_id), speech


def _read_cuts(file: Path) -> Rows:
    """Yield the supervisions of cuts; a cut without one is a supervision without a text."""
    from lhotse import CutSet, MonoCut, MultiCut, SupervisionSegment

    for cut in CutSet.from_file(file) or ():
        recording = cut.recording if isinstance(cut, MonoCut | MultiCut) else None
        for speech in cut.supervisions or [SupervisionSegment(cut.id, cut.id, 0, cut.duration)]:
            speech = speech.with_offset(cut.start)
            if isinstance(cut, MonoCut):
                speech.channel = cut.channel
            yield recording, speech


def _read_kaldi(file: Path) -> Rows:
    """Yield the utterances; Lhotse's own reader opens each file, and lacks WeNet's folders."""
    from lhotse import AudioSource, Recording, SupervisionSegment
    from lhotse.kaldi import load_kaldi_text_file, load_kaldi_text_mapping

    folder = file.parent
    names = ("wav.scp", "segments", "utt2spk", "utt2lang", "spk2gender")
    sources, segments, speakers, languages, genders = (
        load_kaldi_text_mapping(folder / name) for name in names
    )
    commands = [id for id, source in sources.items() if source.endswith("|")]
    if commands:
        raise DataError(f"{file} has a command for {commands[0]}, which is not run. Write files.")
    segments = segments or {id: f"{id} 0 -1" for id in sources}
    has_channels = (folder / "reco2file_and_channel").exists()
    if has_channels or any(len(segment.split()) > 3 for segment in segments.values()):
        raise DataError(
            f"{folder} names channels, in reco2file_and_channel or as the fifth field of segments, "
            "which would be mixed. Write cuts of Lhotse, or a table with a column `channel`."
        )
    texts = load_kaldi_text_file(folder / "text") if (folder / "text").is_file() else {}
    for id, segment in segments.items():
        name, start, end = segment.split()
        duration = math.inf if end == "-1" else float(end) - float(start)
        speaker = speakers.get(id)
        speech = SupervisionSegment(
            *(id, name, float(start), duration),
            text=texts.get(id),
            speaker=speaker,
            language=languages.get(id),
            gender=genders.get(speaker),
        )
        audio = AudioSource("file", [0], sources.get(name, ""))
        recording = Recording(name, [audio], SAMPLE_RATE, 0, math.inf)
        yield recording if name in sources else None, speech

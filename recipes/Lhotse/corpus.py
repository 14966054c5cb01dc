"""Data that Lhotse (1.33) reads: its manifests, its cuts, and data folders of Kaldi and WeNet.

<data_folder>/[NAME_]recordings_SPLIT.jsonl.gz, [NAME_]supervisions_SPLIT.jsonl.gz
              [NAME_]cuts_SPLIT.jsonl.gz
              SPLIT/cuts.jsonl.gz
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
from sbkit.base.user_folders import expand_home
from sbkit.data.corpus import Corpus, SettingValues, named_folder, splits_by_prefix
from sbkit.data.filesystem import UNPACKING_ERRORS
from sbkit.data.manifest import Clip, Excluded
from sbkit.text.languages import single_language_tag

if TYPE_CHECKING:
    from lhotse import Recording, SupervisionSegment

MANIFEST = re.compile(r"(?:.+_)?(?:supervisions|cuts)_([^.]+)\.jsonl(?:\.gz)?")
KALDI = "wav.scp"
# Full names, because the folder of all clips of Common Voice takes seconds to list. The last one is
# the first file of a Shar, whose audio is in tars.
IN_FOLDERS = (KALDI, "cuts.jsonl", "cuts.jsonl.gz", "cuts.000000.jsonl.gz")

Rows = Iterator[tuple["Recording | None", "SupervisionSegment"]]


class Lhotse(Corpus):
    """Each supervision is a clip."""

    layout = "manifests or cuts of Lhotse, or data folders of Kaldi"

    @classmethod
    def recognizes(cls, settings: SettingValues) -> bool:
        return bool(_find_splits(settings))

    def splits(self) -> Mapping[str, Sequence[str]]:
        return splits_by_prefix(self.available())

    def available(self) -> list[str]:
        return [*_find_splits(self.settings)]

    def files(self) -> list[Path]:
        files = chain.from_iterable(_find_splits(self.settings).values())
        return [*dict.fromkeys(file.parent for file in files)]

    def read(self, split: str) -> Iterator[Clip | Excluded]:
        """Yield the clips, with the columns speaker, language and gender."""
        require_package("lhotse", extra="corpora")
        for file in _find_splits(self.settings)[split]:
            read = _read_supervisions if "supervisions_" in file.name else _read_cuts
            read = _read_kaldi if file.name == KALDI else read
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
        sources = recording.sources if recording else ()
        source = next((source for source in sources if speech.channel in source.channels), None)
        if recording is None or source is None:
            detail = f"{speech.recording_id}, channel {speech.channel}"
            return Excluded(speech.id, "not one channel of a recording", detail)
        columns: Mapping[str, object] = self.settings["columns"] or {}
        if speech.text is None and columns.get("text", "") is not None:
            return Excluded(speech.id, "no transcript", "its supervision has no text")
        made_by = {source.type, *(type(change).__name__ for change in recording.transforms or ())}
        if unread := made_by - {"file", "Resample"}:  # sbkit resamples, too
            return Excluded(speech.id, "audio that is not in a file", ", ".join(sorted(unread)))
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
            file.parent / expand_home(source.source),
            speech.text or "",
            {name: label for name, label in labels.items() if label},
            start=round(start * MICROSECONDS),
            end=round(end * MICROSECONDS) if end < math.inf else None,
            # Channels count from 0 in a file, but may have any numbers here.
            channel=source.channels.index(speech.channel) if len(source.channels) > 1 else None,
        )


def _find_splits(settings: SettingValues) -> dict[str, list[Path]]:
    """Return the manifests of each split, or the wav.scp of a folder of Kaldi."""
    splits: dict[str, list[Path]] = defaultdict(list)
    if folder := named_folder(settings):
        inside = chain.from_iterable(folder.glob(f"*/{name}") for name in IN_FOLDERS)
        for file in sorted(chain(folder.glob("*.jsonl*"), inside)):
            if match := MANIFEST.fullmatch(file.name):
                splits[match[1]].append(file)
            elif file.name in IN_FOLDERS:
                splits[file.parent.name].append(file)
    return splits


def _read_supervisions(file: Path) -> Rows:
    from lhotse import RecordingSet, SupervisionSet

    name = file.name.replace("supervisions_", "recordings_")
    recordings = {r.id: r for r in RecordingSet.from_file(file.with_name(name)) or ()}
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
    """Yield the utterances. Lhotse's own reader opens each file, and reads no WeNet folders."""
    from lhotse import AudioSource, Recording, SupervisionSegment
    from lhotse.kaldi import load_kaldi_text_file, load_kaldi_text_mapping

    folder = file.parent
    names = (KALDI, "segments", "utt2spk", "utt2lang", "spk2gender")
    sources, segments, speakers, languages, genders = (
        load_kaldi_text_mapping(folder / name) for name in names
    )
    texts = load_kaldi_text_file(folder / "text") if (folder / "text").is_file() else {}
    segments = segments or {id: f"{id} 0 -1" for id in sources}
    has_channels = any(len(segment.split()) > 3 for segment in segments.values())
    if has_channels or (folder / "reco2file_and_channel").exists():
        raise DataError(
            f"{folder} names channels, in reco2file_and_channel or as the fifth field of segments, "
            "which would be downmixed. Write cuts of Lhotse, or a table with a column `channel`."
        )
    for id, segment in segments.items():
        name, start, end = segment.split()
        duration = math.inf if end == "-1" else float(end) - float(start)
        speech = SupervisionSegment(id, name, float(start), duration, text=texts.get(id))
        speech.speaker, speech.language = speakers.get(id), languages.get(id)
        speech.gender = genders.get(speech.speaker)
        source = sources.get(name, "")
        audio = AudioSource("command" if source.endswith("|") else "file", [0], source)
        yield Recording(name, [audio], SAMPLE_RATE, 0, math.inf) if source else None, speech

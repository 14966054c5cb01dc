"""What `lhotse prepare` writes is read as the corpus itself is."""

from pathlib import Path

import lhotse
import pytest
from lhotse.recipes import prepare_librispeech

from recipes.prepare import corpus_of
from sbkit.data.manifest import Manifest
from tests.recipes.test_librispeech import SPLITS, root, settings

assert root  # a fixture


@pytest.fixture
def manifests(root: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "manifests"
    prepare_librispeech(root / "LibriSpeech", dataset_parts=SPLITS, output_dir=folder)
    return folder


def read(folder: Path, split: str) -> Manifest:
    manifest = corpus_of(settings(folder)).read(settings(folder), split)
    assert isinstance(manifest, Manifest)
    return manifest


def test_manifests_of_lhotse_are_the_corpus(root: Path, manifests: Path) -> None:
    roles = corpus_of(settings(manifests)).splits(settings(manifests))
    assert roles == corpus_of(settings(root)).splits(settings(root))
    for split in SPLITS:
        clips, expected = read(manifests, split), read(root, split)
        assert (clips.excluded, len(clips)) == ((), 4)
        for clip, other in zip(sorted(clips, key=str), sorted(expected, key=str), strict=True):
            assert (clip.path, clip.sentence) == (other.path, other.sentence)
            assert clip.columns["speaker"] == other.columns["speaker"]
            assert clip.start == 0
            seconds = lhotse.Recording.from_file(clip.path).duration
            assert clip.end == round(seconds * 1_000_000)


def test_channels_of_speakers_and_lost_recordings(manifests: Path, asterisk_english: Path) -> None:
    file = manifests / "librispeech_supervisions_dev-clean.jsonl.gz"
    recordings = manifests / "librispeech_recordings_dev-clean.jsonl.gz"
    first, *others = lhotse.RecordingSet.from_file(recordings)
    first.sources[0].channels = first.channel_ids = [0, 1]
    lhotse.RecordingSet.from_recordings([first, *others[1:]]).to_file(recordings)
    supervisions = [
        lhotse.SupervisionSegment("a", first.id, 0, 1.0, channel=0, text="left"),
        lhotse.SupervisionSegment("b", first.id, 0.5, 0.5, channel=1, text="right"),
        lhotse.SupervisionSegment("c", first.id, 0.5, 0.5, channel=[0, 1], text="both"),
        lhotse.SupervisionSegment("d", others[0].id, 0, 0.5, text="lost"),
    ]
    lhotse.SupervisionSet.from_segments(supervisions).to_file(file)
    manifest = read(manifests, "dev-clean")
    positions = [(part.start, part.end, part.channel) for part in manifest.parts]
    assert positions == [(0, 1_000_000, 0), (500_000, 1_000_000, 1)]
    reasons = {row.id: row.reason for row in manifest.excluded}
    assert reasons.pop("c") == "not one channel"
    assert reasons.pop("d") == "no audio file"
    assert {*reasons.values()} == {"no transcript"}

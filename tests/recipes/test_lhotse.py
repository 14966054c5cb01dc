"""A corpus that is read with Lhotse has the same rows as the corpus itself."""

import sys
from pathlib import Path

import lhotse
import pytest
from lhotse.recipes import prepare_librispeech

from sbkit.base.errors import SbkitError
from sbkit.base.units import MICROSECONDS
from sbkit.data.corpus import corpus_of
from sbkit.data.manifest import Manifest
from tests.recipes.test_librispeech import SPLITS, root, settings
from tests.stores import read_split

assert root  # a fixture
CUTS = Path(__file__).parent / "lhotse_cuts.jsonl"  # as Lhotse 1.33 wrote them


def read(folder: Path, split: str, **options: object) -> Manifest:
    return read_split(settings(folder, **options), split)


@pytest.fixture
def manifests(root: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "manifests"
    prepare_librispeech(root / "LibriSpeech", dataset_parts=SPLITS, output_dir=folder)
    return folder


@pytest.mark.parametrize("form", ["supervisions", "a_cuts_{}.jsonl.gz", "{}/cuts.jsonl.gz"])
def test_each_form_is_the_corpus_itself(form: str, root: Path, manifests: Path) -> None:
    for split in SPLITS if "cuts" in form else ():
        recordings = manifests / f"librispeech_recordings_{split}.jsonl.gz"
        supervisions = manifests / f"librispeech_supervisions_{split}.jsonl.gz"
        file = manifests / form.format(split)
        file.parent.mkdir(exist_ok=True)
        lhotse.CutSet.from_manifests(
            lhotse.RecordingSet.from_file(recordings), lhotse.SupervisionSet.from_file(supervisions)
        ).to_file(file)
        supervisions.unlink()
    assert corpus_of(settings(manifests)).roles() == corpus_of(settings(root)).roles()
    for split in SPLITS:
        clips, expected = read(manifests, split), read(root, split)
        assert (clips.excluded, len(clips)) == ((), 4)
        for clip, other in zip(sorted(clips, key=str), sorted(expected, key=str), strict=True):
            assert (clip.id, clip.path, clip.sentence) == (other.id, other.path, other.sentence)
            assert clip.columns["speaker"] == other.columns["speaker"]
            seconds = lhotse.Recording.from_file(clip.path).duration
            assert (clip.start, clip.end) == (0, round(seconds * MICROSECONDS))


def test_channels_of_speakers_and_lost_recordings(manifests: Path) -> None:
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
        lhotse.SupervisionSegment("e", first.id, 900, 1, text="late"),
    ]
    lhotse.SupervisionSet.from_segments(supervisions).to_file(file)
    manifest = read(manifests, "dev-clean")
    positions = [(span.start, span.end, span.channel) for span in manifest.spans]
    assert positions == [(0, 1_000_000, 0), (500_000, 1_000_000, 1)]
    reasons = [(row.id, row.reason) for row in manifest.excluded]
    lost = "not one channel of a recording"
    assert reasons == [("c", lost), ("d", lost), ("e", "outside of its recording")]


def test_audio_of_shar_is_not_in_files(manifests: Path, tmp_path: Path) -> None:
    recordings = lhotse.RecordingSet.from_file(
        manifests / "librispeech_recordings_dev-clean.jsonl.gz"
    )
    supervisions = manifests / "librispeech_supervisions_dev-clean.jsonl.gz"
    cuts = lhotse.CutSet.from_manifests(recordings, lhotse.SupervisionSet.from_file(supervisions))
    (tmp_path / "shar/train").mkdir(parents=True)
    cuts.to_shar(tmp_path / "shar/train", fields={"recording": "flac"})
    excluded = read(tmp_path / "shar", "train").excluded
    assert {row.reason for row in excluded} == {"audio that is not in a file"}


def test_cuts_that_are_no_parts_of_files_are_left_out(tmp_path: Path) -> None:
    in_memory = CUTS.read_text().splitlines()[0].replace('"type": "file"', '"type": "memory"')
    (tmp_path / "cuts_train.jsonl").write_text(CUTS.read_text() + in_memory)
    manifest = read(tmp_path, "train")
    assert [(clip.id, clip.start, clip.end, clip.sentence) for clip in manifest] == [
        ("talk-a", 500_000, 1_750_000, "first words"),
        ("talk-b", 1_750_000, 3_812_500, "second words"),
        ("talk-c", 6_000_000, 9_300_000, "third words"),
        ("two-a", 0, 1_000_000, "left"),
    ]
    assert [span.channel for span in manifest.spans] == [None, None, None, 0]
    assert manifest[2].path == tmp_path / "talk.flac"
    assert manifest[2].columns == {"speaker": "bob", "gender": "M", "language": "English"}
    assert {(row.id, row.reason) for row in manifest.excluded} == {
        ("talk-a_sp1.1", "audio that is not in a file"),
        ("talk-a", "audio that is not in a file"),
        ("talk-a", "not one channel of a recording"),  # of x1 and x3, which are downmixed
        ("talk-b", "not one channel of a recording"),
        ("talk-a", "clip listed twice"),  # of x2, which is only resampled, and x4
        ("talk-b", "clip listed twice"),
        ("x5", "no transcript"),
    }


def test_folder_of_kaldi_or_wenet_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "train"
    folder.mkdir()
    (folder / "wav.scp").write_text("talk ../talk.flac\npipe touch /tmp/run |\n")
    (folder / "segments").write_text(
        "u1 talk 0.5 2\nu2 talk 2 -1\nu3 lost 0 1\nu4 talk 3 4\nu5 pipe 0 1\n"
    )
    (folder / "text").write_text("u1 hello there\n\nu2\nu3 hi\nu5 hi\n")
    manifest = read(tmp_path, "train")
    clips = [(clip.id, clip.start, clip.end, clip.sentence) for clip in manifest]
    assert clips == [("u1", 500_000, 2_000_000, "hello there"), ("u2", 2_000_000, None, "")]
    assert manifest[0].path.resolve() == tmp_path / "talk.flac"
    assert manifest[0].columns == {"language": "en"}
    assert [(row.id, row.reason) for row in manifest.excluded] == [
        ("u3", "not one channel of a recording"),
        ("u4", "no transcript"),
        ("u5", "audio that is not in a file"),
    ]
    assert read(tmp_path, "train", columns={"text": None}).ids == ["u1", "u2", "u4"]


REFUSED = [  # another file than wav.scp and text, and the error
    ("segments", "u a 0 1 B", "names channels"),
    ("reco2file_and_channel", "a a A", "names channels"),
    ("segments", "u a", r"wav.scp cannot be read by Lhotse \(ValueError"),
    ("without lhotse", "", r"needs the package lhotse.*pip install 'sbkit\[corpora\]'"),
]


@pytest.mark.parametrize(("name", "line", "words"), REFUSED)
def test_folder_of_kaldi_is_refused(
    name: str, line: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both speakers of a call were mixed under each text."""
    folder = tmp_path / "train"
    folder.mkdir()
    for file, content in {"wav.scp": "a ../a.wav", "text": "a hello", name: line}.items():
        (folder / file).write_text(f"{content}\n")
    if name == "without lhotse":
        monkeypatch.setitem(sys.modules, "lhotse", None)
    with pytest.raises(SbkitError, match=words):
        read(tmp_path, "train")

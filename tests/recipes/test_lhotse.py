"""What Lhotse reads is read as the corpus itself is."""

import shutil
import sys
from collections.abc import Callable
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


def load(manifests: Path, split: str) -> lhotse.CutSet:
    recordings, supervisions = (
        kind.from_file(manifests / f"librispeech_{name}_{split}.jsonl.gz")
        for kind, name in (
            (lhotse.RecordingSet, "recordings"),
            (lhotse.SupervisionSet, "supervisions"),
        )
    )
    return lhotse.CutSet.from_manifests(recordings, supervisions)


def write_cuts(manifests: Path, folder: Path) -> None:
    for split in SPLITS:
        load(manifests, split).to_file(folder / f"a_cuts_{split}.jsonl.gz")


def write_cuts_of_folders(manifests: Path, folder: Path) -> None:
    for split in SPLITS:
        cuts = [*load(manifests, split)]
        for number in range(2):
            file = folder / split / f"cuts.{number:06}.jsonl.gz"
            file.parent.mkdir(exist_ok=True)
            lhotse.CutSet.from_cuts(cuts[number::2]).to_file(file)


@pytest.mark.parametrize("write", [None, write_cuts, write_cuts_of_folders])
def test_each_form_is_the_corpus_itself(
    write: Callable[[Path, Path], None] | None, root: Path, manifests: Path, tmp_path: Path
) -> None:
    folder = manifests if write is None else tmp_path / "other"
    if write is not None:
        folder.mkdir()
        write(manifests, folder)
    assert corpus_of(settings(folder)).roles() == corpus_of(settings(root)).roles()
    for split in SPLITS:
        clips, expected = read(folder, split), read(root, split)
        assert (clips.excluded, len(clips)) == ((), 4)
        for clip, other in zip(sorted(clips, key=str), sorted(expected, key=str), strict=True):
            assert (clip.id, clip.path, clip.sentence) == (other.id, other.path, other.sentence)
            assert clip.columns["speaker"] == other.columns["speaker"]
            seconds = lhotse.Recording.from_file(clip.path).duration
            assert clip.start == 0
            assert clip.end == round(seconds * MICROSECONDS)


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
    positions = [(part.start, part.end, part.channel) for part in manifest.parts]
    assert positions == [(0, 1_000_000, 0), (500_000, 1_000_000, 1)]
    reasons = {row.id: row.reason for row in manifest.excluded}
    assert reasons == {
        "c": "not one channel",
        "d": "not a part of a recording",
        "e": "outside of its recording",
    }


def test_cuts_that_are_no_parts_of_files_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "cuts_train.jsonl").write_text(CUTS.read_text())
    manifest = read(tmp_path, "train")
    assert [(clip.id, clip.start, clip.end, clip.sentence) for clip in manifest] == [
        ("talk-a", 500_000, 1_750_000, "first words"),
        ("talk-b", 1_750_000, 3_812_500, "second words"),
        ("talk-c", 6_000_000, 9_300_000, "third words"),
        ("two-a", 0, 1_000_000, "left"),
    ]
    assert [part.channel for part in manifest.parts] == [None, None, None, 0]
    assert manifest[2].path == tmp_path / "talk.flac"
    assert manifest[2].columns == {"speaker": "bob", "gender": "M", "language": "English"}
    assert {(row.id, row.reason) for row in manifest.excluded} == {
        ("talk-a_sp1.1", "changed sound"),
        ("talk-a", "not a part of a recording"),  # of x1 and x3, which are mixed
        ("talk-b", "not a part of a recording"),
        ("talk-a", "clip listed twice"),  # of x2, which is only resampled, and x4
        ("talk-b", "clip listed twice"),
        ("x5", "no transcript"),
    }


def test_segments_and_folders_of_wenet_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "train"
    folder.mkdir()
    (folder / "wav.scp").write_text("talk ../talk.flac\n")
    (folder / "segments").write_text("u1 talk 0.5 2\nu2 talk 2 -1\nu3 lost 0 1\nu4 talk 3 4\n")
    (folder / "text").write_text("u1 hello there\n\nu2\nu3 hi\n")
    manifest = read(tmp_path, "train")
    clips = [(clip.id, clip.start, clip.end, clip.sentence) for clip in manifest]
    assert clips == [("u1", 500_000, 2_000_000, "hello there"), ("u2", 2_000_000, None, "")]
    assert manifest[0].path.resolve() == tmp_path / "talk.flac"
    assert manifest[0].columns == {"language": "en"}
    reasons = {row.id: row.reason for row in manifest.excluded}
    assert reasons == {"u3": "not a part of a recording", "u4": "no transcript"}
    assert read(tmp_path, "train", columns={"text": None}).ids == ["u1", "u2", "u4"]


def test_shar_is_read_once_its_audio_is_in_files(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error has the command, which works around a fault of Lhotse: a path in its cuts."""
    cut = lhotse.Recording.from_file(next(root.rglob("*.flac"))).to_cut()
    cut.supervisions = [lhotse.SupervisionSegment("u", cut.recording_id, 0, 0.5, text="hi")]
    (tmp_path / "shar/train").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "shar")
    lhotse.CutSet.from_cuts([cut]).to_shar("train", fields={"recording": "flac"})
    with pytest.raises(SbkitError, match="u is not a file but of the type shar") as error:
        read(tmp_path / "shar", "train")
    eval(str(error.value).partition("Lhotse: ")[2], {"CutSet": lhotse.CutSet})
    shutil.rmtree("train")
    (clip,) = read(tmp_path / "shar", "train")
    assert (clip.end, clip.path.is_file()) == (500_000, True)


@pytest.mark.parametrize(
    ("name", "line"), [("segments", "u a 0 1 B"), ("reco2file_and_channel", "a a A")]
)
def test_kaldi_folder_that_names_channels_is_refused(name: str, line: str, tmp_path: Path) -> None:
    """Both speakers of a call were mixed under each text."""
    folder = tmp_path / "train"
    folder.mkdir()
    for file, content in {"wav.scp": "a ../a.wav", "text": "a hello", name: line}.items():
        (folder / file).write_text(f"{content}\n")
    with pytest.raises(SbkitError, match=f"{folder} names channels"):
        read(tmp_path, "train")


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ("damaged", r"wav.scp cannot be read by Lhotse \(ValueError"),
        ("without lhotse", r"needs the package lhotse.*pip install 'sbkit\[corpora\]'"),
    ],
)
def test_folder_that_cannot_be_read_is_refused(
    form: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "data/train"
    folder.mkdir(parents=True)
    (folder / "wav.scp").write_text("u1\n")
    if form == "without lhotse":
        monkeypatch.setitem(sys.modules, "lhotse", None)
    with pytest.raises(SbkitError, match=words):
        read(folder.parent, "train")

"""Write a release of Common Voice from the clips of the default corpus, to try the whole path.

python -m tools.fake_common_voice --language en --clips 300 --product spontaneous --out FOLDER

Folders, files and columns are as the datasets describe them, with real MP3s:
https://github.com/common-voice/cv-dataset/tree/main/datasets/scripted-speech     (release 27)
https://github.com/common-voice/cv-dataset/tree/main/datasets/spontaneous-speech  (release 5)
The voice comes from the default corpus; speakers and the tags of transcriptions are invented.
"""

import argparse
import hashlib
import json
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import soundfile

from recipes.AsteriskPrompts.corpus import LICENSES, AsteriskPrompts
from recipes.debian.release import ReleaseRow
from sbkit.audio.io import declared_seconds, read_audio
from sbkit.base.process import run_main
from sbkit.data.corpus import RELEASE_SPLITS
from sbkit.data.manifest import Clip

VERSION = "0.0-2026-01-01"
MP3_RATE = 32_000  # Hz, as many clips of Common Voice have
NUM_SPEAKERS = {"train": 8, "dev": 3, "test": 3, "": 4}  # by split; "" for rows without one
AGES = ("twenties", "thirties", "fifties", "")
GENDERS = ("female_feminine", "male_masculine", "")
ACCENTS = ("", "Northern", "Northern,Coastal")
TAGS = (
    *("[noise] {}", "{} [laughter]", "[disfluency] {}"),
    *("[noise [laughter]] {}", "{} [noise", "{}"),
)

Row = Mapping[str, object]


@dataclass(frozen=True)
class Recording:
    """A clip of the default corpus and an invented speaker."""

    clip: Clip
    number: int
    split: str
    speaker: Mapping[str, str]  # columns that both products have

    def write_mp3(self, file: Path) -> int:
        """Write the clip, and return its milliseconds."""
        samples = read_audio(self.clip.path, MP3_RATE)
        soundfile.write(file, samples, MP3_RATE, format="MP3")
        return round(1000 * declared_seconds(file))


def choose_recordings(language: str, num_clips: int, product: str) -> Iterator[Recording]:
    """Take clips of each split of the default corpus; an eighth of train gets no split.

    The two products share no speaker, and no clip if each has at most half of all.
    """
    corpus = AsteriskPrompts({"language": language})
    clips_by_split = {split: [*corpus.clips(split)] for split in RELEASE_SPLITS}
    total = sum(map(len, clips_by_split.values()))
    number = 0
    for name, clips in clips_by_split.items():
        for index in range(num_clips * len(clips) // total):
            number += 1
            split = "" if name == "train" and index % 8 == 7 else name
            speaker = f"{product} {language} {split} {index // 8 % NUM_SPEAKERS[split]}"
            digest = hashlib.sha512(speaker.encode())
            traits = digest.digest()
            columns = {
                "client_id": digest.hexdigest(),
                "age": AGES[traits[0] % len(AGES)],
                "gender": GENDERS[traits[1] % len(GENDERS)],
                "accents": ACCENTS[traits[2] % len(ACCENTS)],
                "variant": f"{language}-{('north', 'south')[traits[3] % 2]}",
            }
            clip = clips[index if product == "scripted" else -1 - index]
            yield Recording(clip, number, split, columns)


def write_scripted(folder: Path, language: str, recordings: Sequence[Recording]) -> None:
    """Write `clips/` and the tables; rows without a split are in validated.tsv and other.tsv."""
    release = folder / language
    (release / "clips").mkdir(parents=True)
    names = ("train", "dev", "test", "validated", "other")
    tables: dict[str, list[Row]] = {name: [] for name in names}
    durations: list[Row] = []
    for recording in recordings:
        name = f"common_voice_{language}_{recording.number}.mp3"
        milliseconds = recording.write_mp3(release / "clips" / name)
        durations.append({"clip": name, "duration[ms]": milliseconds})
        text = recording.clip.sentence
        id = hashlib.sha256(text.encode()).hexdigest()
        clip = ReleaseRow(client_id="", path=name, sentence_id=id, sentence=text, locale=language)
        row = {**asdict(clip), **recording.speaker}
        if recording.split:
            tables[recording.split].append(row)
        is_other = not recording.split and recording.number % 3 == 0
        tables["other" if is_other else "validated"].append(row)
    for name, rows in {**tables, "clip_durations": durations}.items():
        write_tsv(release / f"{name}.tsv", rows)
    write_datasheet(release / "README.md", language, f"cv-corpus-{VERSION}", "Scripted")


def write_spontaneous(folder: Path, language: str, recordings: Sequence[Recording]) -> None:
    """Write `audios/` and the table; of the rows without a split, some are not transcribed."""
    (folder / "audios").mkdir(parents=True)
    rows: list[Row] = []
    for recording in recordings:
        number = recording.number
        name = f"spontaneous-speech-{language}-{number}.mp3"
        milliseconds = recording.write_mp3(folder / "audios" / name)
        is_pending = not recording.split and number % 3 == 0
        text = TAGS[number % len(TAGS)].format(recording.clip.sentence)
        rate = len(text) * 1000 / milliseconds
        limits = {
            "short-audio": milliseconds < 2_000,
            "long-audio": milliseconds > 30_000,
            "speech-rate": rate > 30 and not is_pending,
            "transcription-length": len(text) > 300,
        }
        ids = {"audio_id": number, "audio_file": name, "duration_ms": milliseconds}
        prompt = {"prompt_id": 1, "prompt": "What do you hear?"}
        transcription = {"transcription": "" if is_pending else text, "votes": 2 - 2 * is_pending}
        counts = {"prompt_upvotes": 2, "prompt_reports": 0, "is_edited": 0}
        quality = {
            "split": "unassigned" if is_pending else recording.split,
            "char_per_sec": f"{0 if is_pending else rate:.2f}",
            "quality_tags": "|".join(tag for tag, applies in limits.items() if applies),
        }
        client_id = {"client_id": recording.speaker["client_id"]}
        columns = {**client_id, **ids, **prompt, **transcription, **recording.speaker}
        rows.append({**columns, "language": f"Invented {language}", **counts, **quality})
    write_tsv(folder / f"ss-corpus-{language}.tsv", rows)
    reported = [{"audio_id": 1, "audio_file": rows[0]["audio_file"], "reason": "other"}]
    write_tsv(folder / f"ss-reported-audios-{language}.tsv", reported)
    summary = {"clips": len(rows), "tagged": sum(row["quality_tags"] != "" for row in rows)}
    (folder / f"ss-corpus-{language}.qa-summary.json").write_text(json.dumps(summary))
    write_datasheet(folder / "README.md", language, f"sps-corpus-{VERSION}", "Spontaneous")


def write_tsv(file: Path, rows: Sequence[Row]) -> None:
    """Write rows, whose keys become the header."""
    lines = [[*rows[0]], *([str(value) for value in row.values()] for row in rows)]
    file.write_text("".join("\t".join(line) + "\n" for line in lines), encoding="utf-8")


def write_datasheet(file: Path, language: str, release: str, product: str) -> None:
    """Write the two sentences of a datasheet that sbkit reads, with the license of the clips."""
    file.write_text(
        f"# Invented (`{language}`)\n\nThis datasheet is for {release} of the Mozilla Common Voice "
        f"*{product} Speech* dataset for invented speakers [`{language}`]. It is fake, written by "
        "tools/fake_common_voice.py.\n\n## License\n\nThis dataset is released "
        f"under the [{LICENSES[language]}](https://spdx.org/licenses) license of its clips.\n",
        encoding="utf-8",
    )


def main() -> None:
    """Write a release as a folder and as the archive to download, and print both."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--language", default="en", help=f"one of {', '.join(LICENSES)}")
    parser.add_argument("--clips", type=int, default=300)
    parser.add_argument("--product", choices=("scripted", "spontaneous"), default="scripted")
    parser.add_argument("--out", type=Path, default=Path(), help="default: the working folder")
    options = parser.parse_args()
    is_scripted = options.product == "scripted"
    name = f"cv-corpus-{VERSION}" if is_scripted else f"sps-corpus-{VERSION}-{options.language}"
    folder = options.out / name
    recordings = [*choose_recordings(options.language, options.clips, options.product)]
    write = write_scripted if is_scripted else write_spontaneous
    write(folder, options.language, recordings)
    archive = options.out / f"{name}{f'-{options.language}' * is_scripted}.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder, name)
    print(folder, archive, sep="\n")


if __name__ == "__main__":
    run_main(main)

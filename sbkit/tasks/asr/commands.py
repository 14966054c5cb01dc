"""The command `sbkit transcribe`: from audio files to text.

A file that fails does not stop the others. Its error goes to standard error, to the file of
``--errors``, and into the exit code.
"""

import errno
import hashlib
import json
import os
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from sbkit.base.checksums import CHECKSUMS, checksum
from sbkit.base.errors import PARTLY_DONE, ConfigError, DataError, SbkitError
from sbkit.base.files import (
    from_plain,
    require_writable,
    size_and_mtime,
    task_lock,
    temporary_path,
    write_text_atomically,
)
from sbkit.base.messages import listed, printable, printable_json
from sbkit.cli.arguments import Parser
from sbkit.cli.clip_table import Share
from sbkit.logs.handlers import print_line
from sbkit.tasks.asr import segment

if TYPE_CHECKING:
    from sbkit.tasks.asr.transcript import Transcript

TIMED_FORMATS = ("srt", "vtt", "tsv", "eaf", "textgrid")  # a file for each recording
SUFFIXES = {"text": ".txt", "textgrid": ".TextGrid"}  # of results, if it is not the format
RECORD = "sbkit-results"  # how the names of the files of a record begin; those of shares differ
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)  # not of one name alone
# Options with an effect on a result; --truncated only adds some.
TEXT_OPTIONS = (
    *("format", "channel", "side", "raw_rate", "decoder", "hotwords", "language"),
    *("vad", "runtime", "precision", "compile"),
)


def add_commands(parser: Parser) -> None:
    """Add `transcribe` and `segment`."""
    segment.add_commands(parser)
    help = "transcribe audio files"
    groups = "model files runtime decoding language vad quiet import share"
    add = parser.add_command("transcribe", transcribe, help, groups, opens_bundle=True)
    add("--format", choices=("text", "json", *TIMED_FORMATS), default="text")
    add("--out", metavar="DIR", type=Path, help="write one file per recording there")
    again = "transcribe all files again, and overwrite what is in DIR"
    add("--again", action="store_true", help=again)
    channel = "the channel to transcribe, counted from 0, or each (default: all are downmixed)"
    add("--channel", metavar="N|each", type=_parse_channel, help=channel)
    truncated = "files that end long before or behind their declared end (default: refuse)"
    add("--truncated", choices=("refuse", "keep"), default="refuse", help=truncated)
    side = "what a model takes beside audio, a text or a file of audio; repeatable"
    add("--side", metavar="NAME=VALUE", type=_parse_side, action="append", default=[], help=side)
    live = "print the text of one FILE, - or mic (a microphone) while it is spoken"
    add("--live", action="store_true", help=live)
    add("--pace", metavar="X", type=float, help="speed of --live with a file; 1 is real time")


def _parse_channel(text: str) -> int | str:
    return text if text == "each" else int(text)


def _parse_side(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not (name and separator and value):
        raise ValueError(text)
    return name, value


def transcribe(options: Namespace) -> int:
    """Transcribe files or one input while it plays, and return the exit code."""
    if options.pace is not None and not options.live:
        raise ConfigError("`--pace` needs --live.")
    if options.live:
        from sbkit.tasks.asr.live import transcribe_live

        return transcribe_live(options)
    from sbkit.tasks.asr.recordings import find_audio, open_transcriber, show_seconds

    file = options.errors  # is opened early: if it cannot be written, nothing is read
    mode = "w" if options.share is None else "a"  # shares may have one file
    with (
        find_audio(options.files, options.raw_rate) as names,
        nullcontext() if file is None else file.open(mode, encoding="utf-8") as errors,
        ExitStack() as stack,
    ):
        if options.out is None and len(names) > 1 and options.format in TIMED_FORMATS:
            fault = f"--format {options.format} prints one recording, not {len(names)}."
            raise ConfigError(f"{fault} Pass --out DIR.")
        files = (options.share or Share()).of([*names])
        due: Mapping[Path, Entry | None] = dict.fromkeys(files)
        outcomes: Iterable[tuple[Path, Transcript | SbkitError]] = ()
        if options.out is not None:
            due, refused = plan_results(options, names, files)
            outcomes = refused.items()
        if due:
            times = options.format != "text"
            transcriber = stack.enter_context(open_transcriber(options, times=times))
            row = dict(options.side)
            if unknown := row.keys() - transcriber.side_fields.keys():
                expected = listed(transcriber.side_fields) or "nothing"
                raise ConfigError(
                    f"This model takes {expected} beside audio, but --side names {listed(unknown)}."
                )
            on_seconds = stack.enter_context(show_seconds("transcribing", [*due]))
            stream = transcriber.stream(
                [*due],
                on_seconds=on_seconds,
                channel=options.channel,
                keep_truncated=options.truncated == "keep",
                row=row,
            )
            outcomes = chain(outcomes, zip(due, stream, strict=True))
        return _write_results(options, files, due, outcomes, errors)


def _write_results(
    options: Namespace,
    files: Sequence[Path],
    due: "Mapping[Path, Entry | None]",
    outcomes: "Iterable[tuple[Path, Transcript | SbkitError]]",
    errors: TextIO | None,
) -> int:
    """Write the result of each file that is due, or print its error; return the exit code."""
    num_written = 0
    num_failed = 0
    for file, outcome in outcomes:
        try:
            if isinstance(outcome, SbkitError):
                raise outcome
            text = _to_text(outcome, options.format, file)
            if entry := due[file]:
                write_result(options, entry, f"{text}\n")
            elif options.format == "text" and (len(files) > 1 or options.share is not None):
                for line in text.split("\n"):  # of a call there is a line for each turn
                    print_line(f"{printable(str(file))}\t{line}")
            else:
                print_line(text)
            num_written += 1
        except SbkitError as error:
            num_failed += 1
            print_line(str(error), to_stderr=True)
            if errors is not None:
                line = json.dumps({"file": str(file), "error": str(error)}, ensure_ascii=False)
                print(printable_json(line), file=errors, flush=True)
    num_skipped = len(files) - num_written - num_failed
    if len(files) > 1:
        line = f"{num_written} written, {num_failed} failed"
        if num_skipped:
            line += f", {num_skipped} skipped"
        if num_failed:
            place = "above" if errors is None else f"in {printable(str(options.errors))}"
            line += f"; the errors are {place}"
        print(line, file=sys.stderr)
    return PARTLY_DONE if num_failed else 0


def _to_text(result: "Transcript", format: str, recording: Path) -> str:
    """Return a result in a format, without the last line end."""
    from sbkit.tasks.asr.annotation_files import to_eaf, to_textgrid
    from sbkit.tasks.asr.subtitles import to_srt, to_tsv, to_vtt

    if format == "json":
        return printable_json(json.dumps(result.plain(), ensure_ascii=False))
    if format in TIMED_FORMATS:
        if result.text and not result.words:  # a user's task need not time them
            raise DataError(f"This model does not time words, which --format {format} needs.")
        if format == "tsv":
            return to_tsv(result.words)
        if format == "eaf":
            return to_eaf(result.words, recording, spaces=result.spaces).rstrip()
        if format == "textgrid":
            return to_textgrid(result.words, result.seconds, spaces=result.spaces).rstrip()
        return {"srt": to_srt, "vtt": to_vtt}[format](result.words, spaces=result.spaces)
    return str(result)


@dataclass(frozen=True)
class Entry:
    """A line of the record; the version of a file is its size in bytes and its time in ns."""

    result: str  # its path below the folder of the record
    version: tuple[int, ...]  # of the result
    recording: str  # its absolute path
    made_from: Mapping[str, Any]  # the version of the recording, the model and the options
    digest: str = ""  # of the recording


NO_ENTRY = Entry("", (0, 0), "", {})  # with the version of a missing file


def plan_results(
    options: Namespace, recordings: Mapping[Path, Path], share: Sequence[Path]
) -> tuple[dict[Path, Entry], dict[Path, DataError]]:
    """Return entries of the results to write, and errors of those that must be kept; print why.

    The names of new results enter the record at once: another command may be planning, too.

    recordings: of all shares, each with its name.
    """
    require_writable(options.out, option="--out")
    suffix = SUFFIXES.get(options.format, f".{options.format}")
    paths = {file: os.path.normpath(file.absolute()) for file in recordings}
    text_options = {option: _content(getattr(options, option)) for option in TEXT_OPTIONS}
    common = {"model": _content(options.bundle), "options": text_options}
    due: dict[Path, Entry] = {}
    refused: dict[Path, DataError] = {}
    reasons: Counter[str] = Counter()
    with task_lock(options.out, RECORD, wait=True):
        entries = _read_record(options.out)
        moved = _find_moved(paths.values(), entries, suffix)
        entries += moved
        given = {paths[file]: name for file, name in recordings.items()}
        entries = [entry for entry in entries if not _is_orphan(entry, given, options.out)]
        names = assign_names(given, entries, suffix)
        latest = {entry.result: entry for entry in entries}
        written = {(entry.result, entry.version): entry for entry in entries}
        reserved = [replace(NO_ENTRY, result=names[path], recording=path) for path in given]
        new = [entry for entry in reserved if entry.result not in latest]
        _add_to_record(options.out / f"{RECORD}.jsonl", [*moved, *new])
        for file in share:
            name = names[paths[file]]
            made_from = {"recording": [*size_and_mtime(file)], **common}
            version = size_and_mtime(options.out / name)
            before = latest.get(name, NO_ENTRY)
            if version != NO_ENTRY.version:  # a killed command may not have placed its result
                before = written.get((name, version), before)
            if version not in (NO_ENTRY.version, before.version) and not options.again:
                fault = f"{options.out / name} was edited, or is not in the record, and is kept."
                refused[file] = DataError(f"{fault} Move it away, or pass --again.")
                continue
            now = made_from.items()
            changes = [f"{key} changed" for key, value in now if value != before.made_from.get(key)]
            if before.version == NO_ENTRY.version:
                changes = ["new"]
            elif version == NO_ENTRY.version:
                changes = ["result missing"]
            elif options.again:
                changes.append("again")
            if changes:
                reasons[changes[0]] += 1
                due[file] = Entry(name, version, paths[file], made_from)
    counts = ", ".join(f"{number} {reason}" for reason, number in reasons.items())
    print(f"To transcribe: {counts or 'none'}", file=sys.stderr)
    return due, refused


def _read_record(folder: Path) -> list[Entry]:
    """Return the entries of all shares, the latest ones last."""
    entries: list[Entry] = []
    # The last file is that without a share. It has the entries of moved recordings, whose results
    # have their version from before.
    for file in sorted(folder.glob(f"{RECORD}*.jsonl")):
        for line in file.read_bytes().splitlines():
            with suppress(ValueError):  # it is damaged
                entries.append(from_plain(Entry, json.loads(line)))
    return sorted(entries, key=lambda entry: entry.version[1:])


def _is_orphan(entry: Entry, given: Iterable[str], folder: Path) -> bool:
    """Return whether a name is kept for a recording that is gone, and has never been written."""
    files = (Path(entry.recording), folder / entry.result)
    is_kept = entry.version != NO_ENTRY.version or entry.recording in given
    return not is_kept and not any(map(os.path.lexists, files))


def _find_moved(recordings: Iterable[str], entries: Iterable[Entry], suffix: str) -> list[Entry]:
    """Return the entries of recordings that were moved or are linked, with their new paths.

    Such a recording is the file of an entry's recording at another path, or has the bytes of one
    that is gone. A copy is another recording.
    """
    given = {*recordings}
    owners = {entry.result: entry for entry in entries if entry.result.endswith(suffix)}
    known = {entry.recording for entry in owners.values()}
    sizes: set[int] = set()
    sources: dict[object, list[Entry]] = {}  # by the digests of those that are gone, or by files
    for entry in owners.values():
        if entry.digest and entry.recording not in given:
            file = _device_and_inode(entry.recording)
            if file is None:
                sizes.add(entry.made_from["recording"][0])
            sources.setdefault(file or entry.digest, []).append(entry)
    moved: list[Entry] = []
    for path in sorted(given - known):
        if linked := sources.get(_device_and_inode(path)):
            moved.append(replace(linked.pop(0), recording=path))
            continue
        version = size_and_mtime(path)
        same_bytes = sources.get(_digest(path)) if version[0] in sizes else None
        if same_bytes:
            entry = same_bytes.pop(0)
            made_from = {**entry.made_from, "recording": [*version]}
            moved.append(replace(entry, recording=path, made_from=made_from))
    return moved


def _device_and_inode(path: str) -> tuple[int, int] | None:
    with suppress(OSError):  # it is gone
        status = Path(path).stat()
        return status.st_dev, status.st_ino
    return None


def _digest(recording: str) -> str:
    """Return the SHA-256 of a recording, or nothing if it is gone."""
    with suppress(OSError), Path(recording).open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
    return ""


def write_result(options: Namespace, entry: Entry, text: str) -> None:
    """Write a result beside its place, then its line of the record, and then put it there.

    A result that a killed command left without a line would be kept like an edited one.

    Raises DataError if it cannot be written there; OSError if nothing can, as on a full disk.
    """
    file = options.out / entry.result
    digest = _digest(entry.recording)
    if [*size_and_mtime(entry.recording)] != entry.made_from["recording"]:
        digest = ""  # other bytes lie there now than when the result was planned
    with task_lock(options.out, RECORD, wait=True):
        share = f".{options.share.number}-of-{options.share.total}" if options.share else ""
        beside = temporary_path(file)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_text_atomically(beside, text)
            entry = replace(entry, version=size_and_mtime(beside), digest=digest)
            _add_to_record(options.out / f"{RECORD}{share}.jsonl", [entry])
            beside.replace(file)
        except OSError as error:
            if error.errno in DISK_ERRORS:
                raise
            raise DataError(f"{file} cannot be written ({error.strerror}).") from error
        finally:
            beside.unlink(missing_ok=True)


def _add_to_record(file: Path, entries: Iterable[Entry]) -> None:
    lines = "\n".join(json.dumps(asdict(entry)) for entry in entries)
    if lines:
        with file.open("a", encoding="utf-8") as record:
            # The line end comes first, because the line of a killed process may have none.
            record.write(f"\n{lines}" if record.tell() else lines)


def assign_names(
    recordings: Mapping[str, Path], entries: Iterable[Entry], suffix: str
) -> dict[str, str]:
    """Return the name of the result of each recording; paths are given with recordings' own names.

    Those in the record are kept. A late share finds there what it would have given.
    """
    owners = {entry.result: entry.recording for entry in entries}
    names = {owner: name for name, owner in owners.items() if name.endswith(suffix)}
    for path, name in sorted(recordings.items()):
        if path not in names:
            stems = chain([name.with_suffix(""), name], (f"{name}.{i}" for i in count(2)))
            results = (f"{stem}{suffix}" for stem in stems)
            names[path] = next(result for result in results if result not in owners)
            owners[names[path]] = path
    return names


def _content(value: object) -> str:
    """Return the checksum of a file or a model that a value names, or the value."""
    from sbkit.bundle.config import WEIGHTS_FILE

    path = Path(str(value))
    files = (path / CHECKSUMS, path / WEIGHTS_FILE)  # of a bundle, of a model of transformers
    with suppress(OSError, ValueError):  # it names none
        return checksum(next((file for file in files if file.exists()), path))
    return str(value)

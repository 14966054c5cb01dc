"""Name the rows of docs/results*.md that are older than the YAML they were measured with.

A row that is up to date has its command and digest: `hparams/ctc.yaml` `01234567`. With a command
as arguments, print the digest.
"""

import hashlib
import re
import shlex
import sys
from pathlib import Path

from sbkit.base.files import to_json
from sbkit.checkpoint.run_config import describe_spec
from sbkit.config.hparams import read_spec
from sbkit.config.keys import KEYS
from sbkit.config.overrides import parse_command

DEFAULT_VALUES = [(name, key.default) for name, key in KEYS.items()]
ROW = re.compile(r"`(hparams/\w+\.yaml[^`]*)` `([0-9a-f]{8})`")


def digest_of(command: list[str]) -> str:
    """Return a short SHA-256 of the resolved YAML, without defaults and keys of the machine."""
    values = describe_spec(read_spec(*parse_command(command))).values.items()
    of_machine = {name for name, key in KEYS.items() if not key.affects}
    pairs = [pair for pair in values if pair[0] not in of_machine and pair not in DEFAULT_VALUES]
    return hashlib.sha256(to_json(sorted(pairs)).encode()).hexdigest()[:8]


def main() -> None:
    """Print the digest of a command, or the rows that are older than their YAML."""
    if command := sys.argv[1:]:
        print(digest_of(command))
    for page in sorted(Path("docs").glob("results*.md")) if not command else ():
        older = [
            str(number)
            for number, line in enumerate(page.read_text("utf-8").splitlines(), start=1)
            if line.endswith("| older |")
            or any(digest_of(shlex.split(row)) != digest for row, digest in ROW.findall(line))
        ]
        print(f"{page}: lines {', '.join(older) or 'none'} are older than their YAML")


if __name__ == "__main__":
    main()

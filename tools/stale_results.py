"""Name the rows of docs/results*.md that are older than the YAML they were measured with.

Such a row has the command's YAML and options, and their digest: `hparams/ctc.yaml` `01234567`.

    python -m tools.stale_results
    python -m tools.stale_results hparams/ctc.yaml --number_of_epochs=90   # prints its digest
"""

import hashlib
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from sbkit.base.files import to_json
from sbkit.base.ranges import KEYS
from sbkit.checkpoint.run_config import MACHINE_KEYS, RunConfig
from sbkit.config.overrides import parse_command

ROW = re.compile(r"`(hparams/\w+\.yaml[^`]*)` `([0-9a-f]{8})`")


def digest_of(command: Sequence[str]) -> str:
    """Return a short SHA-256 of the resolved YAML, without keys of the machine and defaults."""
    values = {
        name: value
        for name, value in RunConfig.from_yaml(*parse_command(command)).values.items()
        if name not in MACHINE_KEYS and not (name in KEYS and value == KEYS[name].default)
    }
    return hashlib.sha256(to_json(sorted(values.items())).encode()).hexdigest()[:8]


def main() -> None:
    """Print the digest of a command, or the rows that are older than their YAML."""
    if command := sys.argv[1:]:
        print(digest_of(command))
        return
    for page in sorted(Path("docs").glob("results*.md")):
        older = []
        for number, line in enumerate(page.read_text("utf-8").splitlines(), start=1):
            stale = [
                pair for pair in ROW.findall(line) if digest_of(shlex.split(pair[0])) != pair[1]
            ]
            if stale or line.endswith("| older |"):
                older.append(str(number))
        print(f"{page}: lines {', '.join(older) or 'none'} are older than their YAML")


if __name__ == "__main__":
    main()

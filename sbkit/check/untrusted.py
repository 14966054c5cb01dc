"""`sbkit check --untrusted`: what of a foreign YAML is refused, as findings."""

from pathlib import Path

from sbkit.check.finding import Finding
from sbkit.config.judge import judge

FIX = "Take it away, or read what it does and build it yourself."


def check_untrusted(yaml_file: Path) -> list[Finding]:
    """Return a finding for every node that is refused, of the file and of those it includes.

    Raises SbkitError when a file cannot be read as YAML within its limits.
    """
    return [
        Finding(
            check="untrusted",
            declared=f"{each.tag} {each.text}".strip(),
            effect=f"{each.tag} {each.reason}",
            where=each.where,
            fix=FIX,
        )
        for each in judge(yaml_file)
    ]

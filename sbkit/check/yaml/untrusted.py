"""`sbkit check --untrusted`: what of a foreign YAML is refused, as findings."""

from pathlib import Path

from sbkit.base.errors import SbkitError
from sbkit.check.finding import Finding, words_of
from sbkit.config.hparams import read_knobs
from sbkit.config.judge import judge
from sbkit.train.recipe import refuse_foreign_modules

FIX = "Take it away, or read what it does and build it yourself."


def check_untrusted(yaml_file: Path) -> list[Finding]:
    """Return a finding for every node that is refused, of the file and of those it includes.

    Raises SbkitError when a file cannot be read as YAML within its limits.
    """
    findings = [
        Finding(
            check="untrusted",
            declared=f"{each.tag} {each.text}".strip(),
            effect=f"{each.tag} {each.reason}",
            where=each.where,
            fix=FIX,
        )
        for each in judge(yaml_file)
    ]
    return findings or _foreign_modules(yaml_file)


def _foreign_modules(yaml_file: Path) -> list[Finding]:
    """Find a recipe or corpus that training would import, in a file that is harmless else."""
    try:
        knobs = read_knobs(yaml_file, {})
    except SbkitError:
        return []  # such a file is not trained either
    try:
        refuse_foreign_modules(knobs, yaml_file)
    except SbkitError as error:
        return [Finding(check="untrusted", where=f"{yaml_file}:1", **words_of(str(error)))]
    return []

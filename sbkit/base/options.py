"""How the options of a command may be spelled."""

import argparse
from typing import Any


class Parser(argparse.ArgumentParser):
    """Take an option's name with `_` for `-`, too, as keys of a YAML have it: --report_by."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse what this command has, of the parser of each command below."""
        return super().parse_known_args([*map(self._spell, args)], namespace)

    def _spell(self, argument: str) -> str:
        name, *value = argument.split("=", 1)
        spelled = name.replace("_", "-")
        return "=".join([spelled, *value]) if spelled in self._option_string_actions else argument

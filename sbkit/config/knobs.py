"""The values of a YAML by name; reading a missing one raises an error that names it."""

from types import SimpleNamespace
from typing import Any, NoReturn

from sbkit.base.errors import SbkitError


class MissingKnobError(SbkitError, AttributeError):
    """Code reads a key that the YAML does not have."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"`{name}` must be in the YAML, since this run reads it, but is not. Add it, or "
            "correct the key that is meant."
        )


class Knobs(dict[str, Any]):
    """Values by their keys; `get` has a default, and `[]` raises MissingKnobError."""

    def __missing__(self, name: str) -> NoReturn:
        raise MissingKnobError(name)


class KnobAttributes(SimpleNamespace):
    """Values as the attributes of a Brain's `hparams`; raises MissingKnobError."""

    def __getattr__(self, name: str) -> NoReturn:
        raise MissingKnobError(name)

"""What is served: recognizers and voices, by the names that clients have for them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

from sbkit.base.messages import listed
from sbkit.serve.errors import ApiError
from sbkit.serve.metrics import noted
from sbkit.serve.recognizer import Recognizer
from sbkit.serve.voice import Voice

Engine = TypeVar("Engine", bound=Recognizer | Voice)


@dataclass(frozen=True, kw_only=True)
class Model:
    """A bundle that is served.

    name: of its folder; created: when it was, in seconds since 1970; readme: of the bundle.
    """

    name: str
    engine: Recognizer | Voice
    created: int = 0
    readme: str = ""


@dataclass(frozen=True, kw_only=True)
class Models:
    """All bundles that are served; an alias means the first one of its kind."""

    models: Sequence[Model]
    aliases: Mapping[type, Sequence[str]]

    @property
    def names(self) -> list[str]:
        """All names that clients may use."""
        names = (model.name for model in self.models)
        return [*dict.fromkeys(chain(names, *self.aliases.values()))]

    def pick(self, kind: type[Engine], name: str = "") -> Engine:
        """Return the recognizer, or the voice, of a name; without one, the first.

        Raises:
            ApiError: there is none.
        """
        engines = ((each.name, each.engine) for each in self.models)
        own = {name: engine for name, engine in engines if isinstance(engine, kind)}
        aliases = self.aliases.get(kind, ())
        if name not in own and (not name or name in aliases):
            name = next(iter(own), name)
        if name not in own:
            raise unknown_model(name, [*own, *aliases] if own else [])
        noted.get({})["model"] = name
        return own[name]

    def names_of(self, kind: type[Engine]) -> list[str]:
        """Return the names of all recognizers, or voices."""
        return [each.name for each in self.models if isinstance(each.engine, kind)]


def unknown_model(name: str, names: Sequence[str]) -> ApiError:
    """Return the error over a model that is not served, or does not do what is asked for."""
    known, fix = f"one of {listed(names, max_names=10)}", "Choose one of them."
    if not names:
        known, fix = "one that does this, of which this server has none", "Ask another server."
    told = f"`model` must be {known}, but is {name[:100] or 'missing'}. {fix}"
    return ApiError(404, told, "model")

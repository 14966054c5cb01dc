"""Plain data, as JSON holds it, within the size of a model's description."""

from typing import Any

Plain = Any  # what JSON can hold
DEEPEST, MOST = 50, 100_000  # levels and values of a configuration


def refuse_bomb(plain: Plain) -> None:
    """Refuse data that is deeper or larger than a model's description; raises ValueError."""
    count, waiting = 0, [(plain, 0)]
    while waiting:
        value, depth = waiting.pop()
        count += 1
        if depth > DEEPEST or count > MOST:
            raise ValueError(f"it has more than {DEEPEST} levels or {MOST} values")
        below = value.values() if isinstance(value, dict) else value
        if isinstance(value, dict | list):
            waiting += [(each, depth + 1) for each in below]

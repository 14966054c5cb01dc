"""Whether the server takes requests: not before it is warm, nor while it stops."""

from collections.abc import Iterator
from contextlib import contextmanager

from sbkit.serve.errors import UnavailableError

WARMING, READY, DRAINING = "warming up", "ready", "draining"


class State:
    """The phase of a server, and how many requests for transcripts are in flight.

    phase: one of the three above; failure: what ended the warm-up.
    """

    def __init__(self) -> None:
        self.phase, self.in_flight = WARMING, 0
        self.failure: BaseException | None = None

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count a request while it is in flight."""
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    def require_ready(self) -> None:
        """Raise UnavailableError in another phase."""
        if self.phase != READY:
            raise UnavailableError(
                f"The server must be ready to take audio, but is {self.phase}. Try again later."
            )

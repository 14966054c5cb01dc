"""Run a model of others: what it cannot do with a file is that file's error."""

from collections.abc import Iterator
from contextlib import contextmanager

from sbkit.base.errors import SbkitError
from sbkit.base.printable import printable


@contextmanager
def fitting(audio: object) -> Iterator[None]:
    """Turn an error of the model into one sentence that names the audio.

    Raises SbkitError.
    """
    try:
        yield
    except SbkitError:
        raise
    except Exception as error:  # the parts may be anything that is on the list, in any order
        raise SbkitError(
            f"A bundle's parts must fit each other, but with {audio} the model raised "
            f"{type(error).__name__} ({printable(str(error))[:200]}). Export it again, or try a "
            "shorter file."
        ) from error

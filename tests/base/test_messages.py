"""Messages are safe to print."""

from sbkit.base.errors import SbkitError


def test_name_in_error_cannot_move_cursor() -> None:
    error = SbkitError("It must be one, but \x1b[2J\x9b2J\u202eno \udcff is two.\nTake one.")
    assert str(error) == "It must be one, but \\x1b[2J\\x9b2J\\u202eno \\udcff is two.\\nTake one."

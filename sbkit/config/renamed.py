"""Keys and arguments that have another name now: the old one is refused with the new one."""

from collections.abc import Container

from sbkit.base.errors import SbkitError
from sbkit.config.document import REFERENCE_TAGS, Document, tag_of, walk
from sbkit.config.references import REFERENCE, key_parts, text_of

RENAMED = {
    "join_share": "concat_prob",
    "time_share": "max_time_fraction",
    "channels": "cnn_channels",
    "warmup": "warmup_fraction",
}


def renamed(name: str, known: Container[str]) -> str:
    """Return advice for an old name whose new one is known, or nothing."""
    new = RENAMED.get(name)
    return f" It is called `{new}` now." if new is not None and new in known else ""


def refuse_renamed(document: Document) -> None:
    """Refuse an old key at the root of a file, unless the file itself refers to it.

    Raises SbkitError with the key, the line and the new name.
    """
    texts = [text_of(node) for _, node in walk(document.root) if tag_of(node) in REFERENCE_TAGS]
    referred = {key_parts(name)[0] for text in texts for name in REFERENCE.findall(text)}
    for old, new in RENAMED.items():
        if old in document.root and old not in referred and new not in document.root:
            raise SbkitError(
                f"`{old}` ({document.place((old,))}) must be written `{new}`, but has its old "
                "name. Rename it."
            )

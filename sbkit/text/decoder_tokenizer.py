"""The tokenizer of a pretrained decoder, such as Whisper's, in addition to that for CTC.

Legend: N texts, L tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sbkit.base.arrays import Int64s
from sbkit.base.errors import BundleError, translate
from sbkit.base.files import read_regular
from sbkit.base.imports import require_package

DECODER_TOKENIZER_FILE = "decoder_tokenizer.json"  # in a run folder or a bundle
END_OF_TEXT = "<|endoftext|>"
MAX_DECODER_TOKENIZER_BYTES = 1 << 25  # Whisper's has 2.5 MB


@dataclass(frozen=True, kw_only=True)
class GenerationSettings:
    """What a pretrained decoder may generate.

    start, end: the tokens before each text, and the token after it.
    suppressed, suppressed_first: tokens that no text may contain, and that none may begin with.
    max_tokens, max_frames: the most tokens of a text, including ``start``, and frames of a clip.
    """

    start: Sequence[int]
    end: int
    suppressed: Sequence[int]
    suppressed_first: Sequence[int]
    max_tokens: int
    max_frames: int

    @property
    def max_text_tokens(self) -> int:
        """The most tokens that a text may have between its start and its end."""
        return self.max_tokens - len(self.start)

    def cut(self, texts: Int64s) -> Int64s:
        """Cut texts to `max_text_tokens` and an end: (N, L), padded with ends -> (N, L).

        A text that the decoder wrote may be longer once normalized: "9 9" becomes "nine nine".
        """
        texts = texts[:, : self.max_text_tokens + 1].copy()
        texts[:, -1] = self.end
        return texts


class DecoderTokenizer:
    """Encode and decode text with a `tokenizer.json`; `content` is its file, if it was read.

    A text begins with a space, as Whisper writes it after the tokens of language and task.
    """

    def __init__(self, *, file: str | Path, content: bytes | None = None) -> None:
        self.file = Path(file)
        if content is None:
            content = read_regular(
                self.file,
                max_bytes=MAX_DECODER_TOKENIZER_BYTES,
                subject="A tokenizer",
                follow_links=True,
            )
        self.content = content
        tokenizers: Any = require_package("tokenizers", extra="export")
        explain = f"{file} must be a tokenizer.json, but cannot be read. Download it again."
        with translate(Exception, BundleError, explain):  # the library has no error of its own
            self._tokens = tokenizers.Tokenizer.from_str(content.decode())

    @property
    def end(self) -> int:
        """The token that ends a text, which also pads texts."""
        token = self.token_id(END_OF_TEXT)
        if token is None:
            fault = f"{self.file} has no token {END_OF_TEXT}. Use the tokenizer of a Whisper."
            raise BundleError(fault)
        return token

    def token_id(self, name: str) -> int | None:
        """Return the token of this name, None if there is none."""
        token: int | None = self._tokens.token_to_id(name)
        return token

    def encode(self, text: str) -> list[int]:
        """Convert text to tokens, without special ones."""
        text_after_space = f" {text}" if text else ""
        ids: list[int] = self._tokens.encode(text_after_space, add_special_tokens=False).ids
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Convert tokens to text; special ones add none."""
        text: str = self._tokens.decode([*tokens], skip_special_tokens=True)
        return text.strip()

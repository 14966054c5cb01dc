"""A transducer: model, task. B utterances, S samples, U frames, L tokens, D width, V vocabulary."""

from typing import Any

import torch
from torch import Tensor, nn

from sbkit.bundle.task import ClipBatch
from sbkit.decoding.pool import RecognizedClip
from sbkit.models.encoder import AcousticModel, make_encoder
from sbkit.tasks.asr.task import AsrTask

MAX_TOKENS_PER_FRAME = 5


class TransducerModel(AcousticModel):
    """Score the next token by the frame and the tokens before it (Graves 2012, arXiv 1211.3711)."""

    def __init__(self, *, model: nn.ModuleList, vocabulary: Any, **parts: Any) -> None:
        heads = {name: parts[name] for name in ("embedding", "gru", "joiner")}
        super().__init__(model=model, encoder=make_encoder(parts), heads=heads)
        self.embedding, self.gru, self.joiner = heads.values()
        self.vocabulary = vocabulary

    def read(self, tokens: Tensor, memory: Tensor | None = None) -> Any:
        """Read tokens after those in the memory: (B, L) -> (B, L, D), the new memory."""
        return self.gru(self.embedding(tokens), memory)

    def join(self, states: Tensor, prefixes: Tensor) -> Any:
        """Score the token after each prefix: (B, U, D), (B, L, D) -> (B, U, L, V)."""
        return self.joiner(torch.tanh(states.unsqueeze(2) + prefixes.unsqueeze(1))).float()

    def search(self, states: Tensor) -> list[int]:
        """Take the best token of a frame until it is the blank: (U, D)."""
        tokens: list[int] = []
        prefix, memory = self.read(torch.tensor([[self.vocabulary.bos]], device=states.device))
        for state in states.view(-1, 1, 1, states.shape[1]):
            for _ in range(MAX_TOKENS_PER_FRAME):
                token = int(self.join(state, prefix).argmax())
                if token == self.vocabulary.blank:
                    break
                tokens.append(token)
                prefix, memory = self.read(torch.tensor([[token]], device=states.device), memory)
        return tokens

    def predict(self, audio: Tensor, audio_lengths: Tensor) -> list[list[int]]:
        """Return the tokens of each utterance: (B, S), (B,)."""
        states, frames = self.encode(audio, audio_lengths)
        return [self.search(row[:count]) for row, count in zip(states, frames, strict=True)]


class Transducer(AsrTask):
    """Speech recognition by a transducer."""

    model_name = "transducer"
    heads = ("joiner",)

    def model_class(self) -> type[TransducerModel]:
        return TransducerModel

    def predict(self, bundle: Any, batch: ClipBatch) -> list[RecognizedClip]:
        """Return the text of each clip; its words have no times."""
        return [RecognizedClip(bundle.tokenizer.decode(ids)) for ids in bundle.predict(batch.clips)]

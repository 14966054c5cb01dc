"""A recognizer: encoder -> linear_stack -> ctc_lin, and attention decoder -> seq_lin.

Legend: B utterances, S samples, T features, U frames of the encoder, L tokens, M mel
bins, D model width, V vocabulary.

Training, transcription and export all call this model.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sbkit.audio.augment import AugmentFeatures
from sbkit.audio.lengths import append_silence
from sbkit.audio.segments import tail_samples
from sbkit.base.arrays import Float64s, Int64s
from sbkit.base.errors import ConfigError, DataError
from sbkit.base.units import SAMPLE_RATE, SHIFT_MS
from sbkit.bundle.side_inputs import LENGTHS_SUFFIX
from sbkit.decoding.generate import generate
from sbkit.models.encoder import AcousticModel, Encoder, Predictions, head_size, make_encoder
from sbkit.models.encoder_parts import decoding_modules, label_embedding, sides_of
from sbkit.models.frontend import ConvFrontEnd
from sbkit.models.streaming import State, StreamingPart, require_causal_level
from sbkit.models.transformer import Transformer
from sbkit.text.decoder_tokenizer import GenerationSettings
from sbkit.text.vocabulary import Vocabulary


class AsrModel(AcousticModel):
    """Call the parts of a recognizer in order.

    The decoder and CTC have the same tokens, unless the decoder's part has a ``generation``, such
    as `PretrainedTransformer`.

    Parts may be sbkit's, SpeechBrain's or the user's. The encoder is either ``encoder``, or
    ``compute_features``, ``CNN`` and ``Transformer``. Without ``seq_lin`` the model does CTC only;
    without ``linear_stack``, ``ctc_lin`` reads the encoder directly.

    model: the ModuleList that owns the parameters of all parts.
    ctc_lin: a linear layer (D -> V), of CTC.
    seq_lin: a linear layer (D -> V), of the attention decoder; without one, of the CTC loss in the
        middle of the encoder, in training.
    """

    def __init__(
        self,
        *,
        model: nn.ModuleList,
        vocabulary: Vocabulary,
        ctc_lin: nn.Module,
        seq_lin: nn.Module | None = None,
        linear_stack: nn.Module | None = None,
        encoder: nn.Module | None = None,
        compute_features: nn.Module | None = None,
        CNN: nn.Module | None = None,
        Transformer: nn.Module | None = None,
    ) -> None:
        parts = {"encoder": encoder, "compute_features": compute_features}
        parts |= {"CNN": CNN, "Transformer": Transformer}
        heads = {"ctc_lin": ctc_lin, "seq_lin": seq_lin, "linear_stack": linear_stack}
        super().__init__(model=model, encoder=make_encoder(parts), heads=heads)
        decoder: Any = self.encoder.backbone.module
        own: GenerationSettings | None = getattr(decoder, "generation", None)
        self.generation = own
        self.start_tokens = [vocabulary.bos] if own is None else own.start
        self.end_token = vocabulary.eos if own is None else own.end
        vocabulary.check_size(head_size(ctc_lin), key="ctc_lin", unit="outputs")
        if own is not None:
            require_token_outputs(seq_lin, decoder.vocab_size)
        elif seq_lin is not None:
            vocabulary.check_size(head_size(seq_lin), key="seq_lin", unit="outputs")
        require_frame_length(CNN, Transformer)
        require_chunks(self.encoder)
        backbone = self.encoder.backbone
        if (embedding := label_embedding(backbone.module)) is not None:
            unit = "rows in its embedding"
            vocabulary.check_size(embedding.num_embeddings, key=backbone.name, unit=unit)
        rates = [getattr(part, "sample_rate", None) for part in self.encoder.modules.values()]
        takes_tail = getattr(compute_features, "takes_tail", True)
        rate = next(filter(None, rates), SAMPLE_RATE)
        self.tail_samples = tail_samples(rate) if takes_tail else 0
        self.vocabulary = vocabulary
        self.ctc_lin = ctc_lin
        self.seq_lin = seq_lin
        self.linear_stack = nn.Identity() if linear_stack is None else linear_stack

    def run(
        self,
        audio: Tensor,
        audio_lengths: Tensor,
        *,
        tokens: Tensor | None,
        return_intermediate: bool,
        spec_augment: AugmentFeatures | None = None,
        **sides: Tensor,
    ) -> Predictions:
        """Score every token at every frame and, given the decoder's (B, L), after each of them.

        sides: the side inputs of the task, for the parts whose `forward` names them.
        """
        tail = 0 if self.model.training else self.tail_samples
        x, lengths = self._inputs(audio, audio_lengths, spec_augment, tail)
        backbone = self.encoder.backbone
        own = self._sides_of_backbone(sides)
        middle = None
        logits = None
        if return_intermediate:
            middle, states = backbone.encode_with_intermediate(x, lengths, **own)
            lengths = backbone.subsampling.count(lengths)
            if tokens is not None:
                logits = self._decode(tokens, states, lengths)
        elif tokens is not None:
            prefixed = self._prefixed(tokens)
            states, lengths, decoded = backbone.encode_and_decode(x, lengths, prefixed, **own)
            logits = self._next_logits(decoded)
        else:
            states, lengths = backbone(x, lengths, **own)
        intermediate = None if middle is None else self._middle_log_probs(middle, **sides)
        log_probs = self.frame_log_probs(states, **sides)
        return Predictions(states, log_probs, intermediate, lengths, logits)

    def encode(
        self, audio: Tensor, audio_lengths: Tensor, **sides: Tensor
    ) -> tuple[Tensor, Tensor]:
        own = self._sides_of_backbone(sides)
        inputs = self._inputs(audio, audio_lengths, None, self.tail_samples)
        return self.encoder.backbone(*inputs, **own)

    def _sides_of_backbone(self, sides: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return those of the side inputs that the encoder's last part takes.

        Raises ConfigError for one that no part takes, since it would have no effect.
        """
        backbone = self.encoder.backbone
        own = sides_of(backbone.module, sides)
        taken = own.keys() | sides_of(self.linear_stack, sides).keys()
        for name in sides:
            if name not in taken and not name.endswith(LENGTHS_SUFFIX):
                raise ConfigError(
                    f"The side input `{name}` has no effect: neither `{backbone.name}` nor "
                    "`linear_stack` has it among the arguments of `forward`.",
                    keys=("model",),
                )
        return own

    def _inputs(
        self, audio: Tensor, lengths: Tensor, spec_augment: AugmentFeatures | None, tail: int
    ) -> tuple[Tensor, Tensor]:
        """Compute the encoder's input of clips, and of the silence that follows them."""
        context: int = getattr(self.encoder.backbone.module, "context_samples", 0) - tail
        if context > 0:
            silent, _ = append_silence(audio, lengths, context)
            longest = torch.sym_max(audio.shape[1], context)  # type: ignore[no-untyped-call]
            audio = silent[:, :longest]
            lengths = lengths.clamp(min=context)
        return self.encoder.inputs(audio, lengths, spec_augment, tail)

    def predict(
        self, audio: Tensor, audio_lengths: Tensor, **sides: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Score every token at every frame: (B, S), (B,) -> (B, U, V), (B,)."""
        states, frame_lengths = self.encode(audio, audio_lengths, **sides)
        return self.frame_log_probs(states, **sides), frame_lengths

    @property
    def samples_per_frame(self) -> int:
        return self.encoder.subsampling.stride

    def frame_log_probs(self, states: Tensor, **sides: Tensor) -> Tensor:
        """Return ln p of every token at every frame, in float32: (B, U, D) -> (B, U, V)."""
        logits: Tensor = self.ctc_lin(self._stack(states, sides))
        return logits.float().log_softmax(-1)

    def _stack(self, states: Tensor, sides: Mapping[str, Tensor]) -> Tensor:
        stacked: Tensor = self.linear_stack(states, **sides_of(self.linear_stack, sides))
        return stacked

    def _middle_log_probs(self, states: Tensor, **sides: Tensor) -> Tensor:
        """Score tokens in the middle of the encoder by `seq_lin`, unless it is a decoder's head."""
        if self.seq_lin is None or self.has_decoder:
            return self.frame_log_probs(states, **sides)
        logits: Tensor = self.seq_lin(self._stack(states, sides))
        return logits.float().log_softmax(-1)

    def decoder_log_probs(self, tokens: Tensor, states: Tensor, frame_lengths: Tensor) -> Tensor:
        """Return ln p of every next token, in float32: (B, L), (B, U, D), (B,) -> (B, L + 1, V)."""
        return self._decode(tokens, states, frame_lengths).float().log_softmax(-1)

    @torch.no_grad()
    def score_texts(self, states: Tensor, texts: Int64s) -> Float64s:
        """Score hypotheses of one utterance with the decoder: (U, D), (N, L) -> (N,).

        texts: the decoder's tokens, filled up with ``end_token``; each text has at least one.
        Returns ln p(tokens, end | states) of each.
        """
        if self.generation is not None:
            texts = self.generation.cut(texts)
        tokens = torch.from_numpy(texts).to(states.device)
        states = states.float().expand(len(tokens), *states.shape)
        lengths = torch.full((len(tokens),), states.shape[1])
        log_probs = self.decoder_log_probs(tokens[:, :-1], states, lengths)
        token_log_probs = log_probs.gather(2, tokens.unsqueeze(2)).squeeze(2).double()
        is_after_end = (tokens == self.end_token).cumsum(1) > 1
        return token_log_probs.masked_fill(is_after_end, 0.0).sum(1).cpu().numpy()

    def check_text_lengths(self, lengths: Sequence[int], ids: Sequence[str]) -> None:
        """Raise DataError for a text longer than the positions of a decoder with own tokens."""
        assert self.generation is not None
        longest = self.generation.max_text_tokens
        for id, count in zip(ids, lengths, strict=True):
            if count > longest:
                raise DataError(
                    f"A text may have up to {longest} tokens of the decoder, but {id} has {count}. "
                    "Cut the recording, or leave it out: lower `max_seconds`."
                )

    @torch.no_grad()
    def generate(self, states: Tensor, frame_lengths: Tensor) -> list[list[int]]:
        """Decode greedily with a decoder that has its own tokens: (B, U, D), (B,) -> B texts."""
        transformer: Any = self.encoder.backbone.module
        settings: GenerationSettings = transformer.generation
        forbidden = torch.zeros(2, transformer.vocab_size, dtype=torch.bool, device=states.device)
        forbidden[:, settings.suppressed] = True
        forbidden[1, settings.suppressed_first] = True

        def read(tokens: Int64s, state: Any, is_first: bool) -> tuple[Int64s, Any]:
            new_tokens = torch.from_numpy(tokens).to(states.device)
            decoded, state = transformer.decoder(new_tokens, state)
            logits = self._seq_logits(decoded[:, -1]).float()
            best = logits.masked_fill(forbidden[int(is_first)], -torch.inf).argmax(-1)
            return best.cpu().numpy(), state

        state = transformer.decoder.start(states.float(), frame_lengths)
        return generate(read, state, frame_lengths.numpy(), settings)

    @property
    def has_decoder(self) -> bool:
        """Whether the encoder has an attention decoder that learns."""
        decoder = decoding_modules(self.encoder.backbone.module)
        return any(True for module in decoder for _ in module.parameters())

    def _prefixed(self, tokens: Tensor) -> Tensor:
        """Put the tokens that begin a text before each row: (B, L) -> (B, P + L)."""
        prefix = torch.tensor(self.start_tokens, device=tokens.device).expand(len(tokens), -1)
        return torch.cat([prefix, tokens], 1)

    def _decode(self, tokens: Tensor, states: Tensor, lengths: Tensor) -> Tensor:
        decoded = self.encoder.backbone.decode(self._prefixed(tokens), states, lengths)
        return self._next_logits(decoded)

    def _next_logits(self, decoded: Tensor) -> Tensor:
        """Score what follows the prefix and each token: (B, P + L, D) -> (B, L + 1, V)."""
        return self._seq_logits(decoded[:, len(self.start_tokens) - 1 :])

    def _seq_logits(self, decoded: Tensor) -> Tensor:
        if self.seq_lin is None:
            raise ConfigError(
                "The attention decoder needs `seq_lin`, but the YAML has none. For CTC only, set "
                "`ctc_weight: 1.0` and `attention_rescoring: False`.",
                keys=("ctc_weight",),
            )
        return self.seq_lin(decoded)

    def as_streaming(self) -> "StreamingAsrModel | None":
        """Return the model that runs chunk by chunk; None if its encoder was not made for that."""
        chunk_frames: int | None = getattr(self.encoder.backbone.module, "chunk_frames", None)
        return None if chunk_frames is None else StreamingAsrModel(self, chunk_frames)


class StreamingAsrModel:
    """A recognizer as a `StreamingNetwork`, which holds no state of any session.

    The state has the fields of each part, named `<key of the part>_<name>`.
    """

    def __init__(self, model: AsrModel, chunk_frames: int) -> None:
        self.model = model
        modules: Any = model.encoder.modules
        self.parts: Mapping[str, StreamingPart] = modules
        self.names = {key: [*part.start()] for key, part in self.parts.items()}
        subsampling = model.encoder.subsampling
        first_part = model.encoder.features or model.encoder.backbone
        overlap = max(0, -first_part.subsampling.offset)  # of windows; later parts keep a state
        self.min_samples = subsampling.stride - subsampling.offset
        self.chunk_shift_samples = chunk_frames * subsampling.stride
        self.chunk_samples = self.chunk_shift_samples + overlap

    def start(self) -> State:
        device = next(self.model.ctc_lin.parameters()).device
        return {
            f"{key}_{name}": tensor.to(device)
            for key, part in self.parts.items()
            for name, tensor in part.start().items()
        }

    def forward_chunk(
        self, audio: Tensor, audio_lengths: Tensor, state: State
    ) -> tuple[Tensor, Tensor, State]:
        """Score every token at every frame of a chunk: (B, S), (B,) -> (B, U, V), (B,), state.

        audio_lengths: ``chunk_samples``, or less for a session that ends with this chunk.
        """
        x, lengths = audio, audio_lengths
        next_state: State = {}
        for key, part in self.parts.items():
            own = {name: state[f"{key}_{name}"] for name in self.names[key]}
            x, lengths, own = part.forward_chunk(x, lengths, own)
            next_state |= {f"{key}_{name}": own[name] for name in own}
        return self.model.frame_log_probs(x), lengths, next_state


def require_chunks(encoder: Encoder) -> None:
    """Raise ConfigError for a part that keeps an encoder with ``chunk_frames`` from live speech."""
    backbone = encoder.backbone
    if getattr(backbone.module, "chunk_frames", None) is None:
        return
    for key, part in encoder.modules.items():
        methods = [name for name in ("start", "forward_chunk") if not hasattr(part, name)]
        if methods or not getattr(part, "is_causal", True):
            cause = f"has no `{methods[0]}`" if methods else "sees frames after its own"
            raise ConfigError(
                f"`{backbone.name}` runs in chunks, as live speech needs it, but `{key}` {cause}. "
                f"Give `{key}` the methods of `StreamingPart` (sbkit's `CNN`: the option "
                f"`streaming`), or take the chunks out of `{backbone.name}`.",
                keys=(key,),
            )
        require_causal_level(part)


def require_token_outputs(seq_lin: nn.Module | None, vocab_size: int) -> None:
    """Raise ConfigError unless `seq_lin` has an output for each token of the decoder."""
    count = 0 if seq_lin is None else head_size(seq_lin)
    if count != vocab_size:
        raise ConfigError(
            f"`seq_lin` must have as many outputs as the decoder of `Transformer` has tokens "
            f"({vocab_size}), but has {count}. Write `!ref <encoder_config[vocab_size]>`.",
            keys=("seq_lin",),
        )


def require_frame_length(front_end: nn.Module | None, encoder: nn.Module | None) -> None:
    """Raise ConfigError if the encoder counts `streaming` in frames of another length."""
    if not isinstance(front_end, ConvFrontEnd) or not isinstance(encoder, Transformer):
        return
    frame_ms = SHIFT_MS * front_end.subsampling.stride
    if encoder.streaming is not None and encoder.frame_ms != frame_ms:
        raise ConfigError(
            f"`Transformer` counts `streaming` in frames of {encoder.frame_ms} ms, but a frame "
            f"of `CNN` has {frame_ms} ms. Add `subsampling: !ref <subsampling>` to both.",
            keys=("Transformer",),
        )

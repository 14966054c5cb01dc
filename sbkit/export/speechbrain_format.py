"""A folder for SpeechBrain: ``EncoderASR.from_hparams(source=FOLDER, savedir=None)``.

Its YAML builds sbkit's own parts, so sbkit must be installed; audio and decoding are SpeechBrain's.

Legend: B utterances, S samples, U frames, V vocabulary.
"""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from sbkit.audio.lengths import to_relative
from sbkit.base.arrays import Float32s
from sbkit.base.imports import require_package
from sbkit.bundle.config import Plain
from sbkit.bundle.module_spec import ARGUMENTS, KINDS, build
from sbkit.export.parity import Candidate
from sbkit.export.traced import TrainedModel, WaveformModel, trained_log_probs
from sbkit.models.asr import AsrModel
from sbkit.text.vocabulary import Vocabulary

YAML, WEIGHTS, TOKENIZER = "hyperparams.yaml", "asr.ckpt", "tokenizer.ckpt"
SPARE = 2  # frames that rounding a relative length can cost
HEAD = """\
# Written by sbkit export. It builds parts of sbkit, which must be installed beside SpeechBrain.
sample_rate: {rate}
audio_normalizer: !new:speechbrain.dataio.preprocess.AudioNormalizer {{sample_rate: {rate}}}
tokenizer: !new:sentencepiece.SentencePieceProcessor
decoding_function: !name:speechbrain.decoders.ctc_greedy_decode {{blank_id: {blank}}}
"""
TAIL = """\
modules:
    encoder: !ref <encoder>
pretrainer: !new:speechbrain.utils.parameter_transfer.Pretrainer
    loadables:
        asr: !ref <encoder>
        tokenizer: !ref <tokenizer>
"""


def write_speechbrain(trained: TrainedModel, folder: Path) -> Sequence[Candidate]:
    """Write YAML, weights and tokenizer, and let EncoderASR load them."""
    inference: Any = require_package("speechbrain.inference.ASR", extra="export")
    bundle, tokenizer = trained.bundle, trained.bundle.tokenizer
    config = bundle.config
    arguments = {
        "model": list(config.model),
        "vocabulary": {
            "new": "sbkit.text.vocabulary.Vocabulary",
            ARGUMENTS: vars(tokenizer.vocabulary),
        },
        **config.parts,
    }
    (folder / YAML).write_text(
        HEAD.format(rate=config.sample_rate, blank=tokenizer.vocabulary.blank)
        + f"encoder: !new:{WaveformEncoder.__module__}.{WaveformEncoder.__qualname__}\n"
        + "".join(f"    {json.dumps(key)}: {_flow(plain)}\n" for key, plain in arguments.items())
        + TAIL,
        encoding="utf-8",
    )
    parts = {
        name: build(plain, user_modules=trained.user_modules)
        for name, plain in config.parts.items()
    }
    encoder = WaveformEncoder(model=config.model, vocabulary=tokenizer.vocabulary, **parts)
    encoder.waveform.parts.load_state_dict(bundle.model.network.model.state_dict())
    torch.save(encoder.state_dict(), folder / WEIGHTS)
    (folder / TOKENIZER).write_bytes(tokenizer.content)
    loaded = inference.EncoderASR.from_hparams(source=str(folder.absolute()), savedir=None)
    return [
        Candidate(
            name="fp32",
            files=(YAML, WEIGHTS, TOKENIZER),
            log_probs=partial(trained_log_probs, loaded.mods.encoder.waveform),
            transcribe=partial(_transcribe, loaded),
        )
    ]


def _transcribe(recognizer: Any, clips: Sequence[Float32s]) -> list[str]:
    """Transcribe clips as one batch."""
    audio = pad_sequence([torch.from_numpy(each) for each in clips], batch_first=True)
    lengths = torch.tensor([len(each) for each in clips])
    words, _ = recognizer.transcribe_batch(audio, to_relative(lengths, audio.shape[1]))
    return [" ".join(str(each).split()) for each in words]


def _flow(plain: Plain) -> str:
    """Write plain data in one line of HyperPyYAML."""
    if isinstance(plain, list | tuple):
        return f"[{', '.join(map(_flow, plain))}]"
    if not isinstance(plain, dict):
        text = json.dumps(plain)
        # YAML takes 1e-05 for a text, and 1.0e-05 for a number.
        return text.replace("e", ".0e") if isinstance(plain, float) and "." not in text else text
    if plain.keys() == {"tuple"}:
        return f"({', '.join(map(_flow, plain['tuple']))})"
    for kind in KINDS:
        if plain.keys() == {kind, ARGUMENTS}:
            return f"!{kind}:{plain[kind]} {_flow(plain[ARGUMENTS])}"
    return f"{{{', '.join(f'{json.dumps(key)}: {_flow(item)}' for key, item in plain.items())}}}"


class WaveformEncoder(nn.Module):
    """Waveforms to log-probabilities, as SpeechBrain's EncoderASR calls an encoder.

    It takes audio between -1 and 1 and relative lengths: (B, S), (B,) -> (B, U', V). Past its end
    an utterance is certainly blank, and there are as many such frames as it takes for SpeechBrain's
    decoder, which rounds the relative length of each, never to cut off a frame that counts. A frame
    whose best token is a special one, which sbkit leaves out of a text, is blank, too.
    """

    def __init__(self, *, model: Sequence[str], vocabulary: Vocabulary, **parts: nn.Module) -> None:
        """Put the parts together as a bundle does; ``model`` names those with weights, in order."""
        super().__init__()
        self.blank = vocabulary.blank
        self.silent = (vocabulary.unk, vocabulary.bos, vocabulary.eos)
        owned = nn.ModuleList(parts[name] for name in model)
        self.others = nn.ModuleList(part for name, part in parts.items() if name not in model)
        self.waveform = WaveformModel(AsrModel(model=owned, vocabulary=vocabulary, **parts))

    def forward(self, wavs: Tensor, wav_lens: Tensor) -> Tensor:
        """Score every token at every frame."""
        lengths = (wav_lens * wavs.shape[1]).round().long().cpu()
        log_probs, frames = self.waveform(wavs, lengths)
        more = int(torch.ceil(SPARE / wav_lens.min()))
        padded = nn.functional.pad(log_probs, (0, 0, 0, more))  # (B, U', V)
        past = torch.arange(padded.shape[1]) >= frames.cpu().unsqueeze(1)  # (B, U')
        silent = torch.isin(padded.argmax(-1).cpu(), torch.tensor(self.silent))
        certain = torch.full((padded.shape[2],), -torch.inf, device=padded.device)
        certain[self.blank] = 0.0
        return torch.where((past | silent).unsqueeze(2).to(padded.device), certain, padded)

"""A folder for SpeechBrain: ``EncoderASR.from_hparams(source=FOLDER, savedir=None)``.

Its YAML builds parts from sbkit, which must be installed; SpeechBrain loads the audio and decodes.

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
from sbkit.bundle.module_spec import ARGUMENTS_KEY, CLASS_MODULES, TAG_KEYS, build_from_spec
from sbkit.bundle.task import dotted_path
from sbkit.export.parity import Candidate
from sbkit.export.trace import WaveformModel, trained_log_probs
from sbkit.runtime.torch_model import TorchBundle
from sbkit.tasks.recognition.model import AsrModel
from sbkit.text.vocabulary import Vocabulary

YAML_FILE, ENCODER_FILE, TOKENIZER_FILE = "hyperparams.yaml", "asr.ckpt", "tokenizer.ckpt"
SPARE_FRAMES = 2  # frames that rounding a relative length can cost
HEAD = """\
# Written by sbkit export. It builds parts from sbkit, which must be installed with SpeechBrain.
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


def write_speechbrain(bundle: TorchBundle, folder: Path) -> Sequence[Candidate]:
    """Write the YAML, the weights and the tokenizer, and load them with EncoderASR."""
    inference: Any = require_package("speechbrain.inference.ASR", extra="export")
    network, tokenizer, config = bundle.model.network, bundle.tokenizer, bundle.config
    arguments = {
        "model": list(config.model),
        "vocabulary": {
            "new": "sbkit.text.vocabulary.Vocabulary",
            ARGUMENTS_KEY: vars(tokenizer.vocabulary),
        },
        **config.parts,
    }
    (folder / YAML_FILE).write_text(
        HEAD.format(rate=config.sample_rate, blank=tokenizer.vocabulary.blank)
        + f"encoder: !new:{dotted_path(WaveformEncoder)}\n"
        + "".join(f"    {json.dumps(key)}: {_flow(plain)}\n" for key, plain in arguments.items())
        + TAIL,
        encoding="utf-8",
    )
    allowed_before = frozenset(CLASS_MODULES.findall(json.dumps(config.parts)))  # by `load_bundle`
    parts = {
        name: build_from_spec(plain, user_modules=allowed_before)
        for name, plain in config.parts.items()
    }
    encoder = WaveformEncoder(model=config.model, vocabulary=tokenizer.vocabulary, **parts)
    encoder.waveform.parts.load_state_dict(network.model.state_dict())
    torch.save(encoder.state_dict(), folder / ENCODER_FILE)
    (folder / TOKENIZER_FILE).write_bytes(tokenizer.content)
    loaded = inference.EncoderASR.from_hparams(source=str(folder.absolute()), savedir=None)
    return [
        Candidate(
            name="fp32",
            files=(YAML_FILE, ENCODER_FILE, TOKENIZER_FILE),
            log_probs=partial(trained_log_probs, loaded.mods.encoder.waveform),
            transcribe=partial(_transcribe, loaded),
        )
    ]


def _transcribe(recognizer: Any, clips: Sequence[Float32s]) -> list[str]:
    audio = pad_sequence([torch.from_numpy(clip) for clip in clips], batch_first=True)
    lengths = torch.tensor([len(clip) for clip in clips])
    texts, _ = recognizer.transcribe_batch(audio, to_relative(lengths, audio.shape[1]))
    return [" ".join(str(text).split()) for text in texts]


def _flow(plain: Plain) -> str:
    if isinstance(plain, list | tuple):
        return f"[{', '.join(map(_flow, plain))}]"
    if not isinstance(plain, dict):
        text = json.dumps(plain)
        # YAML reads 1e-05 as a text, and 1.0e-05 as a number.
        return text.replace("e", ".0e") if isinstance(plain, float) and "." not in text else text
    if plain.keys() == {"tuple"}:
        return f"({', '.join(map(_flow, plain['tuple']))})"
    for tag in TAG_KEYS:
        if plain.keys() == {tag, ARGUMENTS_KEY}:
            return f"!{tag}:{plain[tag]} {_flow(plain[ARGUMENTS_KEY])}"
    return f"{{{', '.join(f'{json.dumps(key)}: {_flow(item)}' for key, item in plain.items())}}}"


class WaveformEncoder(nn.Module):
    """A recognizer that SpeechBrain's EncoderASR calls as its encoder.

    It takes audio between -1 and 1 and relative lengths: (B, S), (B,) -> (B, U', V). After the end
    of an utterance, the blank has probability 1 in so many frames that SpeechBrain's decoder, which
    rounds relative lengths, never cuts off a frame of speech. It also has probability 1 in frames
    whose best token is special, since sbkit omits special tokens from texts.
    """

    def __init__(self, *, model: Sequence[str], vocabulary: Vocabulary, **parts: nn.Module) -> None:
        """Assemble the parts as a bundle does; ``model`` names the parts with weights, in order."""
        super().__init__()
        self.blank = vocabulary.blank
        self.special = (vocabulary.unk, vocabulary.bos, vocabulary.eos)
        owned = nn.ModuleList(parts[name] for name in model)
        self.others = nn.ModuleList(part for name, part in parts.items() if name not in model)
        self.waveform = WaveformModel(AsrModel(model=owned, vocabulary=vocabulary, **parts))

    def forward(self, wavs: Tensor, wav_lens: Tensor) -> Tensor:
        lengths = (wav_lens * wavs.shape[1]).round().long().cpu()
        log_probs, frames = self.waveform(wavs, lengths)
        within = self.waveform.network.encoder.subsampling.count(lengths)
        spare = int(torch.ceil((SPARE_FRAMES + (frames.cpu() - within).max()) / wav_lens.min()))
        padded = nn.functional.pad(log_probs, (0, 0, 0, spare))  # (B, U', V)
        is_past = torch.arange(padded.shape[1]) >= frames.cpu().unsqueeze(1)  # (B, U')
        is_special = torch.isin(padded.argmax(-1).cpu(), torch.tensor(self.special))
        certain = torch.full((padded.shape[2],), -torch.inf, device=padded.device)
        certain[self.blank] = 0.0
        return torch.where((is_past | is_special).unsqueeze(2).to(padded.device), certain, padded)

"""The folder that transformers loads without code of ours: `Wav2Vec2ForCTC` or its kin.

    config.json, model.safetensors    the model, under the names of transformers
    preprocessor_config.json          what it is to do with audio
    vocab.json or tokenizer.json      the tokens, and tokenizer_config.json their class

It has a place for a pretrained encoder and one linear head, and for nothing else. transformers is
imported here alone, and only to compare what was written with the trained model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from sbkit.base.errors import SbkitError
from sbkit.base.files import to_json
from sbkit.base.process import require_package
from sbkit.inference.formats.huggingface_tokenizer import write_tokenizer
from sbkit.inference.formats.parity import Candidate
from sbkit.inference.formats.traced import TrainedModel
from sbkit.inference.runtime.onnx_runtime import Counts, Floats, LogProbs
from sbkit.models.pretrained.parts import PretrainedEncoder, PretrainedFrontEnd

CONFIG, WEIGHTS, PREPROCESSOR = "config.json", "model.safetensors", "preprocessor_config.json"
OURS = ("do_normalize", "sample_rate", "source")  # of `encoder_config`, and of no `config.json`


@dataclass(frozen=True, kw_only=True)
class Kin:
    """A class of transformers that is an encoder with a head for CTC.

    prefix: of the names of the encoder's tensors; head: of the head's.
    """

    name: str
    prefix: str
    head: str = "lm_head."


KIN = {  # by the `model_type` of the encoder
    "wav2vec2": Kin(name="Wav2Vec2ForCTC", prefix="wav2vec2."),
    "hubert": Kin(name="HubertForCTC", prefix="hubert."),
    "wavlm": Kin(name="WavLMForCTC", prefix="wavlm."),
}


def write_huggingface(trained: TrainedModel, folder: Path) -> Sequence[Candidate]:
    """Write the model and its processor, and let transformers load them.

    Raises SbkitError for what no class of transformers has a place for.
    """
    transformers = require_package("transformers", extra="export")
    bundle, modules = trained.bundle, trained.bundle.model.network.encoder.modules
    front_end, encoder = modules.get("CNN"), modules.get("Transformer")
    head = bundle.model.network.ctc_lin
    _require_place(front_end, encoder, head)
    config = bundle.config.parts["Transformer"]["arguments"]["config"]
    kin = KIN[config["model_type"]]
    tensors = _tensors(kin, front_end, encoder, head)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    vocabulary = bundle.tokenizer.vocabulary
    settings = {
        **{name: value for name, value in config.items() if name not in OURS},
        "architectures": [kin.name],
        "num_hidden_layers": len(encoder.body.layers),
        "mask_time_prob": encoder.frame_masks[0] if _has_mask_vector(encoder) else 0.0,
        "vocab_size": vocabulary.size,
        "pad_token_id": vocabulary.blank,
        "bos_token_id": vocabulary.bos,
        "eos_token_id": vocabulary.eos,
        "dtype": "float32",
    }
    processor = {
        "feature_extractor_type": "Wav2Vec2FeatureExtractor",
        "processor_class": "Wav2Vec2Processor",
        "sampling_rate": config["sample_rate"],
        "do_normalize": config["do_normalize"],
        "return_attention_mask": config["feat_extract_norm"] == "layer",
        "feature_size": 1,
        "padding_value": 0.0,
    }
    for name, content in ((CONFIG, settings), (PREPROCESSOR, processor)):
        (folder / name).write_text(to_json(content, indent=1) + "\n", encoding="utf-8")
    written = write_tokenizer(bundle.tokenizer, folder)
    loaded = transformers.pipeline("automatic-speech-recognition", model=str(folder), device="cpu")
    return [
        Candidate(
            name=kin.name,
            files=(CONFIG, WEIGHTS, PREPROCESSOR, *written),
            log_probs=partial(_log_probs, loaded),
            transcribe=partial(_transcribe, loaded),
        )
    ]


def _require_place(front_end: object, encoder: object, head: nn.Module) -> None:
    why = None
    if not (isinstance(front_end, PretrainedFrontEnd) and isinstance(encoder, PretrainedEncoder)):
        why = "its CNN and its Transformer are not those of a pretrained encoder"
    elif hasattr(encoder, "layer_weights"):
        why = "it sums the layers of its encoder by weights"
    elif type(head) is not nn.Linear:
        why = f"its ctc_lin is a {type(head).__name__}"
    if why is not None:
        raise SbkitError(
            "A model for transformers must be a pretrained encoder and one torch.nn.Linear, as its "
            f"classes for CTC are, but {why}. Leave the format out."
        )


def _has_mask_vector(encoder: PretrainedEncoder) -> bool:
    return hasattr(encoder.body, "masked_spec_embed")


def _tensors(
    kin: Kin, front_end: PretrainedFrontEnd, encoder: PretrainedEncoder, head: nn.Linear
) -> dict[str, Tensor]:
    found = {
        kin.prefix + prefix + name.removeprefix("body."): tensor
        for part, prefix in ((front_end, front_end.prefix), (encoder, ""))
        for name, tensor in part.state_dict().items()
    }
    bias = head.weight.new_zeros(len(head.weight)) if head.bias is None else head.bias
    found |= {f"{kin.head}weight": head.weight, f"{kin.head}bias": bias}
    return {name: tensor.detach().cpu().contiguous() for name, tensor in found.items()}


@torch.inference_mode()
def _log_probs(pipeline: Any, audio: Floats, lengths: Counts) -> LogProbs:
    """Run the model on one clip after the other, as the pipeline does: padding changes some."""
    rows = []
    for row, length in zip(audio, lengths, strict=True):
        inputs = pipeline.feature_extractor(
            row[:length],
            sampling_rate=pipeline.feature_extractor.sampling_rate,
            return_tensors="pt",
            return_attention_mask=True,
        )
        rows.append(pipeline.model(**inputs).logits[0].log_softmax(-1))
    frames = np.array([len(row) for row in rows])
    return LogProbs(pad_sequence(rows, batch_first=True).numpy(), frames)


def _transcribe(pipeline: Any, clips: Sequence[Floats]) -> list[str]:
    rate = pipeline.feature_extractor.sampling_rate
    return [pipeline({"raw": clip, "sampling_rate": rate})["text"] for clip in clips]

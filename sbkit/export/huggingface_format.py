"""The folder that transformers loads without code of ours: `Wav2Vec2ForCTC` or its kin.

    config.json, model.safetensors    the model, under the names of transformers
    preprocessor_config.json          what it is to do with audio
    vocab.json or tokenizer.json      the tokens, and tokenizer_config.json their class

It has a place for a pretrained encoder and one linear head, and for nothing else. transformers is
imported here alone: it writes its own form, and runs it to be compared with the trained model.

The tokens of a model as a tokenizer of transformers that decodes CTC.

It is a `ParakeetTokenizer`, which joins tokens that repeat, leaves out the blank, and decodes what
is left by `tokenizer.json`: as sbkit does, to the last space. A `Wav2Vec2CTCTokenizer` would write
two spaces where a word ends twice, and special tokens by their names. But it alone knows the times
of words, so of characters there is its `vocab.json`, too.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from sbkit.base.arrays import Counts, Float32s
from sbkit.base.errors import SbkitError
from sbkit.base.files import to_json
from sbkit.base.imports import require_package
from sbkit.export.parity import Candidate
from sbkit.export.traced import TrainedModel, quietly
from sbkit.models.pretrained.parts import PretrainedEncoder, PretrainedFrontEnd
from sbkit.runtime.onnx_model import BatchLogProbs
from sbkit.text.tokenizer import SPACE, Tokenizer

CONFIG, WEIGHTS, PREPROCESSOR = "config.json", "model.safetensors", "preprocessor_config.json"
PARAKEET = "parakeet_encoder"
NOT_SIZES = ("source", "do_normalize", "sample_rate")  # of `encoder_config`, not of `config.json`
AUDIO = (
    *("do_normalize", "num_mel_bins", "stride"),
    *("n_fft", "win_length", "hop_length", "preemphasis"),
)
PROCESSORS = {  # the classes of processor and features, of the `model_type` of an encoder
    "wav2vec2-bert": ("Wav2Vec2BertProcessor", "SeamlessM4TFeatureExtractor"),
    PARAKEET: ("ParakeetProcessor", "ParakeetFeatureExtractor"),
}
OF_WAVEFORMS = ("Wav2Vec2Processor", "Wav2Vec2FeatureExtractor")


def write_huggingface(trained: TrainedModel, folder: Path) -> Sequence[Candidate]:
    """Let transformers write the model, add its processor, and let transformers load them.

    Raises SbkitError for what no class of transformers has a place for.
    """
    bundle, network = trained.bundle, trained.bundle.model.network
    _require_place(network)
    transformers = require_package("transformers", extra="export")
    config = bundle.config.parts["Transformer"]["arguments"]["config"]
    settings = transformers.AutoConfig.for_model(**_model_settings(network, config))
    model = transformers.AutoModelForCTC.from_config(settings)
    model.load_state_dict(_tensors(model, network))
    model.save_pretrained(folder)
    (folder / PREPROCESSOR).write_text(to_json(_audio(config), indent=1) + "\n", encoding="utf-8")
    written = write_tokenizer(bundle.tokenizer, folder)
    loaded = transformers.pipeline("automatic-speech-recognition", model=str(folder), device="cpu")
    return [
        Candidate(
            name=type(model).__name__,
            files=(CONFIG, WEIGHTS, PREPROCESSOR, *written),
            log_probs=partial(_log_probs, loaded, network.encoder.modules),
            transcribe=partial(_transcribe, loaded),
        )
    ]


def _require_place(network: Any) -> None:
    front_end, encoder = (network.encoder.modules.get(name) for name in ("CNN", "Transformer"))
    why = None
    if not (isinstance(front_end, PretrainedFrontEnd) and isinstance(encoder, PretrainedEncoder)):
        why = "its encoder is another"
    elif hasattr(encoder, "layer_weights"):
        why = "it takes a mean of the encoder's layers"
    elif [*network.linear_stack.parameters()] or type(network.ctc_lin) is not nn.Linear:
        why = "more than that follows the encoder"
    if why is not None:
        raise SbkitError(
            "A model for transformers must be a pretrained encoder and one torch.nn.Linear, as its "
            f"classes for CTC are, but {why}. Leave the format out."
        )


def _audio(config: Mapping[str, Any]) -> dict[str, Any]:
    processor, features = PROCESSORS.get(config["model_type"], OF_WAVEFORMS)
    return {
        "feature_extractor_type": features,
        "processor_class": processor,
        "sampling_rate": config["sample_rate"],
        "feature_size": config.get("num_mel_bins", 1),
        "padding_value": 0.0,
        "return_attention_mask": config.get("feat_extract_norm") != "group",
        **{name: config[name] for name in AUDIO if name in config},
    }


def _model_settings(network: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    encoder, vocabulary = network.encoder.modules["Transformer"], network.vocabulary
    sizes = {
        **{name: value for name, value in config.items() if name not in NOT_SIZES},
        "num_hidden_layers": len(encoder.body.layers),
        "mask_time_prob": encoder.frame_masks[0],  # above 0, the file has `masked_spec_embed`
    }
    if config["model_type"] == PARAKEET:
        sizes = {"model_type": "parakeet_ctc", "encoder_config": sizes}
    return {
        **sizes,
        "vocab_size": vocabulary.size,
        "pad_token_id": vocabulary.blank,
        "bos_token_id": vocabulary.bos,
        "eos_token_id": vocabulary.eos,
    }


def _tensors(model: Any, network: Any) -> dict[str, Tensor]:
    """Return the weights under the names of a model of transformers."""
    is_parakeet, found = hasattr(model, "ctc_head"), {}
    prefix = "encoder" if is_parakeet else model.base_model_prefix
    for part in (network.encoder.modules["CNN"], network.encoder.modules["Transformer"]):
        for name, tensor in part.state_dict().items():
            found[f"{prefix}.{getattr(part, 'prefix', '')}{name.removeprefix('body.')}"] = tensor
    weight, bias = network.ctc_lin.weight, network.ctc_lin.bias
    bias = weight.new_zeros(len(weight)) if bias is None else bias
    if is_parakeet:  # the head is a convolution
        return found | {"ctc_head.weight": weight.unsqueeze(-1), "ctc_head.bias": bias}
    return found | {"lm_head.weight": weight, "lm_head.bias": bias}


@quietly()  # WavLM's attention warns of its own masks
@torch.inference_mode()
def _log_probs(
    pipeline: Any, modules: Mapping[str, Any], audio: Float32s, lengths: Counts
) -> BatchLogProbs:
    """Run the model on one clip after the other, as the pipeline does: padding changes some.

    Some feature extractors pad even one clip, by a frame, which is left out.
    """
    frames = torch.from_numpy(lengths)
    for name in ("compute_features", "CNN"):
        frames = modules[name].frame_lengths(frames)
    rows = []
    for row, length, count in zip(audio, lengths, frames.tolist(), strict=True):
        inputs = pipeline.feature_extractor(
            row[:length],
            sampling_rate=pipeline.feature_extractor.sampling_rate,
            return_tensors="pt",
            return_attention_mask=True,
        )
        rows.append(pipeline.model(**inputs).logits[0, :count].log_softmax(-1))
    found = np.array([len(row) for row in rows])
    return BatchLogProbs(pad_sequence(rows, batch_first=True).numpy(), found)


@quietly()
def _transcribe(pipeline: Any, clips: Sequence[Float32s]) -> list[str]:
    rate = pipeline.feature_extractor.sampling_rate
    return [pipeline({"raw": clip, "sampling_rate": rate})["text"] for clip in clips]


TOKENIZER, SETTINGS, CHARACTERS = "tokenizer.json", "tokenizer_config.json", "vocab.json"
DELIMITER = "|"  # of words, in CHARACTERS


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> tuple[str, ...]:
    """Write the files of the class that decodes as this tokenizer does; return their names."""
    pieces, vocabulary = tokenizer.pieces(), tokenizer.vocabulary
    settings = {
        "tokenizer_class": "ParakeetTokenizer",
        "pad_token": pieces[vocabulary.blank],
        "unk_token": pieces[vocabulary.unk],
        "bos_token": pieces[vocabulary.bos],
        "eos_token": pieces[vocabulary.eos],
        "clean_up_tokenization_spaces": False,
    }
    files = {SETTINGS: settings}
    is_of_characters = all(len(text) <= 1 for text in tokenizer.texts)
    if is_of_characters and DELIMITER not in pieces:
        names = [DELIMITER if piece == SPACE else piece for piece in pieces]
        files[CHARACTERS] = {piece: label for label, piece in enumerate(names)}
    for name, content in files.items():
        (folder / name).write_text(to_json(content, indent=1) + "\n", encoding="utf-8")
    made = _made(tokenizer, prepend="never" if is_of_characters else "always")
    made.save(str(folder / TOKENIZER))
    return TOKENIZER, *files


def _made(tokenizer: Tokenizer, *, prepend: str) -> Any:
    """Return a tokenizer of the library `tokenizers` that encodes and decodes the same pieces."""
    tokenizers: Any = require_package("tokenizers", extra="export")
    decoders = tokenizers.decoders
    made = tokenizers.Tokenizer(_model(tokenizer, tokenizers.models))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(SPACE, prepend_scheme=prepend)
    special = [tokenizer.piece(label) for label in tokenizer.vocabulary.special]
    made.decoder = decoders.Sequence(
        [
            *(decoders.Replace(piece, "") for piece in special),
            decoders.Replace(SPACE, " "),
            decoders.Fuse(),
            decoders.Replace(tokenizers.Regex(" +"), " "),
            decoders.Replace(tokenizers.Regex("^ | $"), ""),
        ]
    )
    return made


def _model(tokenizer: Tokenizer, models: Any) -> Any:
    """Return the pieces with their scores, or where these are ranks, with the merges they mean."""
    pieces = tokenizer.pieces()
    read = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.content)
    scores = [read.get_score(label) for label in range(len(pieces))]
    unk = tokenizer.vocabulary.unk
    if not all(score.is_integer() for score in scores):
        return models.Unigram(list(zip(pieces, scores, strict=True)), unk_id=unk)
    ids = {piece: label for label, piece in enumerate(pieces)}
    merges = [
        (text[:cut], text[cut:])
        for text in sorted(filter(None, tokenizer.texts), key=lambda text: -scores[ids[text]])
        for cut in range(1, len(text))
        if text[:cut] in ids and text[cut:] in ids
    ]
    return models.BPE(ids, merges, unk_token=pieces[unk], fuse_unk=True)

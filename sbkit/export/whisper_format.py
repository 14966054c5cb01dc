"""A whole Whisper as the folder that `WhisperForConditionalGeneration` of transformers loads.

    config.json, model.safetensors    the model, under the names of transformers
    generation_config.json            the special tokens, and the language and task of the run
    preprocessor_config.json          the preparation of audio
    tokenizer.json                    the decoder's tokens, as the pretrained model has them
    tokenizer_config.json             the class of the tokenizer

ct2-transformers-converter reads all of them, and faster-whisper reads what it writes. There is no
CTC head in the folder.

Legend: B clips, S samples, L tokens, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sbkit.audio.io import FULL_SCALE
from sbkit.base.arrays import Array, Counts, Float32s
from sbkit.base.errors import BundleError
from sbkit.base.files import to_json
from sbkit.base.imports import require_package
from sbkit.base.units import samples_to_seconds
from sbkit.export.parity import Candidate, pad_frames
from sbkit.export.recognizer_texts import PARITY_TEXT, greedy_texts, respell
from sbkit.export.trace import quiet_exporters
from sbkit.models.pretrained.folder import (
    CONFIG,
    GENERATION,
    PREPROCESSOR,
    TOKENIZER,
    WEIGHTS,
    WHISPER_NAMES,
)
from sbkit.runtime.onnx_model import BatchLogProbs
from sbkit.runtime.torch_model import TorchModel
from sbkit.tasks.asr.bundle import AsrBundle
from sbkit.text.decoder_tokenizer import END_OF_TEXT, DecoderTokenizer

TOKENIZER_CONFIG = "tokenizer_config.json"
PREVIOUS_TEXT = "<|startofprev|>"  # the token before the text of the previous segment
OMITTED_KEYS = (  # keys of the encoder's config that are not in `config.json`
    *("source", "text_tokens", "do_normalize", "sample_rate", "n_fft", "hop_length"),
)


def write_whisper(bundle: AsrBundle[TorchModel], folder: Path) -> Sequence[Candidate]:
    """Write a Whisper and its processor, and load both with transformers."""
    transformers = require_package("transformers", extra="export")
    network = bundle.model.network
    config = bundle.config.parts["Transformer"]["arguments"]["config"]
    tokenizer = bundle.decoder_tokenizer
    assert tokenizer is not None
    transformer, output = network.encoder.modules["Transformer"], network.seq_lin
    if type(output) is not nn.Linear or output.bias is not None:
        raise BundleError(
            "The output layer of a Whisper in transformers is a torch.nn.Linear without bias, but "
            "`seq_lin` of this model is another layer."
        )
    end = network.end_token
    special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), end)
    special["decoder_start_token_id"] = network.start_tokens[0]
    is_tied = torch.equal(output.weight, transformer.decoder.embed_tokens.weight)
    sizes = {WHISPER_NAMES.get(key, key): config[key] for key in config if key not in OMITTED_KEYS}
    settings = transformers.WhisperConfig(**sizes, **special, tie_word_embeddings=is_tied)
    model = transformers.WhisperForConditionalGeneration(settings)
    model.load_state_dict(_renamed_weights(network))
    generation = special | _generation_settings(config, tokenizer, network.start_tokens)
    model.generation_config = transformers.GenerationConfig(**generation)
    model.save_pretrained(folder)
    context = 2 * config["max_source_positions"] * config["hop_length"]  # samples
    seconds = samples_to_seconds(context, config["sample_rate"])
    features = transformers.WhisperFeatureExtractor(
        feature_size=config["num_mel_bins"],
        sampling_rate=config["sample_rate"],
        hop_length=config["hop_length"],
        chunk_length=round(seconds),
        n_fft=config["n_fft"],
    )
    features.save_pretrained(folder)
    tokenizer_config = {
        "tokenizer_class": "WhisperTokenizer",
        "processor_class": "WhisperProcessor",
        **dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), END_OF_TEXT),
        "clean_up_tokenization_spaces": False,
    }
    text = to_json(tokenizer_config, indent=1) + "\n"
    (folder / TOKENIZER_CONFIG).write_text(text, encoding="utf-8")
    (folder / TOKENIZER).write_bytes(tokenizer.content)
    pipeline = transformers.pipeline(
        "automatic-speech-recognition", model=str(folder), device="cpu"
    )
    tokens = torch.tensor([tokenizer.encode(PARITY_TEXT)])
    advice = ""
    if transformer.context_samples < context:
        advice = (
            f". transformers fills each clip with silence to {seconds:g} s, but this model "
            f"had less in training: train it with `context_seconds: {seconds:g}`"
        )
    return [
        Candidate(
            name=type(model).__name__,
            files=(CONFIG, WEIGHTS, GENERATION, PREPROCESSOR, TOKENIZER, TOKENIZER_CONFIG),
            run=partial(_log_probs, pipeline, network.start_tokens, tokens),
            run_trained=partial(_trained_log_probs, network, tokens, context),
            texts=partial(_transcribe, pipeline, bundle),
            trained_texts=partial(greedy_texts, bundle),
            advice=advice,
        )
    ]


def _generation_settings(
    config: Mapping[str, Any], tokenizer: DecoderTokenizer, start: Sequence[int]
) -> dict[str, Any]:
    """Return the settings of `generate`: special tokens, default language and task."""
    tokens = config["text_tokens"]
    languages, tasks = tokens["languages"], tokens["tasks"]
    settings = {
        "no_timestamps_token_id": tokens["no_times"],
        "suppress_tokens": tokens["suppressed"],
        "begin_suppress_tokens": tokens["suppressed_first"],
        "alignment_heads": tokens.get("alignment_heads"),
        "max_length": config["max_target_positions"],
        "is_multilingual": bool(languages),
        "num_beams": 1,  # `pipeline` would set 5
    }
    if (previous := tokenizer.token_id(PREVIOUS_TEXT)) is not None:
        settings["prev_sot_token_id"] = previous
    if languages:
        settings |= {
            "lang_to_id": {f"<|{name}|>": token for name, token in languages.items()},
            "task_to_id": tasks,
            "language": next(name for name, token in languages.items() if token == start[1]),
            "task": next(name for name, token in tasks.items() if token == start[2]),
        }
    return settings


def _renamed_weights(network: Any) -> dict[str, Tensor]:
    weights = {"proj_out.weight": network.seq_lin.weight}
    for part in (network.encoder.modules["CNN"], network.encoder.modules["Transformer"]):
        for name, tensor in part.state_dict().items():
            is_decoder_weight = name.startswith("decoder.")
            path = name if is_decoder_weight else f"encoder.{name.removeprefix('body.')}"
            weights[f"model.{path}"] = tensor
    return weights


@torch.inference_mode()
def _trained_log_probs(
    network: Any, text: Tensor, context: int, audio: Float32s, lengths: Counts
) -> BatchLogProbs:
    """Decode a text in clips that are filled with silence: -> log-probs (B, L + 1, V), (B,).

    transformers fills clips in this way, whatever context the model was trained with.
    """
    padded = torch.zeros(len(audio), context)
    for row, samples, length in zip(padded, audio, lengths, strict=True):
        row[:length] = torch.from_numpy(samples[: min(length, context)])
    full = torch.full((len(audio),), context)
    inputs = network.encoder.inputs(padded * FULL_SCALE, full, None, 0)
    states, frames = network.encoder.backbone(*inputs)
    return pad_frames(
        [*network.decoder_log_probs(text.expand(len(audio), -1), states, frames).numpy()]
    )


@quiet_exporters()
@torch.inference_mode()
def _log_probs(
    pipeline: Any, start: Sequence[int], text: Tensor, audio: Float32s, lengths: Counts
) -> BatchLogProbs:
    """Compute the same log-probabilities with transformers."""
    extract = pipeline.feature_extractor
    clips = [samples[:length] for samples, length in zip(audio, lengths, strict=True)]
    inputs = extract(clips, sampling_rate=extract.sampling_rate, return_tensors="pt")
    tokens = torch.cat([torch.tensor([[*start]]), text], 1).expand(len(clips), -1)
    logits = pipeline.model(inputs.input_features, decoder_input_ids=tokens).logits
    return pad_frames([*logits[:, len(start) - 1 :].log_softmax(-1).numpy()])


@quiet_exporters()
def _transcribe(
    pipeline: Any,
    bundle: AsrBundle[TorchModel],
    clips: Sequence[Float32s],
    outputs: Sequence[Array],
) -> list[str]:
    """Transcribe clips, longer ones in chunks, and spell the texts like the bundle."""
    extract = pipeline.feature_extractor
    texts: list[str] = []
    for clip in clips:
        options = {"chunk_length_s": extract.chunk_length} if len(clip) > extract.n_samples else {}
        audio = {"raw": clip, "sampling_rate": extract.sampling_rate}
        texts.append(respell(bundle, pipeline(audio, **options)["text"]))
    return texts

"""The folder that transformers loads without sbkit, as `Wav2Vec2ForCTC` or a similar class.

    config.json, model.safetensors    the model, under the names of transformers
    preprocessor_config.json          the preparation of audio
    tokenizer.json, vocab.json        the tokens
    tokenizer_config.json             the class of the tokenizer
    whisper_ctc.py                    for Whisper: the class, loaded with trust_remote_code=True

The model is a pretrained encoder with one linear head and nothing else; whisper_format.py writes a
Whisper with its decoder.

The tokenizer is a `ParakeetTokenizer`, which merges repeated tokens, removes the blank, and decodes
the rest with `tokenizer.json`; the text equals sbkit's to the last space. A `Wav2Vec2CTCTokenizer`
would write two spaces where a word ends twice, and the names of special tokens. But only that class
knows the times of words, so its `vocab.json` is written too if the tokens are characters.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import sentencepiece
import torch
from torch import Tensor, nn

from sbkit.audio.lengths import Subsampling
from sbkit.base.arrays import Array, Counts, Float32s
from sbkit.base.errors import BundleError
from sbkit.base.files import to_json
from sbkit.base.imports import require_package
from sbkit.export.parity import Candidate, pad_frames
from sbkit.export.recognizer_texts import best_path_texts
from sbkit.export.trace import quiet_exporters
from sbkit.export.whisper_format import TOKENIZER_CONFIG, write_whisper
from sbkit.models.pretrained.encoder import PretrainedEncoder, PretrainedFrontEnd
from sbkit.models.pretrained.folder import CONFIG, PREPROCESSOR, TOKENIZER, WEIGHTS, WHISPER_NAMES
from sbkit.runtime.onnx_model import BatchLogProbs
from sbkit.runtime.torch_model import TorchModel
from sbkit.tasks.asr.bundle import AsrBundle
from sbkit.tasks.asr.model import AsrModel
from sbkit.text.tokenizer import SPACE, Tokenizer

CHARACTERS_FILE = "vocab.json"
WORD_DELIMITER = "|"  # in CHARACTERS_FILE
PARAKEET, WHISPER = "parakeet_encoder", "whisper"
SBKIT_KEYS = ("source", "do_normalize", "sample_rate")  # of `encoder_config`; not in `config.json`
AUDIO_SETTINGS = (
    *("do_normalize", "num_mel_bins", "stride"),
    *("n_fft", "win_length", "hop_length", "preemphasis"),
)
PROCESSORS = {  # the classes of the processor and the features, by an encoder's `model_type`
    "wav2vec2-bert": ("Wav2Vec2BertProcessor", "SeamlessM4TFeatureExtractor"),
    PARAKEET: ("ParakeetProcessor", "ParakeetFeatureExtractor"),
    WHISPER: ("Wav2Vec2Processor", "WhisperFeatureExtractor"),  # Whisper's has its tokenizer
}
WAVEFORM_PROCESSOR = ("Wav2Vec2Processor", "Wav2Vec2FeatureExtractor")


def write_huggingface(bundle: AsrBundle[TorchModel], folder: Path) -> Sequence[Candidate]:
    """Write the model and its processor, and load both with transformers."""
    if bundle.decoder_tokenizer is not None:
        return write_whisper(bundle, folder)
    network = bundle.model.network
    _require_one_head(network)
    transformers = require_package("transformers", extra="export")
    config = bundle.config.parts["Transformer"]["arguments"]["config"]
    if config["model_type"] == WHISPER:
        _register_whisper(transformers)
    settings = transformers.AutoConfig.for_model(**_model_settings(network, config))
    model = transformers.AutoModelForCTC.from_config(settings)
    model.load_state_dict(_renamed_weights(model, network))
    model.save_pretrained(folder)
    processor, features = PROCESSORS.get(config["model_type"], WAVEFORM_PROCESSOR)
    preprocessor = {
        "feature_extractor_type": features,
        "processor_class": processor,
        "sampling_rate": config["sample_rate"],
        "feature_size": config.get("num_mel_bins", 1),
        "padding_value": config.get("padding_value", 0.0),
        "return_attention_mask": config.get("feat_extract_norm") != "group",
        **{name: config[name] for name in AUDIO_SETTINGS if name in config},
    }
    text = to_json(preprocessor, indent=1) + "\n"
    (folder / PREPROCESSOR).write_text(text, encoding="utf-8")
    tokenizer_files = write_tokenizer(bundle.tokenizer, folder)
    code_files = ["whisper_ctc.py"] if config["model_type"] == WHISPER else []
    pipeline = transformers.pipeline(
        "automatic-speech-recognition", model=str(folder), device="cpu"
    )
    return [
        Candidate(
            name=type(model).__name__,
            files=(CONFIG, WEIGHTS, PREPROCESSOR, *tokenizer_files, *code_files),
            run=partial(_log_probs, pipeline, network.encoder.subsampling),
            tail_samples=network.tail_samples,
            texts=partial(_transcribe, pipeline),
            trained_texts=partial(best_path_texts, bundle),
        )
    ]


def _register_whisper(transformers: Any) -> None:
    classes: Any = import_module("sbkit.export.whisper_ctc")  # it imports transformers
    config, model = classes.WhisperCTCConfig, classes.WhisperForCTC
    config.register_for_auto_class()
    model.register_for_auto_class("AutoModelForCTC")
    transformers.AutoConfig.register(config.model_type, config, exist_ok=True)
    transformers.AutoModelForCTC.register(config, model, exist_ok=True)


def _require_one_head(network: AsrModel) -> None:
    front_end, encoder = (network.encoder.modules.get(name) for name in ("CNN", "Transformer"))
    reason = None
    if not (isinstance(front_end, PretrainedFrontEnd) and isinstance(encoder, PretrainedEncoder)):
        reason = "has no pretrained encoder"
    elif [*network.linear_stack.parameters()] or type(network.ctc_lin) is not nn.Linear:
        reason = "has further layers after the encoder"
    if reason is not None:
        raise BundleError(
            "The CTC models of transformers are a pretrained encoder and one torch.nn.Linear, but "
            f"this model {reason}."
        )


def _model_settings(network: Any, config: Mapping[str, Any]) -> dict[str, object]:
    encoder = network.encoder.modules["Transformer"]
    vocabulary = network.vocabulary
    settings = {
        **{key: value for key, value in config.items() if key not in SBKIT_KEYS},
        "num_hidden_layers": encoder.num_layers,
        "mask_time_prob": encoder.frame_masks[0],  # if above 0, there is a `masked_spec_embed`
    }
    if config["model_type"] == PARAKEET:
        settings = {"model_type": "parakeet_ctc", "encoder_config": settings}
    if config["model_type"] == WHISPER:
        settings = {WHISPER_NAMES.get(key, key): value for key, value in settings.items()}
        settings["model_type"] = "whisper_ctc"
    return {
        **settings,
        "vocab_size": vocabulary.size,
        "pad_token_id": vocabulary.blank,
        "bos_token_id": vocabulary.bos,
        "eos_token_id": vocabulary.eos,
    }


def _renamed_weights(model: Any, network: Any) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    prefix = "encoder" if hasattr(model, "encoder") else model.base_model_prefix
    for part in (network.encoder.modules["CNN"], network.encoder.modules["Transformer"]):
        for name, tensor in part.state_dict().items():
            weights[f"{prefix}.{getattr(part, 'prefix', '')}{name.removeprefix('body.')}"] = tensor
    weight, bias = network.ctc_lin.weight, network.ctc_lin.bias
    bias = weight.new_zeros(len(weight)) if bias is None else bias
    if hasattr(model, "ctc_head"):  # Parakeet's head is a convolution
        return weights | {"ctc_head.weight": weight.unsqueeze(-1), "ctc_head.bias": bias}
    return weights | {"lm_head.weight": weight, "lm_head.bias": bias}


@quiet_exporters()  # the attention of WavLM warns about its own masks
@torch.inference_mode()
def _log_probs(
    pipeline: Any, subsampling: Subsampling, audio: Float32s, lengths: Counts
) -> BatchLogProbs:
    """Run the model on one clip after the other, because padding changes the output of some.

    Some feature extractors pad even a single clip by a frame, which is cut off.
    """
    extract = pipeline.feature_extractor
    options = {"return_tensors": "pt", "return_attention_mask": True}
    frames = subsampling.count(torch.from_numpy(lengths))
    outputs = []
    for samples, length, count in zip(audio, lengths, frames.tolist(), strict=True):
        inputs = extract(samples[:length], sampling_rate=extract.sampling_rate, **options)
        outputs.append(pipeline.model(**inputs).logits[0, :count].log_softmax(-1).numpy())
    return pad_frames(outputs)


@quiet_exporters()
def _transcribe(pipeline: Any, clips: Sequence[Float32s], outputs: Sequence[Array]) -> list[str]:
    rate = pipeline.feature_extractor.sampling_rate
    return [pipeline({"raw": clip, "sampling_rate": rate})["text"] for clip in clips]


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> tuple[str, ...]:
    """Write the files of a tokenizer that decodes like this one; return their names."""
    pieces = tokenizer.pieces()
    vocabulary = tokenizer.vocabulary
    settings = {
        "tokenizer_class": "ParakeetTokenizer",
        "pad_token": pieces[vocabulary.blank],
        "unk_token": pieces[vocabulary.unk],
        "bos_token": pieces[vocabulary.bos],
        "eos_token": pieces[vocabulary.eos],
        "clean_up_tokenization_spaces": False,
    }
    files = {TOKENIZER_CONFIG: settings}
    is_char_tokenizer = all(len(text) <= 1 for text in tokenizer.texts)
    if is_char_tokenizer and WORD_DELIMITER not in pieces:
        names = [WORD_DELIMITER if piece == SPACE else piece for piece in pieces]
        files[CHARACTERS_FILE] = {name: id for id, name in enumerate(names)}
    for name, content in files.items():
        (folder / name).write_text(to_json(content, indent=1) + "\n", encoding="utf-8")
    converted = _convert(tokenizer, prepend="never" if is_char_tokenizer else "always")
    converted.save(str(folder / TOKENIZER))
    return TOKENIZER, *files


def _convert(tokenizer: Tokenizer, *, prepend: str) -> Any:
    """Make a tokenizer of the library `tokenizers` that encodes and decodes the same pieces."""
    tokenizers: Any = require_package("tokenizers", extra="export")
    decoders = tokenizers.decoders
    converted = tokenizers.Tokenizer(_subword_model(tokenizer, tokenizers.models))
    converted.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(SPACE, prepend_scheme=prepend)
    special = [tokenizer.piece(id) for id in tokenizer.vocabulary.special]
    converted.decoder = decoders.Sequence(
        [
            *(decoders.Replace(piece, "") for piece in special),
            decoders.Replace(SPACE, " "),
            decoders.Fuse(),
            decoders.Replace(tokenizers.Regex(" +"), " "),
            decoders.Replace(tokenizers.Regex("^ | $"), ""),
        ]
    )
    return converted


def _subword_model(tokenizer: Tokenizer, models: Any) -> Any:
    """Return a unigram model of the pieces, or BPE if their scores are ranks: whole numbers."""
    pieces = tokenizer.pieces()
    processor = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.content)
    scores = [processor.get_score(id) for id in range(len(pieces))]
    unk = tokenizer.vocabulary.unk
    if not all(score.is_integer() for score in scores):
        return models.Unigram(list(zip(pieces, scores, strict=True)), unk_id=unk)
    ids = {piece: id for id, piece in enumerate(pieces)}
    merges = [
        (text[:cut], text[cut:])
        for text in sorted(filter(None, tokenizer.texts), key=lambda text: -scores[ids[text]])
        for cut in range(1, len(text))
        if text[:cut] in ids and text[cut:] in ids
    ]
    return models.BPE(ids, merges, unk_token=pieces[unk], fuse_unk=True)

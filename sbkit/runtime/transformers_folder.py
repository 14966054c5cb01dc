"""Run and score a recognizer of transformers like a bundle of ours.

config.json -> an allowed class -> transformers, with safetensors -> texts -> our text table

Nothing in the folder is executed: code beside the model and pickles are refused.

Legend: B clips, S samples.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sbkit.audio.io import FULL_SCALE
from sbkit.base.arrays import Float32s
from sbkit.base.errors import BundleError, ConfigError, translate
from sbkit.base.imports import require_package
from sbkit.base.messages import listed
from sbkit.base.units import seconds_to_samples
from sbkit.bundle.bundle import BundleContents
from sbkit.bundle.config import BundleConfig
from sbkit.bundle.task import load_task
from sbkit.distributed.device import Placement
from sbkit.models.pretrained.folder import (
    CONFIG,
    GENERATION,
    MASK_VECTOR,
    MAX_LISTED_TENSORS,
    hash_weights,
    read_feature_settings,
    read_json,
    weight_files,
)
from sbkit.models.pretrained.transformers_encoder import make_config
from sbkit.runtime.torch_model import TorchModel
from sbkit.text.languages import parse_language, primary_language, whisper_language
from sbkit.text.normalization import language_table
from sbkit.text.verbalize import languages_with_numbers

TEXT_TASK = "sbkit.tasks.asr.task.TextOnlyAsrTask"
WHISPER_CLASS = "WhisperForConditionalGeneration"
CTC_CLASSES = (
    "HubertForCTC",
    "ParakeetForCTC",
    "Wav2Vec2BertForCTC",
    "Wav2Vec2ForCTC",
    "WavLMForCTC",
)
UNSUPPORTED_KEYS = (
    *("auto_map", "quantization_config"),  # code
    "adapter_attn_dim",  # adapters, which lie in further files
)
ADAPTERS = "adapter_config.json"  # of the package peft
MAX_WHISPER_CLIPS = 16  # in a batch; each clip is padded to 30 s
MIN_CLIP_SECONDS = 0.1  # shorter clips, such as the empty end of a recording, are padded


def read_transformers(folder: Path, language: str) -> BundleContents:
    """Describe a folder of transformers like a bundle, with the text table of the language."""
    require_recognizer(folder)
    code = primary_language(parse_language(language))
    numbers = code if code in languages_with_numbers() else ""  # Whisper writes digits
    config = BundleConfig(
        task=TEXT_TASK,
        sample_rate=read_feature_settings(folder)["sampling_rate"],
        model=(),
        parts={},
        language=language,
        normalizer=replace(language_table(language), numbers=numbers),
    )
    digests = {"weights": hash_weights(folder), "language_models": None}
    return BundleContents(config=config, task=load_task(TEXT_TASK), digests=digests)


def load_transformers(contents: BundleContents, folder: Path, placement: Placement) -> TorchModel:
    """Load the model of a folder that `read_transformers` describes onto a device."""
    config = contents.config
    model = TextModel(folder, str(config.language))
    return TorchModel(model, parts=(), sample_rate=config.sample_rate, placement=placement)


def require_recognizer(folder: Path) -> str:
    """Return the class of a supported recognizer; raise BundleError for other models."""
    settings = read_json(folder, CONFIG) or {}
    for key in UNSUPPORTED_KEYS:
        if settings.get(key) is not None:
            raise BundleError(f"`{key}` in {folder / CONFIG} is not supported. Use another model.")
    if (folder / ADAPTERS).exists():
        raise BundleError(f"{folder / ADAPTERS} is not supported. Merge its adapters into a model.")
    name = next(iter(settings.get("architectures") or ()), None)
    if name != WHISPER_CLASS and name not in CTC_CLASSES:
        raise BundleError(
            f"The class in {folder / CONFIG} is {name}, but only recognizers of these classes can "
            f"be run: {WHISPER_CLASS}, {', '.join(CTC_CLASSES)}."
        )
    weight_files(folder)
    return str(name)


class TextModel:
    """A recognizer of transformers, with `model` and `predict` like the model of a task."""

    def __init__(self, folder: Path, language: str) -> None:
        """Check a folder, and load its model with transformers, in float32 on the CPU."""
        name = require_recognizer(folder)
        self._options = _whisper_options(folder, language) if name == WHISPER_CLASS else None
        transformers: Any = require_package("transformers", extra="export")
        local = {"local_files_only": True, "trust_remote_code": False}
        with _quiet(), translate(Exception, BundleError, lambda error: _explain(folder, error)):
            self._extractor = transformers.AutoFeatureExtractor.from_pretrained(folder, **local)
            self._tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **local)
            model_class = getattr(transformers, name)
            settings = read_json(folder, CONFIG) or {}
            model, loading = model_class.from_pretrained(
                folder,
                config=make_config(model_class.config_class, settings),
                local_files_only=True,
                use_safetensors=True,
                dtype=torch.float32,
                output_loading_info=True,
            )
        missing = [key for key in loading["missing_keys"] if not key.endswith(MASK_VECTOR)]
        if missing:  # they would be random
            names = listed(sorted(missing), max_names=MAX_LISTED_TENSORS)
            raise BundleError(f"{folder} lacks weights of its {name}: {names}.")
        self.model = nn.ModuleList([model])

    def predict(self, audio: Tensor, audio_lengths: Tensor) -> list[str]:
        """Return the text of each clip: audio (B, S) in the scale of int16, (B,)."""
        rate = self._extractor.sampling_rate
        min_samples = seconds_to_samples(MIN_CLIP_SECONDS, rate)
        clips: list[Float32s] = []
        for samples, length in zip(audio.cpu().numpy(), audio_lengths.tolist(), strict=True):
            clip = samples[:length] / FULL_SCALE
            clips.append(np.pad(clip, (0, max(0, min_samples - length))))
        is_whisper = self._options is not None
        size = MAX_WHISPER_CLIPS if is_whisper else 1  # padding changes outputs of CTC models
        batches = [clips[first : first + size] for first in range(0, len(clips), size)]
        texts: list[str] = []
        with _quiet():
            for batch in batches:
                with torch.autocast("cpu", enabled=False):  # features stay in float32
                    inputs = self._extractor(batch, sampling_rate=rate, return_tensors="pt")
                tokens = self._predict_tokens(inputs.to(audio.device))
                # CTC needs the blank, a special token, between two equal letters.
                texts += self._tokenizer.batch_decode(tokens, skip_special_tokens=is_whisper)
        return texts

    def _predict_tokens(self, inputs: Any) -> Any:
        model: Any = self.model[0]
        if self._options is None:
            return model(**inputs).logits.argmax(-1)
        options = {"num_beams": 1, "do_sample": False, "return_timestamps": False}
        return model.generate(**inputs, **options, **self._options)


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide the progress bars and the warnings of transformers."""
    log: Any = require_package("transformers.utils.logging", extra="export")
    verbosity, shows_bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(verbosity)
        if shows_bars:
            log.enable_progress_bar()


def _whisper_options(folder: Path, language: str) -> dict[str, str]:
    """Return the language and the task for Whisper's decoder; {} for an English-only model."""
    settings = read_json(folder, GENERATION) or {}
    if "is_multilingual" not in settings:
        raise BundleError(
            f"{folder} has no {GENERATION} with `is_multilingual`. Copy this file from the Whisper "
            "that the model was trained from."
        )
    token = f"<|{whisper_language(language)}|>"
    if not settings["is_multilingual"]:
        if token != "<|en|>":
            raise ConfigError(f"{folder} is an English-only Whisper; it cannot write {language}.")
        return {}
    if token not in settings.get("lang_to_id", {}):
        raise ConfigError(f"{folder} is a Whisper that does not support the language {language}.")
    return {"language": token, "task": "transcribe"}


def _explain(folder: Path, error: Exception) -> str:
    reason = " ".join(str(error).split())[:200]
    return f"transformers cannot open {folder} ({type(error).__name__}: {reason})."

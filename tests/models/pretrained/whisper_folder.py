"""The folder of a tiny Whisper with random weights and byte-level tokens, as a hub has it."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)

from tests.models.pretrained.folders import CONFIGS

TEXTS = ("The number is five.", "Press one, or hold.", "Drücken Sie eins.")
LANGUAGES = ("en", "de", "fr")
SPECIAL = ("<|endoftext|>", "<|startoftranscript|>")
TASKS = ("translate", "transcribe")
NO_TIMES = "<|notimestamps|>"
MAX_TOKENS = 24


def make_whisper(
    path: Path,
    *,
    languages: tuple[str, ...] = LANGUAGES,
    seconds: int = 3,
    max_tokens: int = MAX_TOKENS,
) -> WhisperForConditionalGeneration:
    """Write the folder, and return its model, which writes short texts of any tokens.

    languages: none for a model of English. seconds, max_tokens: what its positions reach.
    """
    pairs = Tokenizer(models.BPE())
    pairs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pairs.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    pairs.train_from_iterator(TEXTS, trainer)
    names = [*SPECIAL, *(f"<|{name}|>" for name in (*languages, *TASKS)), NO_TIMES]
    pairs.add_special_tokens([AddedToken(name, special=True) for name in names])
    path.mkdir(parents=True, exist_ok=True)
    pairs.save(str(path / "tokenizer.json"))
    ids = {name: pairs.token_to_id(name) for name in names}
    end, start = (ids[name] for name in SPECIAL)
    of_texts: dict[str, Any] = {
        **{"pad_token_id": end, "bos_token_id": end, "eos_token_id": end},
        **{"decoder_start_token_id": start, "suppress_tokens": [5, 6]},
        "begin_suppress_tokens": [7, end],
    }
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        **{**CONFIGS["whisper"], "max_source_positions": 50 * seconds},
        **{"vocab_size": pairs.get_vocab_size(), "decoder_layers": 2, "decoder_ffn_dim": 32},
        **{"decoder_attention_heads": 4, "max_target_positions": max_tokens},
    }
    special = {name: of_texts[name] for name in of_texts if not name.endswith("suppress_tokens")}
    config = WhisperConfig(**sizes, **special)
    model = WhisperForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
        model.proj_out.weight[end] *= 2.0  # so that some texts end
    of_languages: dict[str, Any] = {
        "lang_to_id": {f"<|{name}|>": ids[f"<|{name}|>"] for name in languages},
        "task_to_id": {name: ids[f"<|{name}|>"] for name in TASKS},
    }
    model.generation_config = GenerationConfig(
        **of_texts,
        max_length=max_tokens,
        no_timestamps_token_id=ids[NO_TIMES],
        is_multilingual=bool(languages),
        **(of_languages if languages else {}),
    )
    model.save_pretrained(path)
    WhisperFeatureExtractor(feature_size=20, chunk_length=seconds).save_pretrained(path)
    return model

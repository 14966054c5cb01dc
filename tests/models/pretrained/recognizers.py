"""Folders of tiny recognizers of transformers with random weights, as a hub has them."""

import string
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    Wav2Vec2Config,
    Wav2Vec2CTCTokenizer,
    Wav2Vec2FeatureExtractor,
    Wav2Vec2ForCTC,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)

from sbkit.audio.io import Samples
from sbkit.base.files import to_json
from tests.models.pretrained.folders import CONFIGS, FRAMES, SIZES

TEXTS = ("The number is five.", "Press one, or hold.", "Drücken Sie eins.")
LANGUAGES = ("en", "de", "es")
SPECIAL = ("<|endoftext|>", "<|startoftranscript|>")
TASKS = ("translate", "transcribe")
NO_TIMES = "<|notimestamps|>"
MAX_TOKENS = 24


def noise(*lengths: int) -> list[Samples]:
    random = np.random.default_rng(0)
    return [(3000 * random.standard_normal(length)).astype(np.int16) for length in lengths]


def make_whisper(
    path: Path,
    *,
    languages: tuple[str, ...] = LANGUAGES,
    seconds: int = 3,
    max_tokens: int = MAX_TOKENS,
) -> WhisperForConditionalGeneration:
    """Write a Whisper with byte-level tokens, and return its model, whose texts are short.

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
    ids = pairs.get_vocab()
    end, start = (ids[name] for name in SPECIAL)
    special = {"pad_token_id": end, "bos_token_id": end, "eos_token_id": end}
    special["decoder_start_token_id"] = start
    torch.manual_seed(4)  # with which texts of different clips differ, and some end
    sizes: dict[str, Any] = {
        **{**CONFIGS["whisper"], "max_source_positions": 50 * seconds},
        **{"vocab_size": len(ids), "decoder_layers": 2, "decoder_ffn_dim": 32},
        **{"decoder_attention_heads": 4, "max_target_positions": max_tokens},
    }
    model = WhisperForConditionalGeneration(WhisperConfig(**sizes, **special)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.4 * torch.randn_like(parameter)
        model.proj_out.weight[end] *= 3.0
    of_languages: dict[str, Any] = {
        "lang_to_id": {f"<|{name}|>": ids[f"<|{name}|>"] for name in languages},
        "task_to_id": {name: ids[f"<|{name}|>"] for name in TASKS},
    }
    model.generation_config = GenerationConfig(
        **special,
        suppress_tokens=[id for name, id in ids.items() if id > end or not name.isascii()],
        begin_suppress_tokens=[ids["X"], end],
        max_length=MAX_TOKENS,
        no_timestamps_token_id=ids[NO_TIMES],
        alignment_heads=[[1, 0], [1, 2]],
        is_multilingual=bool(languages),
        **(of_languages if languages else {}),
    )
    model.save_pretrained(path)
    WhisperFeatureExtractor(feature_size=20, chunk_length=seconds).save_pretrained(path)
    return model


def make_ctc(folder: Path) -> Path:
    """Write a Wav2Vec2ForCTC of characters."""
    folder.mkdir(exist_ok=True)
    tokens = ["<pad>", "<s>", "</s>", "<unk>", "|", *string.ascii_uppercase, "'"]
    vocabulary = folder / "vocab.json"
    vocabulary.write_text(to_json({token: id for id, token in enumerate(tokens)}))
    Wav2Vec2CTCTokenizer(str(vocabulary)).save_pretrained(folder)
    Wav2Vec2FeatureExtractor(return_attention_mask=False).save_pretrained(folder)
    torch.manual_seed(0)
    sizes: dict[str, Any] = {**SIZES, **FRAMES}
    sizes |= {"num_conv_pos_embedding_groups": 4, "num_conv_pos_embeddings": 16}
    model = Wav2Vec2ForCTC(Wav2Vec2Config(**sizes, vocab_size=len(tokens), pad_token_id=0))
    torch.nn.init.normal_(model.lm_head.weight)  # so that texts differ
    model.save_pretrained(folder)
    return folder

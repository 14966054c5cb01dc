"""Folders of tiny recognizers of transformers with random weights, as `save_pretrained` writes."""

import string
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from tokenizers.pre_tokenizers import ByteLevel

from sbkit.base.files import to_json
from tests.models.pretrained.folders import FRAMES, SIZES

transformers: Any = import_module("transformers")  # most of it has no types
WHISPER_SIZES: dict[str, Any] = {
    **{f"{part}_layers": 1 for part in ("encoder", "decoder")},
    **{f"{part}_attention_heads": 2 for part in ("encoder", "decoder")},
    **{f"{part}_ffn_dim": 16 for part in ("encoder", "decoder")},
    **{"d_model": 16, "num_mel_bins": 20},
}
SPECIAL = ("startoftranscript", "en", "es", "translate", "transcribe", "notimestamps")


def make_whisper(folder: Path, *, is_multilingual: bool = True, positions: int = 16) -> Path:
    """Write a Whisper that knows English and Spanish, or English only; its texts are short.

    positions: the tokens of a text that it can learn.
    """
    tokens = {char: id for id, char in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = transformers.WhisperTokenizer(vocab=tokens, merges=[])
    tokenizer.add_special_tokens({"additional_special_tokens": [f"<|{name}|>" for name in SPECIAL]})
    tokenizer.save_pretrained(folder)
    id_of = {name: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in SPECIAL}
    end, start = tokenizer.eos_token_id, id_of["startoftranscript"]
    ends = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end}
    config = transformers.WhisperConfig(
        **WHISPER_SIZES,
        max_target_positions=positions,
        vocab_size=len(tokenizer),
        decoder_start_token_id=start,
        **ends,
        init_std=1.0,
    )
    torch.manual_seed(0)
    model = transformers.WhisperForConditionalGeneration(config)
    letters = tokenizer.convert_tokens_to_ids([*string.ascii_letters, *string.digits])
    model.generation_config = transformers.GenerationConfig(
        **ends,
        decoder_start_token_id=start,
        max_length=12,
        no_timestamps_token_id=id_of["notimestamps"],
        suppress_tokens=[id for id in range(len(tokenizer)) if id not in (end, *letters)],
        is_multilingual=is_multilingual,
        lang_to_id={f"<|{code}|>": id_of[code] for code in ("en", "es")},
        task_to_id={task: id_of[task] for task in ("translate", "transcribe")},
    )
    model.save_pretrained(folder)
    transformers.WhisperFeatureExtractor(feature_size=20).save_pretrained(folder)
    return folder


def make_ctc(folder: Path) -> Path:
    """Write a Wav2Vec2ForCTC of characters."""
    folder.mkdir(exist_ok=True)
    tokens = ["<pad>", "<s>", "</s>", "<unk>", "|", *string.ascii_uppercase, "'"]
    vocabulary = folder / "vocab.json"
    vocabulary.write_text(to_json({token: id for id, token in enumerate(tokens)}))
    transformers.Wav2Vec2CTCTokenizer(str(vocabulary)).save_pretrained(folder)
    transformers.Wav2Vec2FeatureExtractor(return_attention_mask=False).save_pretrained(folder)
    torch.manual_seed(0)
    sizes: dict[str, Any] = {**SIZES, **FRAMES}
    sizes |= {"num_conv_pos_embedding_groups": 4, "num_conv_pos_embeddings": 16}
    model = transformers.Wav2Vec2ForCTC(
        transformers.Wav2Vec2Config(**sizes, vocab_size=len(tokens), pad_token_id=0)
    )
    torch.nn.init.normal_(model.lm_head.weight)  # so that texts differ
    model.save_pretrained(folder)
    return folder

"""Convert a wav2vec 2.0 of fairseq2, such as omniASR's, to a folder that `pretrained` takes.

    python -m sbkit.models.pretrained.fairseq2 omniASR-W2V-300M.pt omniasr-300m

The checkpoint is a pickle. Only its tensors are read, so none of its code runs. It has no
configuration: all sizes but the number of heads follow from the shapes of the tensors. The encoder
of a CTC model converts as well; its head is left out.
Layout: fairseq2's `models/wav2vec2` and omnilingual-asr's cards of its models.
"""

import argparse
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from sbkit.base.errors import BundleError
from sbkit.base.files import atomic_folder, parse_errors_as_sbkit_errors, to_json
from sbkit.base.process import run_main
from sbkit.base.units import SAMPLE_RATE
from sbkit.models.pretrained.folder import (
    CONFIG,
    DOWNLOAD_AGAIN,
    MASK_VECTOR,
    PREPROCESSOR,
    WEIGHTS,
    complete_config,
    current_name,
    meta_parts,
    tensors_by_file_name,
)

OMNIASR_HEADS = 16  # in all of its sizes
CONV_LAYERS, LAYERS = "feature_extractor.conv_layers", "encoder.layers."
POSITIONS = "encoder.pos_conv_embed.conv.parametrizations.weight.original1"
LAST_NORM = "encoder.layer_norm.weight"  # if blocks normalize before attention and feed-forward
ENCODER_NAME = re.compile(r"(encoder_frontend\.|encoder\.|masker\.temporal_mask_embed$)")
# From fairseq2's names to those of Hugging Face, applied in this order.
RENAMED_PARTS = (
    ("encoder_frontend.feature_extractor.layers.", "feature_extractor.conv_layers."),
    ("encoder_frontend.post_extract_layer_norm.", "feature_projection.layer_norm."),
    ("encoder_frontend.model_dim_proj.", "feature_projection.projection."),
    ("encoder_frontend.pos_encoder.conv.", "encoder.pos_conv_embed.conv."),
    ("encoder_frontend.layer_norm.", "encoder.layer_norm."),  # if blocks normalize after each sum
    ("masker.temporal_mask_embed", MASK_VECTOR),
    (".group_norm.", ".layer_norm."),
    (".self_attn_layer_norm.", ".layer_norm."),
    (".self_attn.output_proj.", ".attention.out_proj."),
    (".self_attn.", ".attention."),
    (".ffn_layer_norm.", ".final_layer_norm."),
    (".ffn.inner_proj.", ".feed_forward.intermediate_dense."),
    (".ffn.output_proj.", ".feed_forward.output_dense."),
)


def convert(checkpoint: Path, folder: Path, *, heads: int = OMNIASR_HEADS) -> dict[str, Any]:
    """Write config.json, preprocessor_config.json and model.safetensors; return the configuration.

    heads: the number of attention heads, which the file does not contain.

    Raises:
        BundleError: the folder exists, or the encoder has another layout.
        SbkitError: the checkpoint is damaged.
    """
    if folder.exists():
        raise BundleError(f"{folder} exists. Remove it, or name another folder.")
    with parse_errors_as_sbkit_errors(checkpoint, "be a whole checkpoint", fix=DOWNLOAD_AGAIN):
        content = torch.load(checkpoint, "cpu", weights_only=True, mmap=True)
        stored: Mapping[str, Tensor] = content.get("model", content)
        tensors = _rename(stored)
    try:
        sizes = _sizes(tensors)
    except KeyError as error:
        raise _another_layout(checkpoint, str(error.args[0])) from error
    config = {"model_type": "wav2vec2", "num_attention_heads": heads, **sizes}
    config["do_stable_layer_norm"] = LAST_NORM in stored
    parts = meta_parts(complete_config(config, source_file=str(checkpoint)))
    missing = tensors_by_file_name(parts).keys() - tensors.keys()
    if missing:
        raise _another_layout(checkpoint, min(missing))
    with atomic_folder(folder) as unfinished:
        (unfinished / CONFIG).write_text(to_json(config, indent=2))
        preprocessor = {"sampling_rate": SAMPLE_RATE, "do_normalize": True}
        (unfinished / PREPROCESSOR).write_text(to_json(preprocessor, indent=2))
        save_file(tensors, unfinished / WEIGHTS, metadata={"format": "pt"})
    return config


def _another_layout(checkpoint: Path, name: str) -> BundleError:
    return BundleError(
        f"{checkpoint} does not have the layout of omniASR's wav2vec 2.0: {name} is missing. Only "
        "encoders of waveforms with Transformer blocks and one convolution for positions convert."
    )


def _rename(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of the encoder by Hugging Face's names."""
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if ENCODER_NAME.match(name):
            for theirs, ours in RENAMED_PARTS:
                name = name.replace(theirs, ours)
            renamed[current_name(name)] = tensor.contiguous()
    return renamed


def _sizes(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Read sizes from the shapes of tensors; raises KeyError for a missing tensor."""
    convs: list[torch.Size] = []
    while (conv := f"{CONV_LAYERS}.{len(convs)}.conv.weight") in tensors:
        convs.append(tensors[conv].shape)
    hidden_size, group_channels, kernel = tensors[POSITIONS].shape
    return {
        "hidden_size": hidden_size,
        "num_hidden_layers": len({n.split(".")[2] for n in tensors if n.startswith(LAYERS)}),
        "intermediate_size": len(tensors[f"{LAYERS}0.feed_forward.intermediate_dense.weight"]),
        "num_conv_pos_embeddings": kernel,
        "num_conv_pos_embedding_groups": hidden_size // group_channels,
        "conv_dim": [channels for channels, _, _ in convs],
        "conv_kernel": [width for _, _, width in convs],
        "conv_bias": f"{CONV_LAYERS}.0.conv.bias" in tensors,
        "feat_extract_norm": "layer"
        if f"{CONV_LAYERS}.1.layer_norm.weight" in tensors
        else "group",
    }


def main() -> None:
    """Convert a wav2vec 2.0 of fairseq2, such as omniASR's, to a folder for `pretrained`."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("checkpoint", type=Path, help="such as omniASR-W2V-300M.pt")
    parser.add_argument("folder", type=Path, help="a new folder")
    parser.add_argument("--heads", type=int, default=OMNIASR_HEADS, help="of attention")
    options = parser.parse_args()
    config = convert(options.checkpoint, options.folder, heads=options.heads)
    print(
        f"{options.folder}: {config['num_hidden_layers']} layers of width {config['hidden_size']}, "
        f"taken to have {config['num_attention_heads']} heads"
    )


if __name__ == "__main__":
    run_main(main)

"""Every form of a pretrained folder loads, and every bad one is an error."""

import json
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sbkit.base.errors import ConfigError, DeviceError, SbkitError
from sbkit.models.pretrained import folder as folder_module
from sbkit.models.pretrained.encoder import (
    PretrainedEncoder,
    PretrainedFeatures,
    PretrainedFrontEnd,
)
from sbkit.models.pretrained.folder import check_tensors, load_weights, read_encoder_config
from tests.models.pretrained.folders import (
    CONFIGS,
    change_json,
    make_folder,
    make_parts,
    split_into_shards,
)

Change = Callable[[Path], object]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "tiny")


def load(folder: Path) -> list[Tensor]:
    """Check and load a folder like a run that starts; return the weights."""
    config = read_encoder_config(folder)
    check_tensors(folder, config)
    parts = [PretrainedFrontEnd(config=config), PretrainedEncoder(config=config)]
    load_weights(folder, parts)
    return [tensor for part in parts for tensor in part.state_dict().values()]


def widen(folder: Path) -> None:
    change_json(folder / "config.json", hidden_size=48)


def map_weights(convert: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Change:
    def change(folder: Path) -> None:
        file = folder / "model.safetensors"
        save_file(convert(load_file(file)), file)

    return change


def remove(name: str) -> Change:
    return lambda folder: (folder / name).unlink()


def truncate(folder: Path) -> None:
    os.truncate(file := folder / "model.safetensors", file.stat().st_size - 100)


def remove_shard(folder: Path) -> None:
    split_into_shards(folder)
    remove("model-00002-of-00002.safetensors")(folder)


def rename(old: str, new: str) -> Change:
    return map_weights(lambda tensors: {n.replace(old, new): t for n, t in tensors.items()})


def lead_out(folder: Path, name: object) -> None:
    """Name the weights by an index, where they lie outside of the folder."""
    (folder / "model.safetensors").rename(folder.parent / "planted.safetensors")
    index = {"weight_map": {Q_PROJ: name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


OUTSIDE = ("../planted.safetensors", "a\\b.safetensors", "/planted.safetensors", "..", ".", "", 3)
Q_PROJ = "encoder.layers.0.attention.q_proj.weight"
BAD: dict[str, tuple[Change, str]] = {
    "wider": (widen, r"\(24, 16\), not \(48, 16\)"),
    "no config": (remove("config.json"), "a folder with config.json, but .* has none"),
    "half a config": (lambda f: (f / "config.json").write_text("{"), "cannot be read"),
    "no rate": (remove("preprocessor_config.json"), "no preprocessor_config.json with a sampling"),
    "no weights": (remove("model.safetensors"), "has no model.safetensors"),
    "half a download": (truncate, "model.safetensors must be a whole file"),
    "shard missing": (remove_shard, "has no model-00002-of-00002.safetensors"),
    **{f"index with {x}": (partial(lead_out, name=x), "index.json") for x in OUTSIDE},
    "tensor missing": (rename(Q_PROJ, "x"), rf"Tensors in .* config.json: {Q_PROJ} \(missing\)"),
    "no mask": (rename("masked_spec_embed", "x"), r"embed \(missing\). Set `mask_time_prob: 0`"),
}


@pytest.mark.parametrize(("change", "message"), BAD.values(), ids=BAD)
def test_bad_folder_is_refused(change: Change, message: str, folder: Path) -> None:
    change(folder)
    with pytest.raises(SbkitError, match=message):
        load(folder)


def write_processor(folder: Path) -> None:
    """Write the file of a processor's `save_pretrained` since transformers 5."""
    remove("preprocessor_config.json")(folder)
    values = {"feature_extractor": {"sampling_rate": 16_000, "do_normalize": True}}
    (folder / "processor_config.json").write_text(json.dumps(values))


def add_head(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    body = {f"wav2vec2.{name}": tensor for name, tensor in tensors.items()}
    return body | {"lm_head.weight": torch.zeros(4, 24)}


def use_old_names(folder: Path) -> None:
    rename("parametrizations.weight.original0", "weight_g")(folder)
    rename("parametrizations.weight.original1", "weight_v")(folder)


GOOD: dict[str, Change] = {
    "unchanged": lambda folder: None,
    "a head model": map_weights(add_head),
    "old names": use_old_names,
    "transformers 5": write_processor,
    "shards": split_into_shards,
}


@pytest.mark.parametrize("change", GOOD.values(), ids=GOOD)
def test_every_form_of_a_folder_loads_the_same_weights(change: Change, folder: Path) -> None:
    before = load(folder)
    change(folder)
    assert all(map(torch.equal, before, load(folder)))
    parameters = [p for part in make_parts(read_encoder_config(folder)) for p in part.parameters()]
    assert sum(t.numel() for t in before) == sum(p.numel() for p in parameters)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_weights_become_float32(dtype: torch.dtype, folder: Path) -> None:
    before = load(folder)
    map_weights(lambda tensors: {n: t.to(dtype) for n, t in tensors.items()})(folder)
    for weights, converted in zip(before, load(folder), strict=True):
        assert converted.dtype == torch.float32
        assert torch.equal(weights.to(dtype).float(), converted)


def test_model_larger_than_memory_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = read_encoder_config(folder)
    config_of_one = {**config, "num_hidden_layers": 1}
    one_layer = sum(t.numel() for part in make_parts(config_of_one) for t in part.parameters())
    monkeypatch.setattr(folder_module, "available_memory", lambda: 4 * one_layer)
    check_tensors(folder, config, layers=1)
    with pytest.raises(DeviceError, match=r"but only 0.0 GiB of memory are free"):
        check_tensors(folder, config)
    with pytest.raises(ConfigError, match="`layers` .* 4"):
        check_tensors(folder, config, layers=4)


@pytest.mark.parametrize("model_type", CONFIGS)
def test_cut_encoder_loads_only_its_layers(model_type: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path, model_type)
    config = read_encoder_config(folder)
    parts = [PretrainedFrontEnd(config=config), PretrainedEncoder(config=config, layers=2)]
    (unused,) = re.findall("; not used: (.*)", load_weights(folder, parts))
    assert re.match(r"(encoder\.)?layers\.2\.", unused)


def test_license_is_read_from_the_model_card(folder: Path) -> None:
    assert read_encoder_config(folder)["source"]["license"] == "unknown"
    for text, license in (
        ("license: apache-2.0  # since 2020", "apache-2.0"),
        ("license:\n- mit\n- 'cc-by-4.0'", "mit, cc-by-4.0"),
        ("license: [mit, other]\nlicense_name: x", "mit, other"),
        ("license:\ntags: []", "unknown"),
    ):
        (folder / "README.md").write_text(f"---\nlanguage: it\n{text}\n---\n# license: x\n")
        assert read_encoder_config(folder)["source"]["license"] == license


def test_quiet_clips_have_the_features_of_loud_ones(tmp_path: Path) -> None:
    torch.manual_seed(0)
    audio = 3000 * torch.randn(1, 16_000) * torch.linspace(0, 20, 16_000).sin()
    for model_type in ("wav2vec2", "hubert", "wavlm"):
        folder = make_folder(tmp_path / model_type, model_type)
        change_json(folder / "preprocessor_config.json", do_normalize=False)
        config = read_encoder_config(folder)
        parts = PretrainedFeatures(config=config).eval(), PretrainedFrontEnd(config=config).eval()
        loud, quiet = audio, audio * 10 ** (-30 / 20)
        for part in parts:
            (loud, _), (quiet, _) = (part(x, torch.tensor([x.shape[1]])) for x in (loud, quiet))
        assert (quiet - loud).abs().mean() < 0.01 * loud.std()

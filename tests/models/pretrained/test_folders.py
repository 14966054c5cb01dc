"""What a folder must be for its encoder to be loaded, and a sentence for each that is not."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sbkit.base.errors import SbkitError
from sbkit.models.pretrained import folder as weights
from sbkit.models.pretrained.config import read_encoder_config
from sbkit.models.pretrained.folder import check_weights, load_weights
from sbkit.models.pretrained.parts import FAMILIES as PARTS
from sbkit.models.pretrained.parts import PretrainedEncoder, PretrainedFeatures, PretrainedFrontEnd
from tests.models.pretrained.folders import make_folder, make_parts

Change = Callable[[Path], object]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "tiny")


def read(folder: Path) -> list[Tensor]:
    """Do what a run does when it begins; return the weights of the encoder."""
    config = read_encoder_config(folder)
    check_weights(folder, config)
    parts = [PretrainedFrontEnd(config=config), PretrainedEncoder(config=config)]
    load_weights(folder, parts)
    return [each for part in parts for each in part.state_dict().values()]


def config_of(**values: Any) -> Change:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return change


def weights_of(make: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Change:
    def change(folder: Path) -> None:
        file = folder / "model.safetensors"
        save_file(make(load_file(file)), file)

    return change


def without(name: str) -> Change:
    return lambda folder: (folder / name).unlink()


def pickled(folder: Path) -> None:
    without("model.safetensors")(folder)
    torch.save({}, folder / "pytorch_model.bin")


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def pointer(folder: Path) -> None:
    """What a clone without Git LFS leaves."""
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 380267417\n"
    (folder / "model.safetensors").write_text(text)


def shards(folder: Path) -> None:
    """Write the tensors as `save_pretrained` does with a small max_shard_size."""
    tensors = load_file(folder / "model.safetensors")
    named = {name: f"model-0000{1 + n % 2}-of-00002.safetensors" for n, name in enumerate(tensors)}
    for file in {*named.values()}:
        save_file({n: t for n, t in tensors.items() if named[n] == file}, folder / file)
    without("model.safetensors")(folder)
    index = {"metadata": {}, "weight_map": named}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def shard_missing(folder: Path) -> None:
    shards(folder)
    without("model-00002-of-00002.safetensors")(folder)


def shard_elsewhere(folder: Path) -> None:
    without("model.safetensors")(folder)
    index = {"weight_map": {"a": "../other/model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def linked(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder.parent / "elsewhere.safetensors")
    (folder / "model.safetensors").symlink_to("../elsewhere.safetensors")


def renamed(old: str, new: str) -> Change:
    return weights_of(lambda tensors: {n.replace(old, new): t for n, t in tensors.items()})


Q_PROJ = "encoder.layers.0.attention.q_proj.weight"
BAD: dict[str, tuple[Change, str]] = {
    "whisper": (config_of(model_type="whisper"), "`model_type` of .* wav2vec2, .* but is whisper"),
    "conformer": (config_of(model_type="wav2vec2-conformer"), "but is wav2vec2-conformer"),
    "data2vec": (config_of(model_type="data2vec-audio"), "but is data2vec-audio"),
    "adapter": (config_of(add_adapter=True), "`add_adapter` of .* but is True"),
    "MMS adapters": (config_of(adapter_attn_dim=16), "`adapter_attn_dim` of .* but is 16"),
    "remote code": (config_of(auto_map={"AutoModel": "x.Y"}), "code of its author, which is not"),
    "heads": (config_of(num_attention_heads=5), r"multiple of `num_attention_heads` \(5\), but is"),
    "groups": (config_of(num_conv_pos_embedding_groups=7), "`num_conv_pos_embedding_groups`"),
    "kernels": (
        config_of(conv_kernel=[10, 3]),
        r"`conv_kernel` of .* as long as `conv_dim` \(3\), but",
    ),
    "no kernels": (config_of(conv_kernel=[]), "`conv_kernel` of .* a list, each a whole number"),
    "stride": (config_of(conv_stride=[5, 0, 2]), "`conv_stride` of .* a list, each a whole number"),
    "size": (config_of(hidden_size=1 << 40), "`hidden_size` of .* a whole number from 1 to 65536"),
    "stacked": (
        config_of(model_type="wav2vec2-bert", feature_projection_input_dim=80),
        r"must be `num_mel_bins` times `stride` of preprocessor_config.json, 160, but is 80",
    ),
    "text": (config_of(hidden_size="24"), "`hidden_size` of .* but is 24"),
    "activation": (config_of(hidden_act="mish"), "`hidden_act` of .* gelu or relu .* is mish"),
    "norm": (config_of(feat_extract_norm="batch"), "`feat_extract_norm` of .* group or layer"),
    "wider": (config_of(hidden_size=48), r"\(24, 16\), not \(48, 16\)"),
    "deeper": (config_of(num_hidden_layers=4), r"encoder.layers.3.\S+ \(missing\)"),
    "no config": (without("config.json"), "a folder with config.json, but .* has none"),
    "half a config": (lambda f: (f / "config.json").write_text("{"), "cannot be read"),
    "no rate": (without("preprocessor_config.json"), "must hold preprocessor_config.json"),
    "pickle": (pickled, "but has only pytorch_model.bin. Download"),
    "no weights": (without("model.safetensors"), "but has no model.safetensors. Download"),
    "half a download": (cut, "model.safetensors must be a whole file"),
    "no LFS": (pointer, "model.safetensors must be a whole file"),
    "shard missing": (shard_missing, "but has no model-00002-of-00002.safetensors"),
    "shard elsewhere": (shard_elsewhere, "but has no ../other/model.safetensors"),
    "link": (linked, "must be a file of its folder, but leads out of it, to .*elsewhere"),
    "tensor missing": (renamed(Q_PROJ, "x"), rf"1 are missing or others: {Q_PROJ} \(missing\)"),
    "no mask": (
        renamed("masked_spec_embed", "x"),
        r"masked_spec_embed \(missing\). Pass --mask_time_prob=0",
    ),
    "not finite": (
        weights_of(lambda each: each | {Q_PROJ: each[Q_PROJ] / 0}),
        rf"{Q_PROJ} \(not finite\)",
    ),
    "quantized": (
        weights_of(lambda each: each | {Q_PROJ: each[Q_PROJ].to(torch.int8)}),
        rf"{Q_PROJ} \(of I8\)",
    ),
}


@pytest.mark.parametrize(("change", "said"), BAD.values(), ids=BAD)
def test_a_bad_folder_is_a_sentence(change: Change, said: str, folder: Path) -> None:
    change(folder)
    with pytest.raises(SbkitError, match=said) as refused:
        read(folder)
    assert ", but " in str(refused.value) and str(refused.value).endswith(".")


def processor(folder: Path) -> None:
    """Write what a processor's `save_pretrained` does since transformers 5."""
    without("preprocessor_config.json")(folder)
    values = {"feature_extractor": {"sampling_rate": 16_000, "do_normalize": True}}
    (folder / "processor_config.json").write_text(json.dumps(values))


GOOD: dict[str, Change] = {
    "as it is": lambda folder: None,
    "a head model": weights_of(
        lambda tensors: (
            {f"wav2vec2.{n}": t for n, t in tensors.items()}
            | {"lm_head.weight": torch.zeros(4, 24)}
        )
    ),
    "old names": weights_of(
        lambda tensors: {
            n.replace("parametrizations.weight.original0", "weight_g").replace(
                "parametrizations.weight.original1", "weight_v"
            ): t
            for n, t in tensors.items()
        }
    ),
    "transformers 5": processor,
}


@pytest.mark.parametrize("change", GOOD.values(), ids=GOOD)
def test_every_form_of_the_files_is_read(change: Change, folder: Path) -> None:
    before = read(folder)
    change(folder)
    for one, two in zip(before, read(folder), strict=True):
        assert torch.equal(one, two)
    expected = [
        each for part in make_parts(read_encoder_config(folder)) for each in part.parameters()
    ]
    assert sum(each.numel() for each in before) == sum(each.numel() for each in expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_of_half_precision_become_float32(dtype: torch.dtype, folder: Path) -> None:
    before = read(folder)
    weights_of(lambda tensors: {n: t.to(dtype) for n, t in tensors.items()})(folder)
    for one, two in zip(before, read(folder), strict=True):
        assert two.dtype == torch.float32
        assert torch.equal(one.to(dtype).float(), two)


def test_memory_stays_that_of_the_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = read_encoder_config(folder)
    monkeypatch.setattr(weights, "available_memory", lambda: 1 << 10)
    with pytest.raises(SbkitError, match=r"fits into the memory, .* and 0.0 GiB are free"):
        check_weights(folder, config)


def test_the_hubs_cache_is_found_by_an_id_with_its_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    home = tmp_path / "models--org--tiny"
    snapshot = make_folder(home / "snapshots" / ("0" * 40))
    (home / "refs").mkdir()
    (home / "refs/main").write_text("0" * 40)
    (home / "blobs").mkdir()
    for file in [*snapshot.iterdir()]:
        file.rename(home / "blobs" / file.stem)
        file.symlink_to(f"../../blobs/{file.stem}")
    config = read_encoder_config("org/tiny")
    assert config["source"]["name"] == "org/tiny"
    check_weights(snapshot, config)
    (home / "blobs/model").unlink()
    with pytest.raises(SbkitError, match="is no file, or half a download"):
        read_encoder_config("org/tiny")
    with pytest.raises(SbkitError, match="but org/other is neither"):
        read_encoder_config("org/other")


def test_the_card_tells_the_license(folder: Path) -> None:
    assert read_encoder_config(folder)["source"]["license"] == "unknown"
    (folder / "README.md").write_text("---\nlanguage: it\nlicense: apache-2.0\n---\n# license: x\n")
    assert read_encoder_config(folder)["source"]["license"] == "apache-2.0"


@pytest.mark.parametrize("model_type", PARTS)
def test_the_modules_need_all_that_is_kept_of_a_config(model_type: str, tmp_path: Path) -> None:
    config = read_encoder_config(make_folder(tmp_path, model_type))
    made_by = (PretrainedFeatures, PretrainedFrontEnd, PretrainedEncoder)
    # What is only compared, has a default, is of another family, or is of the run.
    others = ("position_embeddings_type", "feat_proj_layer_norm", "do_normalize", "source")
    for key in config.keys() - others:
        less = {name: value for name, value in config.items() if name != key}
        with pytest.raises(KeyError, match=key):
            _ = [part(config=less) for part in made_by]

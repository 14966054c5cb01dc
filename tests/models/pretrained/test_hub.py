"""A model is downloaded from a hub once, and every way in which that fails is one sentence."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from sbkit.base.errors import SbkitError
from sbkit.config.hparams import save_resolved
from sbkit.models.pretrained.folder import read_encoder_config
from sbkit.models.pretrained.hub import find_folder
from sbkit.train.run import Run
from tests.models.pretrained.folders import FRAMES, make_folder
from tests.models.pretrained.hub import Hub, serve_hub
from tests.runs import ROOT, Workplace, read_json

FILES = ("config.json", "preprocessor_config.json", "README.md", "model.safetensors")
YAML = ROOT / "hparams/ctc_pretrained.yaml"
PULL = "refs/pr/1"
SMALL = (
    *("--device=cpu", "--batch_seconds=6", "--number_of_epochs=1", "--average_checkpoints=1"),
    *("--mask_channel_length=4", "--word_lm_order=0", "--token_lm_order=0"),
)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with a model acme/tiny and an empty cache, as seen from this process."""
    folder = make_folder(tmp_path / "tiny", **FRAMES)
    (folder / "README.md").write_text("---\nlicense: mit\n---\n")
    for name in ("pytorch_model.bin", "modeling.py", "adapter.fra.safetensors"):
        (folder / name).write_text("must not be fetched")
    with serve_hub() as hub:
        hub.add("acme/tiny", folder)
        constants = {
            "HF_HUB_CACHE": str(tmp_path / "cache"),
            "ENDPOINT": hub.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": hub.url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_OFFLINE": False,
        }
        for key, value in constants.items():
            monkeypatch.setattr(f"huggingface_hub.constants.{key}", value)
        yield hub


def test_model_is_downloaded_once_and_then_read_from_the_cache(hub: Hub) -> None:
    commit = hub.add("acme/tiny", hub.folders["acme/tiny", "main"])
    source = read_encoder_config(find_folder("acme/tiny"))["source"]
    assert (source["name"], source["revision"], source["license"]) == ("acme/tiny", commit, "mit")
    assert hub.fetched == {f"acme/tiny/{file}": 1 for file in FILES}
    num_requests = hub.num_requests
    assert find_folder("acme/tiny", commit) == find_folder("acme/tiny", "main")
    assert hub.num_requests == num_requests


def test_missing_file_of_the_cache_is_completed(hub: Hub) -> None:
    folder = find_folder("acme/tiny")
    (folder / "preprocessor_config.json").resolve().unlink()
    (folder / "model.safetensors").resolve().unlink()
    read_encoder_config(find_folder("acme/tiny"))
    once, twice = ("config.json", "README.md"), ("preprocessor_config.json", "model.safetensors")
    assert [hub.fetched[f"acme/tiny/{file}"] for file in (*once, *twice)] == [1, 1, 2, 2]


def test_revision_is_downloaded_and_kept_beside_main(hub: Hub, tmp_path: Path) -> None:
    commit = hub.add("acme/tiny", make_folder(tmp_path / "v1", **FRAMES, hidden_size=48), PULL)
    for revision in (PULL, commit):
        config = read_encoder_config(find_folder("acme/tiny", revision))
        assert (config["hidden_size"], config["source"]["revision"]) == (48, commit)
    assert read_encoder_config(find_folder("acme/tiny"))["hidden_size"] == 24


def test_only_the_shards_of_the_index_are_downloaded(hub: Hub, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "sharded", **FRAMES)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {name: f"part-{index % 2}.safetensors" for index, name in enumerate(tensors)}
    for shard in {*weight_map.values(), "fp16.safetensors"}:
        names = [name for name in tensors if weight_map[name] == shard]
        save_file({name: tensors[name] for name in names}, folder / shard)
    index = json.dumps({"weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(index)
    hub.add("acme/sharded", folder)
    read_encoder_config(find_folder("acme/sharded"))
    shards = ("model.safetensors.index.json", "part-0.safetensors", "part-1.safetensors")
    assert hub.fetched.keys() == {f"acme/sharded/{file}" for file in (*FILES[:2], *shards)}


@pytest.mark.parametrize(
    ("name", "revision", "sentence"),
    [
        ("acme/none", None, "acme/none, which is neither a folder here nor a model of http://127"),
        ("acme/tiny", "v9", "`pretrained_revision` is v9, which acme/tiny does not have"),
        ("acme/gated", None, "acme/gated only to those who have accepted its terms. Accept them"),
        ("acme/pickle", None, "has no model.safetensors on the hub, only pytorch_model.bin"),
        ("acme/empty", None, "acme/empty has no config.json on the hub. Use another model"),
        ("acme/llama", None, "`model_type` in .* is llama"),
        ("folder/of/mine", None, "a model of the hub as OWNER/NAME, but folder/of/mine is neither"),
        (".", "main", "`pretrained_revision` selects a revision .* but . is a folder"),
    ],
)
def test_model_that_cannot_be_had_is_one_sentence(
    name: str, revision: str | None, sentence: str, hub: Hub, tmp_path: Path
) -> None:
    tiny = hub.folders["acme/tiny", "main"]
    hub.add("acme/gated", tiny)
    hub.gated = {"acme/gated"}
    hub.add("acme/llama", make_folder(tmp_path / "llama"))
    (tmp_path / "llama/config.json").write_text('{"model_type": "llama"}')
    for kind in ("pickle", "empty"):
        (tmp_path / kind).mkdir()
        hub.add(f"acme/{kind}", tmp_path / kind)
    for file in ("config.json", "pytorch_model.bin"):
        (tmp_path / "pickle" / file).write_text("{}")
    with pytest.raises(SbkitError, match=sentence) as info:
        find_folder(name, revision)
    assert "\n" not in str(info.value)
    assert not [file for file in hub.fetched if "safetensors" in file or "bin" in file]


def test_hub_that_is_off_or_out_of_reach_is_one_sentence(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(SbkitError, match=r"from http://127.0.0.1:9 \(.*\). Check the connection"):
        find_folder("acme/tiny")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(SbkitError, match="nor complete at revision main in .*HF_HUB_OFFLINE"):
        find_folder("acme/tiny")


def test_yaml_of_a_run_folder_names_the_commit_when_main_has_moved(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = Run(YAML, {"pretrained": "acme/tiny"})
    save_resolved(tmp_path / "resolved.yaml", run.yaml_file, run.overrides)
    hub.folders["acme/tiny", "main"] = make_folder(tmp_path / "new", **FRAMES, hidden_size=48)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "elsewhere"))
    assert Run(tmp_path / "resolved.yaml", {}).knobs == run.knobs
    with pytest.raises(SbkitError, match="agree with `pretrained`, but acme/tiny has other sizes"):
        Run(tmp_path / "resolved.yaml", {"pretrained_revision": "main"})


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.ddp)])
def test_run_downloads_each_file_once_and_names_the_commit(
    ranks: int, hub: Hub, workplace: Workplace, tmp_path: Path
) -> None:
    """Fresh processes, since `huggingface_hub` reads its variables when it is imported."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    proxy = {"HF_ENDPOINT": "http://hub.invalid", "http_proxy": hub.url, "no_proxy": ""}
    variables = {
        **{**os.environ, "HF_HOME": str(tmp_path / "home"), "SBKIT_CACHE": str(workplace.cache)},
        **({"HF_ENDPOINT": hub.url} if ranks == 1 else proxy),
    }
    run = tmp_path / "run"
    words = workplace.arguments(run, "--pretrained=acme/tiny", yaml=str(YAML), tiny=SMALL)

    def start(*command: str, **more: str) -> str:
        process = subprocess.run(
            [sys.executable, *command], env={**variables, **more}, capture_output=True, text=True
        )
        assert process.returncode == 0, process.stderr
        return process.stdout

    output = start(*(launcher if ranks > 1 else []), "train.py", *words)
    assert hub.fetched == {f"acme/tiny/{file}": 1 for file in FILES}
    commit = read_json(run / "run_config.json")["values"]["encoder_config"]["source"]["revision"]
    assert hub.folders["acme/tiny", commit] == hub.folders["acme/tiny", "main"]
    assert f"pretrained acme/tiny, commit {commit} in {tmp_path}/home/hub" in output
    if ranks == 1:
        again = [word for word in words if not word.startswith("--output_folder")]
        num_requests = hub.num_requests
        output = start("-m", "sbkit", "check", *again, HF_HUB_OFFLINE="1")
        assert f"pretrained acme/tiny, commit {commit}" in output
        assert hub.num_requests == num_requests

"""A model is downloaded from a hub once, and every way in which that fails is one sentence."""

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sbkit.base.errors import SbkitError
from sbkit.config.hparams import read_spec
from sbkit.models.pretrained.folder import read_encoder_config
from sbkit.models.pretrained.hub import find_folder
from sbkit.train.initialize import pretrained_folder
from sbkit.train.setup import declare_run
from tests.models.pretrained.folders import FRAMES, make_folder, split_into_shards
from tests.models.pretrained.hub import Hub, commit_id
from tests.runs import ROOT, Workplace, read_json

YAML = ROOT / "hparams/ctc_pretrained.yaml"
FILES = ("config.json", "preprocessor_config.json", "README.md", "model.safetensors")
OTHERS = ("pytorch_model.bin", "modeling.py", "model.fp32.safetensors")  # never fetched
SHARDS = ("model.safetensors.index.json", *(f"model-0000{n}-of-00002.safetensors" for n in (1, 2)))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with a model acme/tiny and an empty cache, as seen from this process."""
    folder = make_folder(tmp_path / "tiny", **FRAMES)
    for name in ("README.md", *OTHERS):
        (folder / name).write_text("---\nlicense: mit\n---\n")
    with Hub() as hub, ThreadPoolExecutor(1) as pool:
        pool.submit(hub.serve_forever, 0.05)
        hub.models["acme/tiny"] = {"main": folder}
        constants = {
            "HF_HUB_CACHE": str(tmp_path / "cache"),
            "ENDPOINT": hub.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": hub.url + "/{repo_id}/resolve/{revision}/{filename}",
        }
        for key, value in constants.items():
            monkeypatch.setattr(f"huggingface_hub.constants.{key}", value)
        yield hub
        hub.shutdown()


def test_missing_files_are_downloaded_and_a_complete_model_needs_no_connection(hub: Hub) -> None:
    folder = find_folder("acme/tiny")
    assert hub.fetched == {f"acme/tiny/{file}": 1 for file in FILES}
    for file in FILES[1::2]:
        (folder / file).resolve().unlink()  # behind its link
    assert find_folder("acme/tiny") == folder
    assert [hub.fetched[f"acme/tiny/{file}"] for file in FILES] == [1, 2, 1, 2]
    num_requests = hub.num_requests
    assert find_folder("acme/tiny", folder.name) == find_folder("acme/tiny") == folder
    assert hub.num_requests == num_requests


def test_yaml_names_the_revision(hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    old, new = hub.models["acme/tiny"]["main"], make_folder(tmp_path / "1", "hubert", **FRAMES)
    hub.models["acme/tiny"]["refs/pr/1"] = new
    for revision in ("refs/pr/1", commit_id(new)):
        setup = declare_run(YAML, {"pretrained": "acme/tiny", "pretrained_revision": revision})
        assert setup.settings["encoder_config"]["model_type"] == "hubert"
    setup = declare_run(YAML, {"pretrained": "acme/tiny"})
    source = setup.settings["encoder_config"]["source"]
    assert [*source.values()][:3] == ["acme/tiny", commit_id(old), "mit"]
    (tmp_path / "resolved.yaml").write_text(read_spec(setup.yaml_file, setup.overrides).one_file)
    hub.models["acme/tiny"] = {"main": new, "old": old}
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "elsewhere"))
    assert declare_run(tmp_path / "resolved.yaml", {}).settings == setup.settings
    with pytest.raises(SbkitError, match="agree with `pretrained` .acme/tiny"):
        declare_run(tmp_path / "resolved.yaml", {"pretrained_revision": "main"})


def test_run_folder_downloads_what_the_user_names_or_trains(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run, yaml = tmp_path / "run", tmp_path / "run/hyperparams.yaml"
    run.mkdir()
    (run / "run_config.json").write_text("{}")
    yaml.write_text(YAML.read_text().replace("pretrained: null", "pretrained: acme/tiny"))
    with pytest.raises(SbkitError, match="acme/tiny"):
        declare_run(yaml, {})
    assert hub.num_requests == 0
    spec = declare_run(yaml, {"pretrained": "acme/tiny"})
    assert hub.fetched["acme/tiny/model.safetensors"] == 1
    assert declare_run(yaml, {}).settings == spec.settings  # from the cache
    yaml.write_text(spec.one_file)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "elsewhere"))
    num_requests = hub.num_requests
    assert declare_run(yaml, {}).settings == spec.settings
    assert hub.num_requests == num_requests
    assert pretrained_folder(spec.settings).name == commit_id(hub.models["acme/tiny"]["main"])
    assert hub.fetched["acme/tiny/model.safetensors"] == 2


def test_only_the_shards_of_the_index_are_downloaded(hub: Hub) -> None:
    split_into_shards(hub.models["acme/tiny"]["main"])
    read_encoder_config(find_folder("acme/tiny"))
    assert hub.fetched == {f"acme/tiny/{file}": 1 for file in (*FILES[:3], *SHARDS)}


@pytest.mark.parametrize(
    ("name", "revision", "sentence"),
    [
        ("acme/none", None, "acme/none is neither a folder here nor a public model of http"),
        ("acme/tiny", "v9", "`pretrained_revision` is v9, which acme/tiny "),
        ("acme/gated", None, "acme/gated is gated. Accept its terms at http.*/acme/gated, and log"),
        ("acme/pickle", None, "has no model.safetensors. Download it. If there is only a"),
        ("acme/llama", None, "`model_type` in .* is llama"),
        ("folder/of/mine", None, "a model of the hub as OWNER/NAME, but folder/of/mine is neither"),
        (".", "main", "`pretrained_revision` is of a model of the hub, but . is a folder"),
    ],
)
def test_model_that_cannot_be_had_is_one_sentence(
    name: str, revision: str | None, sentence: str, hub: Hub, tmp_path: Path
) -> None:
    hub.gated = "acme/gated"
    for folder in ("gated", "pickle", "llama"):
        hub.models[f"acme/{folder}"] = {"main": make_folder(tmp_path / folder)}
    (tmp_path / "pickle/model.safetensors").rename(tmp_path / "pickle" / OTHERS[0])
    (tmp_path / "llama/config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(SbkitError, match=sentence):
        find_folder(name, revision)
    assert not [file for file in hub.fetched if not file.endswith(".json")]


def test_hub_out_of_reach_is_one_sentence(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(SbkitError, match=r"from http://127.0.0.1:9 \(.*\). Check the connection"):
        find_folder("acme/tiny")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(SbkitError, match="HF_HUB_OFFLINE forbids downloading acme/tiny"):
        find_folder("acme/tiny")


@pytest.mark.slow
@pytest.mark.ddp
def test_ranks_download_each_file_once_through_a_proxy_and_name_the_commit(
    hub: Hub, workplace: Workplace, tmp_path: Path
) -> None:
    """Fresh processes, since `huggingface_hub` reads its variables when it is imported."""
    run, commit = tmp_path / "run", commit_id(hub.models["acme/tiny"]["main"])
    small = ("--device=cpu", "--batch_seconds=6", "--number_of_epochs=1", "--check=False")
    more = ("--average_checkpoints=1", "--mask_channel_length=4")
    more += ("--word_lm_order=0", "--token_lm_order=0")
    words = workplace.arguments(run, "--pretrained=acme/tiny", *more, yaml=str(YAML), tiny=small)
    variables = {"HF_HOME": str(tmp_path / "home"), "SBKIT_CACHE": str(workplace.cache)}
    proxy = {"HF_ENDPOINT": "http://hub.invalid", "http_proxy": hub.url, "no_proxy": ""}
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "train.py"]
    process = subprocess.run(
        [sys.executable, *torchrun, *words],
        env={**os.environ, **variables, **proxy},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    assert f"pretrained acme/tiny, commit {commit}, in the cache (0." in process.stdout
    assert hub.fetched == {f"acme/tiny/{file}": 1 for file in FILES}
    values = read_json(run / "run_config.json")["values"]
    assert values["encoder_config"]["source"]["revision"] == commit

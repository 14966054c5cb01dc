"""Whisper, trained whole by hparams/whisper.yaml: checked, stopped, resumed, and transcribing."""

import os
import shutil
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch

from sbkit.export.recognizer_texts import respell
from sbkit.run.run import Run
from sbkit.runtime.runtimes import load_bundle
from sbkit.text.decoder_tokenizer import DECODER_TOKENIZER_FILE
from sbkit.train.setup import load_initial_weights
from tests.models.pretrained.recognizers import make_whisper
from tests.runs import ROOT, Workplace, last_parameters, read_json, stopped_after

YAML = ROOT / "hparams/whisper.yaml"
SMALL = (
    *("--device=cpu", "--check=False", "--batch_seconds=6", "--number_of_epochs=2"),
    *("--log_every=1", "--lr=0.01", "--average_checkpoints=1", "--dropout=0.1"),
)


@pytest.mark.slow
def test_run_resumes_without_the_folder_and_its_bundle_transcribes(
    workplace: Workplace, tmp_path: Path
) -> None:
    folder = tmp_path / "whisper"
    make_whisper(folder, seconds=30, max_tokens=120)
    options = {"yaml": str(YAML), "tiny": (*SMALL, f"--pretrained={folder}")}
    assert workplace.sbkit("check", *workplace.arguments(tmp_path / "whole", **options)) == 0
    assert workplace.train_here(tmp_path / "whole", **options) == 0
    with stopped_after(5):
        workplace.train_here(tmp_path / "run", **options)
    shutil.rmtree(folder)
    assert workplace.train_here(tmp_path / "run", **options) == 0
    expected = last_parameters(tmp_path / "whole")
    for name, value in last_parameters(tmp_path / "run").items():
        assert torch.equal(value, expected[name]), name

    summary = read_json(tmp_path / "run/summary.json")["test"]["test"]
    assert summary["decoder"] == "beam" and summary["greedy"]["utterances"] == 4
    bundle = load_bundle(tmp_path / "run")
    assert (tmp_path / "run/bundle" / DECODER_TOKENIZER_FILE).is_file()
    greedy = bundle.with_decoder("greedy")
    noise = np.random.default_rng(0).normal(0, 1000, 40 * 16_000).astype(np.int16)
    generate = bundle.model.generate
    with patch.object(bundle.model, "generate", side_effect=generate) as calls:
        greedy.recognize([noise])
    frames = [len(call.args[0]) for call in calls.call_args_list]
    assert len(frames) > 1 and max(frames) < 1520  # 40 s are cut; a clip has a tail
    network, clip = bundle.model.network, noise[:16_000]
    written = network.generate(
        *network.encode(torch.from_numpy(clip[None]), torch.tensor([16_000]))
    )
    text = bundle.decoder_tokenizer.decode(written[0])
    assert greedy.transcribe([clip]) == [respell(bundle, text)] != [""]

    other = {
        "text": {"case": "keep", "punctuation": ["."]},
        "init_from_differs": "text",
    }
    start = {"init_from": str(tmp_path / "run"), "data_folder": str(workplace.release), **other}
    with patch.dict(os.environ, {"SBKIT_CACHE": str(workplace.cache)}):
        prepared = Run(YAML, {**start, "output_folder": str(tmp_path / "next")}).prepare()
        batch = next(iter(prepared.loaders.train))
    tokens = batch.decoder_tokens[0, : batch.decoder_token_lengths[0]].tolist()
    assert prepared.hparams["decoder_tokenizer"].decode(tokens) == batch.texts[0]
    lines = "\n".join(load_initial_weights(prepared))
    assert "init_from: 0 tensors" in lines and "by label: ctc_lin.weight" in lines

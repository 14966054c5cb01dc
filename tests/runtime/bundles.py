"""Make run folders and bundles of tiny models without training, and edit bundles."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save

from recipes.asr.brain import AsrBrain
from sbkit.base.checksums import write_checksums
from sbkit.checkpoint.folder import TASK
from sbkit.checkpoint.ranking import NORMALIZER, PARTS
from sbkit.checkpoint.run_config import describe_spec, write_description
from sbkit.config.hparams import load_hparams, read_spec
from sbkit.export import format_table
from sbkit.export.export import export_run
from sbkit.tasks.asr.task import AsrTask
from sbkit.text.normalization import table_to_store, text_table
from tests.decoding.spoken import char_tokenizer
from tests.runs import TINY_CODEC, TINY_VAD, TINY_VOICE, Workplace

ROOT = Path(__file__).parents[2]
WITHOUT_DATA = {"data_folder": "/nowhere"}  # so formats are compared on noise only
SIZES: dict[str, object] = {
    "cnn_channels": 8,
    "d_model": 16,
    "nhead": 2,
    "d_ffn": 16,
    "num_encoder_layers": 1,
    "num_decoder_layers": 1,
    "average_checkpoints": 2,
}


def make_run(
    folder: Path,
    yaml: Path = ROOT / "hparams" / "ctc.yaml",
    change: Callable[[Any], Any] = lambda hparams: None,
    **settings: object,
) -> Path:
    """Save a model with its initial weights as training would; ``change`` edits it first."""
    folder.mkdir(parents=True, exist_ok=True)
    file = char_tokenizer(folder, ["hello there", "a quick brown fox"]).model_file
    defaults = read_spec(yaml).settings
    sizes = {name: value for name, value in SIZES.items() if name in defaults}
    overrides = {**sizes, "output_folder": str(folder), **settings}
    torch.manual_seed(0)
    hparams = load_hparams(yaml, overrides)
    change(hparams)
    checkpointer = hparams["checkpointer"]
    checkpointer.meta = {NORMALIZER: table_to_store(text_table("en")), TASK: AsrTask().name}
    names = (*AsrBrain.parts, *AsrBrain.optional_parts)
    checkpointer.meta[PARTS] = [name for name in names if hparams.get(name) is not None]
    spec = read_spec(yaml, overrides)
    write_description(folder, describe_spec(spec, label_files={file.name: file.read_bytes()}))
    (folder / "hyperparams.yaml").write_text(spec.one_file)
    checkpointer.save_checkpoint(meta={"epoch": 1, "CER": 50.0, "WER": 90.0})
    return folder


def make_bundle(folder: Path, **settings: object) -> Path:
    export_run(make_run(folder / "run", **settings), folder / "bundle")
    return folder / "bundle"


def make_live_run(folder: Path, **settings: object) -> Path:
    """Save a streaming model whose transcripts are not empty."""
    yaml = ROOT / "hparams/ctc_streaming.yaml"
    return make_run(folder, yaml, louder, num_decoder_layers=0, **settings)


def louder(hparams: Any) -> None:
    """Scale up the weights: the transcripts of a new model are empty.

    Special tokens stay improbable, because sherpa-onnx writes their names.
    """
    with torch.no_grad():
        hparams["ctc_lin"].weight.mul_(30)
        hparams["ctc_lin"].bias[1:4] = -100


def export_all(folder: Path) -> None:
    """Make a run whose transcripts are not empty, and export all formats but transformers'.

    The exporter compares them on the test sets, too.
    """
    formats = [name for name, form in format_table.FORMATS.items() if not form.library]
    run = make_run(folder / "run", change=louder)
    export_run(run, folder / "tiny", formats=formats)


def export_streaming(folder: Path) -> None:
    """Make a streaming run whose transcripts are not empty, and export it with its ONNX.

    Its frames are 80 ms long, because those of 40 ms are exported by `export_all`. It has two
    blocks, because the state of the second one is computed from the output of the first.
    """
    sizes = {"subsampling": 8, "num_encoder_layers": 2, "kernel_size": 5}
    run = make_live_run(folder / "run", **sizes, **WITHOUT_DATA)
    export_run(run, folder / "tiny", formats=["onnx"])


def export_tasks(workplace: Workplace, folder: Path) -> None:
    """Train a tiny model of each task but recognition; export it, with ONNX."""
    options = {"codec": TINY_CODEC, "tts": TINY_VOICE, "vad": TINY_VAD}
    for name, tiny in options.items():
        run = folder.parent / f"run_of_{name}"
        assert workplace.train_here(run, yaml=f"hparams/{name}.yaml", tiny=tiny) == 0
        export_run(run, folder / name, formats=["onnx"])


def parity_report(bundle: Path, name: str) -> dict[str, Any]:
    """Read the parity reports of a format, by precision."""
    content = json.loads((bundle / name / "parity.json").read_text())
    reports: dict[str, Any] = content["compared_with_the_trained_model"]
    return reports


def edit_config(bundle: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change config.json, and its checksum with it."""
    file = bundle / "config.json"
    config = json.loads(file.read_text())
    changed = change(config)
    file.write_text(json.dumps(config if changed is None else changed))
    write_checksums(bundle)


def edit_weights(bundle: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Change the weights, and their checksum with them."""
    file = bundle / "model.safetensors"
    weights = load(file.read_bytes())
    changed = change(weights)
    file.write_bytes(save(weights if changed is None else changed))
    write_checksums(bundle)

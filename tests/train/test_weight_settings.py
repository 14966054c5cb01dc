"""`init_from` names settings that change what weights mean without changing a shape."""

import re
from pathlib import Path

import pytest

from sbkit.base.errors import ConfigError
from sbkit.config.hparams import resolve, save_yaml
from sbkit.config.overrides import parse_overrides
from sbkit.tasks.recognition.task import Recognition
from sbkit.tasks.synthesis.task import Synthesis
from sbkit.train.initialize import check_same_meaning, settings_of_yaml
from tests.runs import ROOT


def compare(folder: Path, name: str, *overrides: str, loaded: str = "Transformer.x") -> list[str]:
    """Compare a YAML as it is with the same under overrides."""
    yaml_file = ROOT / f"hparams/{name}.yaml"
    save_yaml(folder / "hyperparams.yaml", yaml_file, {})
    ours = settings_of_yaml(resolve(yaml_file, parse_overrides(overrides)).tree)
    task = Synthesis() if name == "tts" else Recognition()
    return check_same_meaning(
        folder, ours, task, ["CNN.x", "ctc_lin.x", "seq_lin.x", loaded], [loaded]
    )


@pytest.mark.parametrize(
    ("name", "override", "difference"),
    [
        ("ctc", "--sample_rate=8000", "`sample_rate` is 16000 there and 8000 here"),
        ("ctc", "--level=none", "`compute_features.level` is utterance there and none here"),
        ("ctc_streaming", "--streaming.left_ms=640", "left_ms` is 2560 there and 640 here"),
        ("ctc_speechbrain", "--Transformer.causal=True", "`Transformer.causal` is false there"),
        ("ctc_speechbrain", "--Transformer.attention_type=RoPEMHA", "is RelPosMHAXL there and Ro"),
        ("tts", "--hop=160", "`compute_features.hop` is 200 there and 160 here"),
    ],
)
def test_difference_that_is_not_declared_is_an_error(
    tmp_path: Path, name: str, override: str, difference: str
) -> None:
    setting = re.findall(r"(\w+)=", override)[0]
    with pytest.raises(ConfigError, match=rf"{re.escape(difference)}.*_differs: \[{setting}\]"):
        compare(tmp_path, name, override)
    (line,) = compare(tmp_path, name, override, f"--init_from_differs=[{setting}]")
    assert difference in line


@pytest.mark.parametrize(
    "override",
    [
        *("--dropout=0.5", "--gradient_checkpointing=True", "--time_masks=9", "--lr=0.1"),
        # Sizes change names or shapes of tensors, which are listed.
        *("--num_encoder_layers=3", "--d_ffn=96", "--kernel_size=31"),
        # Of parts that are not loaded.
        *("--subsampling=8", "--CNN.normalize.n_mels=40", "--text.case=keep"),
    ],
)
def test_other_settings_may_differ(tmp_path: Path, override: str) -> None:
    assert compare(tmp_path, "ctc", override) == []


def test_text_table_counts_where_outputs_are_loaded(tmp_path: Path) -> None:
    for override, name in (("--text.case=keep", "case"), ("--language=ru", "language")):
        with pytest.raises(ConfigError, match=rf"_differs: \[{name}\]"):
            compare(tmp_path, "ctc", override, loaded="ctc_lin.x")


@pytest.mark.parametrize(
    ("theirs", "ours", "line"),
    [
        ("sbkit.audio.fbank.Fbank {level: none}", "sbkit.audio.fbank.Fbank {n_mels: 80}", None),
        ("torch.nn.Linear [4, 4]", "torch.nn.Linear {in_features: 4, out_features: 4}", None),
        (
            "torch.nn.RNN {input_size: 4, hidden_size: 4, nonlinearity: relu}",
            "torch.nn.RNN {input_size: 4, hidden_size: 4, nonlinearity: tanh}",
            "`Transformer.nonlinearity` is relu there and tanh here",
        ),
        (
            "torch.nn.Sequential [!new:torch.nn.GELU {}]",
            "torch.nn.Sequential [!new:torch.nn.ReLU {}]",
            "`Transformer` is torch.nn.modules.activation.GELU there and torch.nn.modules.activ",
        ),
    ],
)
def test_parts_are_compared_as_they_are_built(
    tmp_path: Path, theirs: str, ours: str, line: str | None
) -> None:
    for name, part in (("hyperparams", theirs), ("ours", ours)):
        yaml = f"Transformer: !new:{part}\ninit_from_differs: Transformer\n"
        (tmp_path / f"{name}.yaml").write_text(yaml)
    settings = settings_of_yaml(resolve(tmp_path / "ours.yaml", {}).tree)
    (note,) = check_same_meaning(tmp_path, settings, Recognition(), [], ["Transformer.x"])
    assert (line or "`Transformer` does not differ") in note

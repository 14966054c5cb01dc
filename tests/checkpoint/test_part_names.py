"""Parts are found however a YAML gives them to the ModuleList."""

from pathlib import Path

import pytest

from sbkit.checkpoint.weights import part_names_in
from sbkit.config.document import read_document
from sbkit.export.export import plain_parts
from sbkit.tasks.speech_recognition import SPEECH_RECOGNITION

PARTS = """
compute_features: !new:sbkit.audio.fbank.Fbank
CNN: &cnn !new:torch.nn.Linear [80, 4]
Transformer: &transformer !new:torch.nn.Identity
ctc_lin: &ctc_lin !new:torch.nn.Linear [4, 9]
"""


@pytest.mark.parametrize(
    "listed", ["- [*cnn, *transformer, *ctc_lin]", "  modules: [*cnn, *transformer, *ctc_lin]"]
)
def test_by_place_or_by_name_and_also_without_arguments(listed: str, tmp_path: Path) -> None:
    file = tmp_path / "resolved.yaml"
    file.write_text(f"{PARTS}\nmodel: !new:torch.nn.ModuleList\n{listed}\n")
    root = read_document(file).root
    assert part_names_in(root) == ["CNN", "Transformer", "ctc_lin"]
    plain = plain_parts(root, {}, SPEECH_RECOGNITION)
    assert plain["model"] == ["CNN", "Transformer", "ctc_lin"]
    assert plain["parts"]["Transformer"] == {
        "new": "torch.nn.modules.linear.Identity",
        "arguments": {},
    }

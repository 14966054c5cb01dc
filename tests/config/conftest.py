"""A YAML with every kind of value, for the tests of its overrides and its objects."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from sbkit.base.errors import ConfigError
from sbkit.config.hparams import load_hparams

YAML = """\
seed: 3407
lr: 1e-3
batch_seconds: 60.0  # seconds
language: en
precision: fp32
mixed: false
augment:
  speeds: [0.9, 1.0]
  masks: {time: 2}
double: !ref <batch_seconds> * 2
output_folder: !ref results/<seed>
betas: (0.9, 0.98)
sizes: !tuple (3, 4)
limit: null
names: [b]
snr_db: [5, 30]
free: {}
freeze: {CNN: always}
third: !ref <ratio[numerator]>

ratio: !new:fractions.Fraction
  numerator: 3
  denominator: !ref <seed>
also: !ref <ratio>
bare: !new:collections.Counter
many: !new:collections.deque [[1, 2]]
later: !name:collections.Counter
  step: 1
modules:
  ratio: !ref <ratio>
__hidden: !apply:os.getcwd
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "ctc.yaml"
    file.write_text(YAML)
    return file


def refusal(path: Path, overrides: Mapping[str, object]) -> str:
    """Return the error of a YAML that must not be built."""
    with pytest.raises(ConfigError) as caught:
        load_hparams(path, overrides)
    return str(caught.value)

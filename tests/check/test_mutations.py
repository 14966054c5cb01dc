"""One thing broken at a time: `sbkit check` names that and nothing else."""

from pathlib import Path

import pytest

from tests.check.harness import CHECKS, Mutation, assert_found, findings_of
from tests.check.mutations import data, exported, model, settings
from tests.runs import Workplace

MUTATIONS = [*data.MUTATIONS, *exported.MUTATIONS, *model.MUTATIONS, *settings.MUTATIONS]
SPEECHBRAIN_FBANK = (
    (
        "!new:sbkit.audio.fbank.Fbank\n    n_mels: !ref <n_mels>\n    sample_rate: "
        "!ref <sample_rate>",
        "!new:sbkit.models.speechbrain_parts.SpeechBrainLayers\n    subsampling: 160\n"
        "    offset: 160\n    fbank: !new:speechbrain.lobes.features.Fbank\n"
        "        n_mels: !ref <n_mels>\n        sample_rate: !ref <sample_rate>",
    ),
    ("    level: !ref <level>\n", ""),
    ("level: utterance", "# level: utterance"),
)
LONG_FRAMES = ("--subsampling=8", "--token_type=bpe", "--vocab_size=80")
HEALTHY = [
    Mutation(name="healthy", checks=CHECKS),
    Mutation(name="healthy BPE", options=("--token_type=bpe", "--vocab_size=50")),
    Mutation(name="healthy Transformer", options=("--encoder_module=transformer",)),
    Mutation(name="healthy with another Fbank", text=SPEECHBRAIN_FBANK),
    Mutation(name="healthy 80 ms", yaml="hparams/ctc_streaming.yaml", options=LONG_FRAMES),
]

FIRST_OF_CHECK = {m.expected[0].check: m.name for m in MUTATIONS[::-1] if m.expected}
QUICK = {*FIRST_OF_CHECK.values()}  # the others take minutes together
PARAMETERS = [
    pytest.param(mutation, marks=[pytest.mark.slow] * (mutation.name not in QUICK))
    for mutation in (*HEALTHY, *MUTATIONS)
]


@pytest.mark.filterwarnings("ignore:Support for mismatched:UserWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch 2.14's
@pytest.mark.parametrize("mutation", PARAMETERS, ids=lambda mutation: mutation.name)
def test_check_names_the_fault(mutation: Mutation, workplace: Workplace, tmp_path: Path) -> None:
    findings = findings_of(mutation, workplace, tmp_path)
    assert_found(mutation, findings, tmp_path / "mutated.yaml")

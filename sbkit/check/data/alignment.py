"""Whether CTC can align every transcript: a frame for each label, one more between two equal ones.

The loss gives no weight to an utterance that has none, so training alone would not show it.
"""

from collections.abc import Iterator

from sbkit.base.units import samples_to_seconds
from sbkit.check.data.utterances import TRAIN, about, transcripts_of
from sbkit.check.finding import Finding
from sbkit.check.model.dry_run import dry_run
from sbkit.check.planned_run import PlannedRun
from sbkit.data.batches.sampler import fastest_percent
from sbkit.models.encoder import measure_subsampling

MANY = 0.05  # of all utterances; with more, training is not started


def check_alignment(planned: PlannedRun) -> Iterator[Finding]:
    """Find the utterances with fewer frames than labels."""
    transcripts = transcripts_of(planned)
    if dry_run(planned).broken:
        return  # there may be no frames to count
    subsampling = measure_subsampling(planned.hparams)
    fastest = fastest_percent(planned.knobs.get("speeds") or [1.0])
    lacking = {
        name: each.lacking(subsampling, fastest if name == TRAIN else 100)
        for name, each in transcripts.items()
    }
    many = sum(map(len, lacking.values())) > MANY * sum(len(t.labels) for t in transcripts.values())
    only_fast = not any(len(each.lacking(subsampling)) for each in transcripts.values())
    milliseconds = 1000 * samples_to_seconds(subsampling.stride, planned.knobs["sample_rate"])
    yield from about(
        planned,
        "alignment",
        "speeds" if only_fast else "data_folder",
        lacking,
        declared=f"every utterance must have a frame of {milliseconds:g} ms for each label, for "
        "CTC to align it",
        fix="Lower the fastest of `speeds`."
        if only_fast
        else "See whether each transcript belongs to its clip; where most do, pass "
        "--token_type=bpe, whose tokens are longer than characters, or let the encoder keep more "
        "frames. They are left out of training, and count as errors elsewhere.",
        stops=many,
    )

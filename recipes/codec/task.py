"""The task of a codec: audio to codes and back. It imports no torch, which ONNX does without."""

from collections.abc import Mapping, Sequence
from typing import Any

from recipes.codec.codec import decode_file, encode_file
from recipes.codec.statistics import METRICS, CodedUtterance, describe, measure, report
from sbkit.audio.io import Samples
from sbkit.tasks.task import Graph, Scorer, Task


def score_rows(
    bundle: Any, rows: Sequence[Mapping[str, Any]], clips: list[Samples], **_: Any
) -> list[CodedUtterance]:
    """Code the clips of rows by a bundle's model in torch."""
    from recipes.codec import brain

    return brain.score_rows(bundle, rows, clips)


CODEC = Task(
    name="recipes.codec.task.CODEC",
    model_name="codec",
    model_class="recipes.codec.parts.CodecModel",
    metrics=METRICS,
    commands=("encode", "decode"),
    runs={"encode": encode_file, "decode": decode_file},
    graphs={
        "encode": Graph(
            inputs=("audio", "audio_lengths"),
            outputs=("codes", "frame_lengths"),
            arguments=lambda run, audio, lengths: (audio, lengths),
        ),
        "decode": Graph(
            inputs=("codes",),
            outputs=("audio",),
            arguments=lambda run, audio, lengths: run("encode", audio, lengths)[:1],
        ),
    },
    scorer=Scorer(
        target="audio", score=score_rows, measure=measure, describe=describe, report=report
    ),
)

"""The task of a codec: audio to codes and back. It imports no torch, which ONNX does without."""

from sbkit.logs.metric import Metric, Metrics
from sbkit.tasks.task import Graph, Task

METRICS: Metrics = {
    "mel_distance": Metric(is_fraction=False),
    "usage": Metric(lower_is_better=False),
}


CODEC = Task(
    name="sbkit.tasks.codec.CODEC",
    model_name="codec",
    model_class="sbkit.models.codec.CodecModel",
    training_parts=("discriminator",),
    metrics=METRICS,
    commands=("encode", "decode"),
    runs={
        "encode": "sbkit.runtime.codec.encode_file",
        "decode": "sbkit.runtime.codec.decode_file",
    },
    uses={
        "onnx": "onnxruntime: `encode.onnx` makes `codes` and `frame_lengths` of `audio` (B, S) "
        "float32 between -1 and 1 and `audio_lengths` (B,) int64, `decode.onnx` audio of codes. "
        "`sbkit decode` checks every code first.",
    },
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
)

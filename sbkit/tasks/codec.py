"""The task of a codec: audio to codes and back. This module does not import torch."""

from sbkit.tasks.codec_results import METRICS, describe_codes, measure_codes, report_codes
from sbkit.tasks.task import Command, Exportable, Graph, Scorer, Task

CODEC = Task(
    name="sbkit.tasks.codec.CODEC",
    model_name="codec",
    metrics=METRICS,
    scorer=Scorer(measure=measure_codes, describe=describe_codes, report=report_codes),
    export=Exportable(
        model_class="sbkit.models.codec.CodecModel",
        training_parts=("discriminator",),
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
        uses={
            "onnx": "onnxruntime: `encode.onnx` takes `audio` (B, S), float32 between -1 and 1, "
            "and `audio_lengths` (B,), int64, and returns `codes` and `frame_lengths`; "
            "`decode.onnx` turns codes into audio. `sbkit decode` checks every code first.",
        },
    ),
    commands={
        "encode": Command(
            run="sbkit.runtime.codec.encode_file", example="talk.wav --out talk.codes"
        ),
        "decode": Command(
            run="sbkit.runtime.codec.decode_file", example="talk.codes --out talk.wav"
        ),
    },
)

"""The formats of a bundle: a table of their writers and uses."""

from collections.abc import Mapping
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

from sbkit.base.machine import ONNX
from sbkit.bundle.task import Prediction, Task


@dataclass(frozen=True, kw_only=True)
class Format:
    """A form of a model, in a folder of a bundle.

    writer: `module:function`, which takes a bundle in torch and the folder, and returns Candidates.
    use: how to load it, for the model card; the `format_uses` of a task replace it.
    packages: the packages whose versions its parity report records.
    predicts: what its models predict. has_graphs: also supports tasks with graphs.
    library: loads the folder without sbkit; the folder then has a model card of its own.
    """

    writer: str
    use: str
    packages: tuple[str, ...]
    predicts: tuple[Prediction, ...] = ("text",)
    has_graphs: bool = False
    library: str | None = None

    def supports(self, task: Task) -> bool:
        if task.side_fields:  # no caller of a format would pass what they are made from
            return False
        if self.has_graphs and task.graphs:
            return True
        is_framewise = task.decodes_frames or task.predicts != "text"
        return task.predicts in self.predicts and is_framewise

    def write(self, *arguments: Any) -> Any:
        return resolve_name(self.writer)(*arguments)


FORMATS: Mapping[str, Format] = {  # by the name of the folder
    ONNX: Format(
        writer="sbkit.export.onnx_format:write_onnx",
        use="onnxruntime: `audio` (B, S), float32 between -1 and 1, and `audio_lengths` (B,), "
        "int64, give `log_probs` (B, U, V) of the tokens in `tokens.txt`, and `frame_lengths`. A "
        "Whisper with its decoder also gives `states`, the input of `decoder_frames.onnx`; "
        "`decoder.onnx` takes the outputs of that graph and tokens.",
        packages=("onnx", "onnxscript", "onnxruntime"),
        predicts=("text", "speech"),
        has_graphs=True,
    ),
    "sherpa-onnx": Format(
        writer="sbkit.export.sherpa_format:write_sherpa",
        use='`OfflineRecognizer.from_fire_red_asr_ctc(model="model.onnx", tokens="tokens.txt")` '
        "computes the features that the model was trained with.",
        packages=("onnx", "onnxscript", "onnxruntime", "sherpa-onnx"),
    ),
    "huggingface": Format(
        writer="sbkit.export.huggingface_format:write_huggingface",
        use='`transformers.pipeline("automatic-speech-recognition", model=FOLDER)`, without '
        "sbkit: append 0.2 s of zeros to each clip, but not for an encoder that transformers runs "
        "in sbkit, too (w2v-BERT, Parakeet). Whisper's encoder needs "
        "`trust_remote_code=True`, which runs `whisper_ctc.py`, and `chunk_length_s=20` for clips "
        "of more than 30 s. A Whisper with its decoder needs neither code nor zeros: transformers "
        "fills each clip to 30 s, so it writes what sbkit does if the model was trained with "
        "`context_seconds: 30`, and may write other words if not; longer clips need "
        "`chunk_length_s=30`.",
        packages=("transformers",),
        library="transformers",
    ),
}

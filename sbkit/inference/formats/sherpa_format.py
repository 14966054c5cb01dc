"""The folder that sherpa-onnx's offline CTC recognizers load, on servers, phones and in browsers.

It computes features itself, by settings that follow from the model type. Ours are Kaldi's: whole
windows, filters up to half the sample rate, the scale of int16. So has `fire-red-asr-2-ctc`;
`wenet_ctc` and `zipformer2_ctc` have filters up to 7600 Hz and windows that begin 120 samples
before ours, which cannot be undone in the graph, and the latter another scale, which can. All
three are written, and the certificate says what each makes of the held-out clips. Where the
bundle's decoder is a word graph, so is `HLG.fst`, for any of them (`--ctc-graph`). A special token
(<unk>), which leaves no trace in a text of sbkit, is written by its name where one is heard.
"""

import math
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sbkit.audio.fbank import Fbank
from sbkit.audio.io import FULL_SCALE
from sbkit.base.errors import SbkitError
from sbkit.base.process import require_package
from sbkit.base.units import SAMPLE_RATE, shift_samples
from sbkit.decoding.word_graph import MOST_ACTIVE, GraphSearch
from sbkit.inference.bundle.bundle import Bundle
from sbkit.inference.formats.candidate import EXACT, WORD_ERROR_RATE, Candidate, Limits
from sbkit.inference.formats.onnx_format import make_onnx, save_onnx
from sbkit.inference.formats.traced import EXAMPLE, FeatureModel, Source, trace
from sbkit.inference.runtime.onnx_runtime import Counts, Floats, LogProbs, OnnxModel
from sbkit.models.asr import AsrModel
from sbkit.text.tokenizer import Tokenizer

TOKENS, GRAPH = "tokens.txt", "HLG.fst"
BLANK = "<blk>"  # the name by which it is looked for
N_MELS = 80  # features of all three model types
# By model type: its file, and the method of sherpa_onnx.OfflineRecognizer that loads it.
MODEL_TYPES = {
    "fire-red-asr-2-ctc": ("model.onnx", "from_fire_red_asr_ctc"),
    "wenet_ctc": ("model.wenet_ctc.onnx", "from_wenet_ctc"),
    "zipformer2_ctc": ("model.zipformer2_ctc.onnx", "from_zipformer_ctc"),
}
SAME_FEATURES = "fire-red-asr-2-ctc"
SCALED = "zipformer2_ctc"  # its features are of audio between -1 and 1
TO_INT16 = 2 * math.log(FULL_SCALE)  # what the scale adds to the logarithm of a power


def write_sherpa(source: Source, folder: Path) -> Sequence[Candidate]:
    """Write a model of each type, and the tokens.

    Raises SbkitError for a model of other features than 80 log-mel bins of 16 kHz.
    """
    sherpa = require_package("sherpa_onnx", extra="export")
    bundle = source.bundle
    _require_features(bundle)
    tokenizer = bundle.tokenizer
    (folder / TOKENS).write_text(_tokens(tokenizer), encoding="utf-8")
    frames = 100 * EXAMPLE
    lengths = torch.tensor([frames, frames - 20, frames // 2])
    program = trace(
        FeatureModel(bundle.model.network), torch.zeros(EXAMPLE, frames, N_MELS), lengths
    )
    factor = bundle.model.samples_per_frame // shift_samples(SAMPLE_RATE)
    graph = make_onnx(program, ["x", "x_lens"], ["log_probs", "log_probs_lens"])
    candidates = []
    for model_type, (file, method) in MODEL_TYPES.items():
        offset = TO_INT16 if model_type == SCALED else 0.0
        scaled = _add_to_input(graph, offset) if offset else graph
        save_onnx(scaled, folder / file, _metadata(model_type, tokenizer.vocab_size, factor))
        load = getattr(sherpa.OfflineRecognizer, method)
        recognizer = load(model=str(folder / file), tokens=str(folder / TOKENS))
        session = OnnxModel((folder / file).read_bytes())
        candidates.append(
            Candidate(
                name=model_type,
                files=(file,),
                limits=_limits(model_type),
                log_probs=partial(_log_probs, bundle.model.network, session, offset),
                transcribe=partial(_transcribe, recognizer),
            )
        )
    search = None if bundle.decoder is None else bundle.decoder.search
    if isinstance(search, GraphSearch):
        candidates.append(_write_graph(search, folder, of=candidates[0]))
    return candidates


def _write_graph(search: GraphSearch, folder: Path, *, of: Candidate) -> Candidate:
    """Write the graph beside the model that has our features."""
    search.graph.write(str(folder / GRAPH))
    return replace(
        of,
        name=f"{of.name}, {GRAPH}",
        files=(GRAPH,),
        transcribe=partial(_transcribe, load_with_graph(folder)),
        decoder="graph",
    )


def load_with_graph(folder: Path) -> Any:
    """Load the model that has our features with the graph, which no method of sherpa-onnx does."""
    made = require_package("sherpa_onnx", extra="export").offline_recognizer
    file = MODEL_TYPES[SAME_FEATURES][0]
    model = made.OfflineModelConfig(
        fire_red_asr_ctc=made.OfflineFireRedAsrCtcModelConfig(model=str(folder / file)),
        tokens=str(folder / TOKENS),
    )
    graph = made.OfflineCtcFstDecoderConfig(graph=str(folder / GRAPH), max_active=MOST_ACTIVE)
    return made._Recognizer(
        made.OfflineRecognizerConfig(model_config=model, ctc_fst_decoder_config=graph)
    )


def _limits(model_type: str) -> Limits:
    """Of its graph, given our features; of its own words where its features are ours."""
    same = model_type == SAME_FEATURES
    return replace(EXACT, word_error_rate=WORD_ERROR_RATE if same else None)


def _require_features(bundle: Bundle) -> None:
    features = bundle.config.parts.get("compute_features") or {}
    name, arguments = features.get("new"), features.get("arguments") or {}
    ours = name == f"{Fbank.__module__}.{Fbank.__qualname__}"
    mels = arguments.get("n_mels", N_MELS)
    if not ours or mels != N_MELS or bundle.config.sample_rate != SAMPLE_RATE:
        raise SbkitError(
            f"A model for sherpa-onnx must have sbkit's Fbank of {N_MELS} bins at {SAMPLE_RATE} "
            f"Hz, which sherpa-onnx computes itself, but has {name} of {mels} at "
            f"{bundle.config.sample_rate} Hz. Leave the format out."
        )


def _tokens(tokenizer: Tokenizer) -> str:
    names = dict(enumerate(tokenizer.pieces())) | {tokenizer.vocabulary.blank: BLANK}
    return "".join(f"{name} {label}\n" for label, name in names.items())


def _metadata(model_type: str, vocab_size: int, factor: int) -> dict[str, Any]:
    metadata = {
        "model_type": model_type,
        "vocab_size": vocab_size,
        "subsampling_factor": factor,
    }
    if model_type == SAME_FEATURES:  # it normalizes; our graph does so itself
        metadata |= {
            "cmvn_mean": ",".join(["0"] * N_MELS),
            "cmvn_inv_stddev": ",".join(["1"] * N_MELS),
        }
    return metadata


def _add_to_input(graph: Any, offset: float) -> Any:
    """Return a copy of a model that begins by adding a number to its first input."""
    onnx = require_package("onnx", extra="export")
    model = deepcopy(graph)
    name = model.graph.input[0].name
    for node in model.graph.node:
        for place, each in enumerate(node.input):
            if each == name:
                node.input[place] = f"{name}_scaled"
    number = onnx.numpy_helper.from_array(np.array(offset, np.float32), f"{name}_offset")
    model.graph.initializer.append(number)
    added = onnx.helper.make_node("Add", [name, number.name], [f"{name}_scaled"], name="scale")
    model.graph.node.insert(0, added)
    onnx.checker.check_model(model)
    return model


@torch.inference_mode()
def _log_probs(
    trained: AsrModel, model: OnnxModel, offset: float, audio: Floats, lengths: Counts
) -> LogProbs:
    """Run the graph with our own features, in the scale of its own."""
    compute = trained.encoder.features
    assert compute is not None
    features, frames = compute(torch.from_numpy(audio) * FULL_SCALE, torch.from_numpy(lengths))
    return model.log_probs((features - offset).numpy(), frames.numpy())


def _transcribe(recognizer: Any, clips: Sequence[Floats]) -> list[str]:
    texts = []
    for clip in clips:
        stream = recognizer.create_stream()
        stream.accept_waveform(SAMPLE_RATE, clip)
        recognizer.decode_stream(stream)
        texts.append(str(stream.result.text))
    return texts

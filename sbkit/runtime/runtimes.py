"""Load a bundle to run it with torch or onnxruntime, which are imported only then."""

from argparse import Namespace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, overload

from sbkit.base.arrays import Array
from sbkit.base.checksums import read_checksums
from sbkit.base.errors import BundleError, ConfigError, DeviceError
from sbkit.base.machine import ONNX, PRECISIONS, has_torch, warn_of_unused_gpu, why_no_cuda
from sbkit.bundle.bundle import Bundle, BundleContents, read_bundle
from sbkit.bundle.config import CONFIG_FILE, WEIGHTS_FILE, is_transformers_folder
from sbkit.bundle.task import Prediction
from sbkit.evaluate.run_results import BUNDLE_CONFIG
from sbkit.runtime.model_thread import (
    LoadedModel,
    ModelThread,
    ReopenedWhenUnpickled,
    StreamingUse,
    require_as_requested,
)
from sbkit.runtime.onnx_model import (
    ONNX_FOLDER,
    WEIGHTS_SHA256,
    OnnxGraphs,
    OnnxModel,
    OnnxStreamingModel,
)
from sbkit.runtime.onnx_whisper import OnnxDecoder

if TYPE_CHECKING:
    from sbkit.runtime.torch_model import TorchModel

COMPILE_MODES = ("default", "reduce-overhead")
AUTO, FIRST_GPU = "auto", "cuda:0"
warn_once = cache(warn_of_unused_gpu)  # a command may open several bundles


def model_options(options: Namespace) -> dict[str, Any]:
    """Return the parsed options of a command that `load_bundle` takes."""
    names = ("device", "runtime", "precision", "compile", "user_modules")
    return {name: getattr(options, name) for name in names}


@overload
def load_bundle(
    folder: Path | str, *, runtime: Literal["onnx"], **options: Any
) -> Bundle[OnnxModel]: ...
@overload
def load_bundle(
    folder: Path | str, *, runtime: Literal["torch"] = ..., **options: Any
) -> "Bundle[TorchModel]": ...
def load_bundle(
    folder: Path | str,
    *,
    runtime: str = "torch",
    device: object = "cpu",
    precision: str = "fp32",
    compile: str | None = None,
    streaming: StreamingUse = "no",
    user_modules: frozenset[str] = frozenset(),
    language: str | None = None,
    **task_options: Any,
) -> Bundle[Any]:
    """Load a bundle with its model, which runs exactly as requested, in the calling thread.

    folder: a bundle, a finished run, or a recognizer of transformers.
    runtime: torch or onnx.
    device: cpu, cuda, cuda:N or auto; or a torch.device.
    precision: fp32, bf16 or fp16 with torch, fp32 or int8 with onnx.
    compile: default or reduce-overhead; None to compile nothing.
    streaming: whether the model runs chunk by chunk: "no", "only", or "also" (if the bundle has a
        streaming model, which is a separate file in ONNX).
    user_modules: the user's modules that the bundle may import.
    language: the language that a recognizer of transformers writes; its texts are normalized by
        the text table of this language. Bundles store their language.
    task_options: those of the method `with_options` of the bundle, such as a recognizer's
        `decoder`, greedy or beam.

    >>> bundle = load_bundle("my-model")  # doctest: +SKIP
    >>> bundle.transcribe([read_audio("talk.mp3", bundle.config.sample_rate)])  # doctest: +SKIP
    ['hello there']
    """
    require_supported(runtime, precision, compile)
    folder = Path(folder).absolute()
    if not (folder / CONFIG_FILE).exists() and (folder / BUNDLE_CONFIG).exists():
        folder = (folder / BUNDLE_CONFIG).parent
    call = partial(
        load_bundle,
        folder,
        runtime=runtime,
        device=device,
        precision=precision,
        compile=compile,
        streaming=streaming,
        user_modules=user_modules,
        language=language,
        **task_options,
    )
    is_of_transformers = language is not None and is_transformers_folder(folder)
    if language is None or not is_of_transformers:
        contents = read_bundle(folder, with_weights=runtime == "torch", user_modules=user_modules)
        if language is not None:
            raise ConfigError(f"{folder} stores its language. Leave out `language`.")
    else:
        from sbkit.runtime.transformers_folder import read_transformers

        contents = read_transformers(folder, language)
        unsupported = {
            "The runtime onnx": runtime == ONNX,
            "`compile`": compile is not None,
            "Streaming": streaming == "only",
        }
        for name, is_requested in unsupported.items():
            if is_requested:
                raise ConfigError(f"{name} is not supported for models of transformers ({folder}).")
    unable = {f"The runtime {ONNX}": runtime == ONNX, "`compile`": compile is not None}
    unable |= {"Live speech": streaming == "only"}
    for name, is_requested in unable.items():
        if is_requested and contents.task.side_fields:
            field = next(iter(contents.task.side_fields))
            raise ConfigError(f"{name} cannot pass `{field}` to this model beside the audio.")
    if str(device).startswith("cuda") and (cause := why_no_cuda(runtime)):
        raise DeviceError(f"The device {device} needs a GPU that {runtime} can use, but {cause}.")
    model: LoadedModel
    if runtime == ONNX:
        model = _load_onnx(contents, folder, str(device), precision, streaming)
    else:
        from sbkit.distributed.device import resolve_placement
        from sbkit.runtime.torch_model import Compilation, CompiledModel, TorchModel

        chosen: Any = None if device == AUTO else device
        placement = resolve_placement(chosen, precision)
        options: dict[str, Any] = {"user_modules": user_modules, "placement": placement}
        if is_of_transformers:
            from sbkit.runtime.transformers_folder import load_transformers

            model = load_transformers(contents, folder, placement)
        elif compile is None:
            model = TorchModel.load(contents, folder, **options)
        else:
            if contents.task.predicts == "text":
                contents.task.require_frames("`compile`")
            options["compilation"] = Compilation(mode=compile, streaming=streaming)
            model = CompiledModel.load(contents, folder, **options)
    if device == AUTO and model.runs_on.device == "cpu":
        warn_once(runtime)
    return contents.with_model(model).with_options(**task_options).opened_by(call)


def load_in_thread(
    folder: Path | str, *, device: object = AUTO, **options: Any
) -> Bundle[ModelThread]:
    """Call `load_bundle` in a new thread of the model; `bundle.model.close()` ends the thread."""
    folder = Path(folder).absolute()
    loaded: list[Bundle[Any]] = []

    def load() -> LoadedModel:
        loaded.append(bundle := load_bundle(folder, device=device, **options))
        return bundle.model

    model = ModelThread(load)
    bundle = loaded.pop().with_model(model)
    return bundle.opened_by(partial(load_in_thread, folder, device=device, **options))


def require_supported(runtime: str, precision: str, compile: str | None) -> None:
    """Raise ConfigError for incompatible options, and DeviceError if torch is missing."""
    if runtime in PRECISIONS and precision not in PRECISIONS[runtime]:
        supported = "; ".join(f"{name}: {', '.join(names)}" for name, names in PRECISIONS.items())
        raise ConfigError(f"{precision} is not supported by the runtime {runtime} ({supported}).")
    if runtime not in ("torch", ONNX):
        raise ConfigError(f"The runtime must be torch or onnx, but is {runtime}.")
    if runtime == ONNX and compile is not None:
        raise ConfigError("The runtime onnx does not support `compile`. Leave it out.")
    if compile not in (None, *COMPILE_MODES):
        raise ConfigError(f"`compile` must be {' or '.join(COMPILE_MODES)}; got {compile}.")
    if runtime == "torch" and not has_torch():
        raise DeviceError("torch is not installed. Install it, or use the runtime onnx.")


def _load_onnx(
    contents: BundleContents, folder: Path, device: str, precision: str, streaming: StreamingUse
) -> OnnxModel | OnnxGraphs:
    task = contents.task
    graphs = task.graphs
    if not graphs and streaming != "only":
        task.require_prediction("text", command="transcribe")
        task.require_frames("The runtime onnx")
    if device == AUTO:
        device = "cpu" if why_no_cuda(ONNX) else FIRST_GPU
    device = FIRST_GPU if device == "cuda" else device
    options = {"device": device, "precision": precision}
    model: OnnxModel | OnnxGraphs
    decoder_graphs: list[OnnxModel | OnnxGraphs] = []
    if graphs:
        model = OnnxGraphs(graphs, folder, device=device)
    elif streaming == "only":
        model = OnnxStreamingModel.load(folder, **options)
    else:
        model = OnnxModel.load(folder, **options)
        if model.has_decoder:
            model.decoder = OnnxDecoder.load(folder, **options)
            decoder_graphs += model.decoder.graphs
        chunk_file = folder / ONNX_FOLDER / OnnxStreamingModel.files[precision]
        if streaming == "also" and chunk_file.exists():
            model.chunk_model = OnnxStreamingModel.load(folder, **options)
    for graph in (model, *decoder_graphs):
        if graph.metadata.get(WEIGHTS_SHA256) != read_checksums(folder).get(WEIGHTS_FILE):
            raise BundleError(f"The ONNX model in {folder} has other weights. Export it again.")
        require_as_requested(graph.runs_on, device=device, precision=precision)
    return model


class GraphRunner(ReopenedWhenUnpickled):
    """Run the graphs of an open bundle, such as a codec's `encode` and `decode`.

    command: the command of sbkit that runs the bundles.
    prediction: what the task of these bundles predicts.
    settings: the plain data that callers of the graphs need.
    """

    command: ClassVar[str]
    prediction: ClassVar[Prediction]

    def __new__(cls, folder: Path | str, **options: Any) -> Self:
        return super().__new__(cls, Path(folder).absolute(), **options)

    def __init__(self, folder: Path | str, **options: Any) -> None:
        """Open a bundle with the options of `load_bundle`, in its own thread."""
        self.bundle = load_in_thread(folder, **options)
        self.bundle.task.require_prediction(self.prediction, command=self.command)
        self._thread = self.bundle.model
        self.sample_rate = self.bundle.config.sample_rate
        self.runs_on = self._thread.runs_on
        self.settings: dict[str, Any] = self._thread.call(lambda model: model.settings)

    @classmethod
    def load(cls, folder: Path | str, **options: Any) -> Self:
        """Open a bundle, as the constructor does."""
        return cls(folder, **options)

    @classmethod
    def from_options(cls, options: Namespace) -> Self:
        """Open the bundle that the options of a command name."""
        return cls(options.bundle, **model_options(options))

    def run(self, graph: str, *arrays: Array) -> list[Array]:
        """Run a graph by its name: arrays in, arrays out."""
        outputs: list[Array] = self._thread.call(lambda model: model.run(graph, *arrays))
        return outputs

    def close(self) -> None:
        self._thread.close()

"""The check of the bundle that a run would end with: it holds the model, and computes the same.

    the YAML's description -> a network of new parts <- the Brain's weights
    one clip -> the Brain's validation | the bundle, as `transcribe` and the test run it -> compared

Legend: S samples, U frames, V vocabulary.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields, is_dataclass
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from sbkit.audio.io import FULL_SCALE
from sbkit.base.arrays import Float64s
from sbkit.base.errors import SbkitError
from sbkit.base.libraries import place_of
from sbkit.base.machine import ONNX
from sbkit.base.units import samples_to_seconds
from sbkit.bundle.bundle import Bundle, BundleContents
from sbkit.bundle.config import BundleConfig
from sbkit.bundle.side_inputs import SIDE_SHAPES
from sbkit.bundle.task import ClipBatch, load_task
from sbkit.check.checked_run import CheckedRun, Finding
from sbkit.check.dry_run import evaluation, example_loader, short_rows
from sbkit.checkpoint.ranking import PARTS
from sbkit.checkpoint.weights import check_same_model
from sbkit.data.batch import UtteranceDataset
from sbkit.data.shard import Row
from sbkit.export.export import bundle_weights, part_facts
from sbkit.export.formats import declared_formats
from sbkit.export.parity import noise_case
from sbkit.models.encoder import Predictions
from sbkit.runtime.model_thread import ModelThread
from sbkit.runtime.torch_model import TorchModel, assemble
from sbkit.tasks.asr.bundle import as_recognizer
from sbkit.train.brain import Brain
from sbkit.train.setup import user_modules_of

WEIGHT_NOISE = 0.01  # its deviation; most weights of a new model are within 0.1
# Of outputs, relative to the largest one. In all YAMLs of hparams/ and docs/examples, with and
# without adapters, they differ by up to 1.4e-6; weights rounded to int8 change them by 4e-3.
MAX_CHANGE = 1e-4
NUM_CHUNKS = 3.3  # of the clip whose chunks are compared; the last one is shorter
MIN_LARGEST = 1e-3  # of the values of an output; smaller ones are noise


def check_export(run: CheckedRun) -> Iterator[Finding]:
    """Find a model that a bundle cannot hold, or that computes something else in the Brain.

    The bundle's network is built as it is loaded, from the description of the parts, and gets the
    Brain's weights, with noise: weights that start at zero would hide what they multiply.
    """
    recipe, spec, labels = run.data.recipe, run.spec, run.data.labels
    try:
        modules = user_modules_of(spec)
        task = load_task(recipe.task.name, user_modules=modules)
        root = spec.tree
        objects = {} if task.label_file is None else {task.label_key: labels}
        names = getattr(run.brain.checkpointer, "meta", {}).get(PARTS, ())
        parts_config = part_facts(root, objects, task, names)
        rate = spec.settings["sample_rate"]
        shapes = getattr(run.brain.checkpointer, "meta", {}).get(SIDE_SHAPES, {})
        config = BundleConfig(
            task.name, rate, parts_config["model"], parts_config["parts"], side_shapes=shapes
        )
        contents = BundleContents(config=config, task=task, labels=labels)
        network, parts = assemble(contents, modules)
        _add_noise(run.model)
        weights = bundle_weights(run.model.state_dict(), root, task)
        check_same_model(weights, network.model.state_dict(), place=f"{spec.folder}/bundle")
        network.model.load_state_dict(weights)
        model = TorchModel(network, parts=parts, sample_rate=rate, side_shapes=shapes)
        bundle = contents.with_model(model)
        failures = [*_try_task(run, bundle)]
        yield from failures or [*_compare(run, bundle), *_compare_chunks(run, bundle)]
        yield from _trace(run, bundle)
    except SbkitError as error:
        problem = f"No bundle can hold the model. {error}".rstrip(".")
        stops = recipe.task.has_model or bool(spec.settings["export_formats"])
        yield run.finding(*(error.keys or ("model",)), problem=problem, stops=stops)


@torch.no_grad()
def _add_noise(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.add_(WEIGHT_NOISE * noise.to(parameter))


def _try_task(run: CheckedRun, bundle: Bundle[TorchModel]) -> Iterator[Finding]:
    """Find a `predict` or `result` of the task that fails, as the test or `transcribe` would."""
    task = bundle.task
    if not type(run.brain).metrics:
        return
    row = UtteranceDataset(run.data.splits.train)[0]
    batch = ClipBatch(clips=[row["audio"]], rows=[row], times=True)
    try:
        with ExitStack() as stack:
            if task.predicts == "text":  # `transcribe` and the server run the model in a thread
                model = ModelThread(lambda: bundle.model)
                stack.callback(model.close)
                (prediction,) = task.predict(bundle.with_model(model), batch)
            else:
                (prediction,) = task.predict(bundle, batch)
        task.result(prediction, row, config=bundle.config)
    except Exception as error:  # whatever a task of the user's raises
        fix = ""
        if ModelThread.__name__ in str(error):
            fix = (
                "`sbkit transcribe` and the server run a model in a thread of its own. Call "
                "`bundle.model.predict`; what a network takes beside audio is a side input "
                "(docs/guide/own-task.md)."
            )
        yield run.finding(
            "recipe",
            problem=f"`predict` or `result` of {task.name} fails for the clip {row['id']} "
            f"({type(error).__name__}: {error}{place_of(error)})",
            fix=fix,
        )


def _trace(run: CheckedRun, bundle: Bundle[TorchModel]) -> Iterator[Finding]:
    """Find a network of which no ONNX can be made, though the YAML asks for it."""
    task = bundle.task
    if ONNX not in declared_formats(run.spec.settings, task):
        return
    from sbkit.export.onnx_format import trace_graphs  # takes a second
    from sbkit.export.onnx_recognizer import trace_recognizer

    try:
        if task.graphs:
            [*trace_graphs(bundle)]
        elif task.predicts == "text":
            trace_recognizer(bundle)
    except SbkitError as error:
        yield run.finding("export_formats", problem=str(error).rstrip("."))


# ---- does live speech compute what a whole clip does?


def _compare_chunks(run: CheckedRun, bundle: Bundle[TorchModel]) -> Iterator[Finding]:
    """Find a model that computes something else chunk by chunk than for a whole clip."""
    model, sizes = bundle.model, bundle.model.chunks
    if sizes is None:
        return
    rate = bundle.config.sample_rate
    seconds = samples_to_seconds(round(NUM_CHUNKS * sizes.step), rate)
    audio = noise_case(1, seconds, rate).audio[0]
    clip = np.rint(FULL_SCALE * audio).astype(np.int16)
    tail = np.zeros(getattr(model.network, "tail_samples", 0), np.int16)
    samples, state = np.concatenate([clip, tail]), model.start()
    try:
        log_probs, lengths = model.predict([clip])
        chunks = []
        for first in range(0, len(samples) - sizes.shortest + 1, sizes.step):
            chunk = samples[first : first + sizes.window]
            ((rows, state),) = model.advance([chunk], [state])
            chunks.append(rows)
    except Exception as error:  # whatever a part of the user's raises
        yield run.finding(
            "model",
            problem="The model does not run chunk by chunk, as live speech needs it "
            f"({type(error).__name__}: {error}{place_of(error)})",
        )
        return
    if not _are_close(np.concatenate(chunks), log_probs[0, : int(lengths[0])]):
        yield run.finding(
            "model",
            problem="Chunk by chunk, as in live speech, the model computes something else than for "
            "a whole clip",
            fix="No part may see what follows its chunk, and `forward_chunk` continues from the "
            "state (docs/guide/own-parts.md).",
        )


# ---- does the bundle compute what the Brain validates?


def _compare(run: CheckedRun, bundle: Bundle[TorchModel]) -> Iterator[Finding]:
    """Find what the Brain computes for a clip in another way than the bundle.

    First its network runs beside that of the bundle: as a test calls it, and in `compute_forward`,
    which may also run parts that a test does not need. Then `compute_forward` is compared with the
    test, if it returns predictions, and not, for example, the scores of given texts.
    """
    if run.dry_run.created or run.dry_run.unsaved:
        return  # `check_state` names the cause
    brain, row = run.brain, short_rows(run.copy)[0]
    batch = example_loader(run.copy).collate_fn([row])
    names = bundle.config.model
    own_parts = {name: run.copy.hparams[name] for name in names}
    bundle_parts = dict(zip(names, bundle.model.network.model, strict=True))
    expected = _observe(bundle_parts, lambda: _predict(bundle, row))
    # The Brain first validates the clip, because it may set attributes of parts for each batch.
    validated = _observe(own_parts, lambda: _validate(brain, batch, brain.network))
    rate, shapes = bundle.config.sample_rate, bundle.config.side_shapes
    own_model = TorchModel(brain.network, parts=(), sample_rate=rate, side_shapes=shapes)
    predicted = _observe(own_parts, lambda: _predict(bundle.with_model(own_model), row))
    findings = [*_compare_networks(run, predicted, expected)]
    if not findings:
        rebuilt = _observe(bundle_parts, lambda: _validate(brain, batch, bundle.model.network))
        findings += _compare_networks(run, validated, rebuilt)
    yield from findings or _compare_outputs(
        run, bundle, row["id"], validated.output, expected.output
    )


def _compare_networks(run: CheckedRun, own: "_Observed", other: "_Observed") -> Iterator[Finding]:
    """Name the first part of the Brain's network with another output than in the bundle's."""
    if _are_close(own.output, other.output):
        return
    different = (
        path
        for path, output in own.by_module.items()
        if not _are_close(output, other.by_module.get(path, output))
    )
    path = next(different, "")
    yield run.finding(
        path.partition(".")[0] or "recipe",
        problem=f"{f'`{path}`' if path else 'The network'} computes something else in "
        f"{type(run.brain).__name__} than in the bundle of the run, which is built from the YAML",
        fix="A bundle has the classes and arguments of the YAML and the weights, but nothing that "
        "the Brain changes, such as by a hook, another `forward` or an attribute. Put that into a "
        "class of your own (docs/guide/own-parts.md).",
    )


def _compare_outputs(
    run: CheckedRun, bundle: Bundle[TorchModel], id: str, outputs: Any, predicted: Any
) -> Iterator[Finding]:
    """Find outputs of `compute_forward` that are not what a test predicts.

    Those that a `score` of the recipe reads, apart from a recognizer's, may have any meaning.
    """
    task, kind = bundle.task, type(run.brain)
    is_error = True
    if isinstance(outputs, Predictions) and task.decodes_frames:
        outputs = outputs.log_probs[0, : int(outputs.frame_lengths[0])]
    elif not kind.metrics or kind.score is not Brain.score or type(outputs) is not type(predicted):
        return
    elif not _are_close(outputs, predicted):  # perhaps logits instead of log-probabilities
        predictions = [task.read_outputs(values, bundle.labels) for values in (outputs, predicted)]
        is_error = not _are_close(*predictions)
    if not _are_close(outputs, predicted):
        yield run.finding(
            "recipe",
            problem=f"`compute_forward` of {kind.__name__} does not return what the bundle of the "
            f"run predicts for {id}, so a validation measures another model",
            fix="Put what it computes beside the network into a part, or into the `model_class` of "
            "a task of your own (docs/guide/own-task.md).",
            stops=is_error,
        )


def _predict(bundle: Bundle[TorchModel], row: Row) -> object:
    """Run a clip as `transcribe` or a test does; for text, return log-probabilities (U, V)."""
    torch.manual_seed(0)
    if bundle.task.decodes_frames:
        return as_recognizer(bundle).encode([row["audio"]], [row])[0].log_probs
    return bundle.predict([row["audio"]], [row])


def _validate(brain: Brain, batch: object, network: Any) -> object:
    """Return the outputs of `compute_forward` with a network in the place of the Brain's."""
    own_network, brain.network = brain.network, network
    try:
        with evaluation(brain, batch) as outputs:
            return outputs
    finally:
        brain.network = own_network


class _Observed(NamedTuple):
    output: object
    by_module: Mapping[str, object]  # the outputs of modules by path, as they return


def _observe(parts: Mapping[str, nn.Module], compute: Callable[[], object]) -> _Observed:
    """Compute an output, and record the first output of each module within the parts."""
    by_module: dict[str, object] = {}

    def record(path: str, module: nn.Module, inputs: object, output: object) -> None:
        by_module.setdefault(path, output)

    with ExitStack() as hooks:
        for name, part in parts.items():
            for path, module in part.named_modules():
                full_path = f"{name}.{path}".rstrip(".")
                hooks.enter_context(module.register_forward_hook(partial(record, full_path)))
        return _Observed(compute(), by_module)


def _are_close(outputs: object, expected: object) -> bool:
    """Return whether two outputs have the same form, and close values."""
    values, expected_values = [*_values(outputs)], [*_values(expected)]
    return len(values) == len(expected_values) and all(map(_is_close, values, expected_values))


def _is_close(value: Float64s | str, expected: Float64s | str) -> bool:
    if isinstance(value, str) or isinstance(expected, str):
        return isinstance(value, str) and value == expected
    if value.shape != expected.shape:
        return False
    largest = np.abs(expected[np.isfinite(expected)]).max(initial=MIN_LARGEST)
    return np.allclose(value, expected, rtol=0, atol=MAX_CHANGE * largest, equal_nan=True)


def _values(output: Any) -> Iterator[Float64s | str]:
    """Yield the tensors, arrays, numbers and texts within an output."""
    if isinstance(output, Tensor):
        yield output.detach().double().cpu().numpy()
    elif isinstance(output, np.ndarray | float | int):
        yield np.asarray(output, np.float64)
    elif isinstance(output, str):
        yield output
    elif isinstance(output, Mapping):
        yield from chain.from_iterable(map(_values, output.values()))
    elif isinstance(output, Sequence):
        yield from chain.from_iterable(map(_values, output))
    elif is_dataclass(output):
        yield from chain.from_iterable(
            _values(getattr(output, item.name)) for item in fields(output)
        )

"""Whether `CNN` takes and returns what a front-end must, before anything is fed by it.

Legend: B utterances, T frames, U frames after the CNN, D width.
"""

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from sbkit.check.dry_run import unchanged
from sbkit.check.finding import Finding, cause_of
from sbkit.check.planned_run import PlannedRun
from sbkit.models.asr import run_features

KEY = "CNN"
SECONDS = (2.0, 4.0)  # of noise; what grows with them is time
RATE = 16_000
CONTRACT = (
    "`CNN` must be forward(features (B, T, M)), returning (B, U, D) or (B, U, C, F), or "
    "forward(features, lengths), returning that and the lengths (B,) in its own frames"
)


def check_front_end(planned: PlannedRun) -> Iterator[Finding]:
    """Find a front-end of another signature, arity or shape."""
    part, features = planned.hparams.get(KEY), planned.hparams.get("compute_features")
    if not isinstance(part, nn.Module) or not isinstance(features, nn.Module):
        return
    try:
        with unchanged(part), torch.no_grad():
            problem = _signature_problem(part) or _output_problem(part, features)
        cause = ""
    except Exception as error:
        if _is_told_elsewhere(error):
            return
        problem, cause = f"it failed ({type(error).__name__}: {error})", cause_of(error)
    if problem:
        yield planned.finding(
            "shapes",
            KEY,
            declared=CONTRACT,
            effect=problem,
            fix="Change its `forward` accordingly.",
            cause=cause,
        )


def _signature_problem(part: nn.Module) -> str:
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [
        each.name
        for each in inspect.signature(part.forward).parameters.values()
        if each.default is inspect.Parameter.empty and each.kind in positional
    ]
    if needed[1:] and needed[1:] != ["lengths"]:
        return f"it takes {', '.join(f'`{name}`' for name in needed)}"
    return ""


def _output_problem(part: nn.Module, features: nn.Module) -> str:
    """Run it on noise of two lengths, and compare what comes out."""
    part.eval()
    takes_lengths = "lengths" in inspect.signature(part.forward).parameters
    shapes: list[tuple[int, ...]] = []
    for seconds in SECONDS:
        samples = torch.tensor([int(seconds * RATE), int(seconds * RATE) // 2])
        audio = torch.randn(2, int(samples[0]), generator=torch.Generator().manual_seed(1)) * 1000
        x, frames = run_features(features, audio, samples)
        output: Any = part(x, frames) if takes_lengths else part(x)
        problem = _problem_of(output, takes_lengths=takes_lengths)
        if problem:
            return problem
        shapes.append((output[0] if takes_lengths else output).shape)
    short, long = shapes
    if short[1] == long[1] and short[2:] != long[2:]:
        return f"its output {tuple(long)} has time on another axis than the second"
    return ""


def _problem_of(output: Any, *, takes_lengths: bool) -> str:
    if takes_lengths and not (isinstance(output, tuple) and len(output) == 2):
        return f"it takes lengths and returns {_kind(output)}"
    x, lengths = output if takes_lengths else (output, None)
    if not isinstance(x, Tensor) or x.ndim not in (3, 4):
        return f"it returns {_kind(x)}"
    if lengths is None:
        return ""
    if not isinstance(lengths, Tensor) or lengths.shape != x.shape[:1]:
        return f"its lengths are {_kind(lengths)} for {len(x)} utterances"
    if lengths.is_floating_point() or int(lengths.max()) > x.shape[1]:
        return f"it returns {x.shape[1]} frames and lengths of up to {lengths.max():g}"
    return ""


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {tuple(value.shape)}"
    if isinstance(value, tuple):
        return f"{len(value)} values"
    return f"a {type(value).__name__}"


def _is_told_elsewhere(error: Exception) -> bool:
    """Return whether it is a size that does not fit, of which the shapes say more."""
    return "shape" in str(error) or "channels" in str(error) or "size" in str(error)

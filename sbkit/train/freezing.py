"""Parts that do not learn, for the whole run or for its first steps, by the paths of their modules.

    freeze: [CNN, Transformer.encoder.0]
    freeze: {CNN: always, Transformer: 10000}  # steps of the optimizer

What is frozen computes in training as it does for inference: without gradients, dropout and new
statistics. Where nothing before it learns, it keeps no activations.
"""

import math
from collections.abc import Mapping
from typing import Any

from sbkit.config.ranges import Range
from sbkit.train.optimizers import depth, named_modules, parameters_at, read_paths

KNOB, ALWAYS = "freeze", "always"
STEPS = Range(low=0, whole=True, word=ALWAYS, advice="Pass always, or a number of steps.")


class Freezing:
    """What is frozen in a step, by the steps before it: nothing to save or restore.

    The longest path decides where several lead to a parameter; one that never learns stays so. At
    first only what is frozen for good is: optimizers are made with all that will learn.
    Raises SbkitError for a path that leads nowhere, and for what is neither list nor mapping.
    """

    def __init__(self, hparams: Mapping[str, Any]) -> None:
        listed = hparams.get(KNOB) or ()
        if isinstance(listed, list | tuple):
            hparams = {**hparams, KNOB: dict.fromkeys(listed, ALWAYS)}
        must = f"a list of paths in `model`, or a mapping of them to {ALWAYS} or a number of steps"
        steps = read_paths(KNOB, hparams, must=must, values=STEPS)
        modules = dict(named_modules(hparams)) if steps else {}
        paths = sorted(steps, key=depth)
        self.ends = [math.inf if steps[path] == ALWAYS else steps[path] for path in paths]
        self._modules = [modules.get(path) for path in paths]  # None: of a parameter
        self._parameters = [
            [each for each in parameters_at(path, hparams, KNOB) if each.requires_grad]
            for path in paths
        ]
        self._frozen: list[bool] = []
        self.advance(max((end for end in self.ends if end < math.inf), default=0))

    def advance(self, step: float) -> bool:
        """Freeze and unfreeze for what comes after so many steps; return whether that changes."""
        before, self._frozen = self._frozen, [step < end for end in self.ends]
        if before == self._frozen:
            return False
        for is_frozen, parameters in zip(self._frozen, self._parameters, strict=True):
            for each in parameters:
                each.requires_grad_(not is_frozen)
        return True

    def set_mode(self) -> None:
        """Put what is frozen into evaluation mode, and what learns within it into training mode."""
        for is_frozen, module in zip(self._frozen, self._modules, strict=True):
            if module is not None:
                module.train(not is_frozen)

"""What the process imports that tests fork theirs from.

None of it is garbage: to look through it would take a quarter of the time of these imports and, as
that writes to them, copy its pages in every process that is forked.
"""

import gc
from importlib import import_module

gc.disable()
for name in (
    *(
        "sbkit.commands.train",
        "sbkit.commands.cli",
        "sbkit.export.export",
        "sbkit.runtime.transcriber",
    ),
    *("recipes.asr.recipe", "recipes.classification.recipe", "recipes.prepare"),
    # What is imported late: by the first optimizer, group of ranks, curve and log.
    *("torch._dynamo", "torch.distributed.nn", "torch.utils.serialization.config"),
    *("matplotlib.figure", "matplotlib.backends.backend_agg"),
    "torch.utils.tensorboard",
    *("sbkit.models.frontend", "PIL.PngImagePlugin", "PIL.JpegImagePlugin"),
):
    import_module(name)
gc.freeze()
gc.enable()

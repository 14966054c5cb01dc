"""The imports of the process that tests fork others from.

No imported object is garbage: collecting would take a quarter of the time of the imports and, as
the collector writes to each object, copy its pages in every forked process.
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
    # Imported late: by the first optimizer, process group, curve and log.
    *("torch._dynamo", "torch.distributed.nn", "torch.utils.serialization.config"),
    *("matplotlib.figure", "matplotlib.backends.backend_agg"),
    "torch.utils.tensorboard",
    *("sbkit.models.frontend", "PIL.PngImagePlugin", "PIL.JpegImagePlugin"),
):
    import_module(name)
gc.freeze()
gc.enable()

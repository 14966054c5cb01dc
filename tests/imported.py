"""The imports of the process that tests fork others from.

Imported objects are never garbage. Collecting them would take a quarter of the time of the imports,
and copy their pages in every forked process, because the collector writes to each object.
"""

import gc
from importlib import import_module

gc.disable()
for name in (
    "sbkit.run.run",
    "sbkit.commands.cli",
    "sbkit.export.export",
    "sbkit.tasks.asr.predict",
    "recipes.asr.recipe",
    "recipes.prepare",
    # These are otherwise imported by the first optimizer, process group, curve and log.
    "torch._dynamo",
    "torch.distributed.nn",
    "torch.utils.serialization.config",
    "matplotlib.figure",
    "matplotlib.backends.backend_agg",
    "torch.utils.tensorboard",
    "sbkit.models.frontend",
    "PIL.PngImagePlugin",
    "PIL.JpegImagePlugin",
):
    import_module(name)
gc.freeze()
gc.enable()

"""Data: corpora list clips, audio is decoded once, and batches are planned from prepared splits.

An utterance, and the modules on its path:

row of a table (tables, sources) -> clip (manifest) -> audio in a shard (cache, shard)
    -> row of a split (splits) -> part of an example (sampler) -> part of a batch (batch)

Names are imported on first use, so that importing this package does not import torch.
"""

from typing import TYPE_CHECKING

from sbkit.base.imports import lazy_names

if TYPE_CHECKING:
    from sbkit.data.batch import Batch as Batch
    from sbkit.data.batch import TextBatch as TextBatch
    from sbkit.data.batch import collate_audio as collate_audio
    from sbkit.data.batch import make_loaders as make_loaders
    from sbkit.data.corpus import Corpus as Corpus
    from sbkit.data.manifest import Clip as Clip
    from sbkit.data.manifest import Excluded as Excluded
    from sbkit.data.manifest import Manifest as Manifest
    from sbkit.data.sampler import TrainSampler as TrainSampler
    from sbkit.data.splits import Splits as Splits

__getattr__, __dir__ = lazy_names(
    "sbkit.data",
    **dict.fromkeys(("Batch", "TextBatch", "collate_audio", "make_loaders"), "batch"),
    **dict.fromkeys(("Clip", "Excluded", "Manifest"), "manifest"),
    Corpus="corpus",
    Splits="splits",
    TrainSampler="sampler",
)

"""Data: corpora list clips, audio is decoded once, and batches are planned from prepared splits.

An utterance, and the modules on its path:

row of a table (tables, sources) -> clip (manifest) -> audio in a shard (cache, shard)
    -> row of a split (splits) -> part of an example (sampler) -> part of a batch (batch)
"""

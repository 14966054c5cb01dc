"""Data: corpora list clips, audio is decoded once, and batches are planned from prepared splits.

An utterance, and the modules on its path:

row of a table (tables, audio_tables) -> clip (manifest) -> audio in a shard (work_units, shard)
    -> row of a prepared corpus (rows, prepared) -> row of a split with its text (splits)
    -> part of an example (sampler) -> part of a batch (batch)
"""

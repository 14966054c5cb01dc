"""The exchange format of models: configuration, module specifications, allow-list and weights.

`sbkit.runtime` runs bundles, and `sbkit.export` writes them.
"""

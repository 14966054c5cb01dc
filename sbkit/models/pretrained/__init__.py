"""Pretrained speech encoders as modules of a YAML, in `parts`."""

"""Pretrained encoders of speech, as the modules of a YAML."""

"""Whole runs: what `train.py` and the commands call."""

"""Whole runs, which `train.py` and the commands start."""

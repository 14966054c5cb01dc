"""Evaluation: error rates with intervals, comparisons of runs, calibration and reports."""

"""Evaluation: error rates with intervals, comparisons of runs, calibration and reports.

Counts are added over a test set and divided once.
"""

"""The logs of a run: messages, figures, curves, progress, and report pages."""

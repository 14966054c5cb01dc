"""Speech synthesis: text to speech."""

MODEL_PARTS = "DurationAligner MelDecoder TextEncoder VarianceAdaptor"  # of model.py, for bundles

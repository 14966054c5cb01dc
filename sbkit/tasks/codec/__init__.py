"""A codec: audio to codes and back."""

MODEL_PARTS = "FiniteScalarQuantizer"  # of model.py, which any bundle may name

"""A codec: audio to codes and back."""

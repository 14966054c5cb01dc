"""Models: encoders, recognizers, their losses, and streaming."""

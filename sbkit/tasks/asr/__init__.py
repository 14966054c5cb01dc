"""Speech recognition: audio to text."""

"""Voice activity detection: which frames are speech."""

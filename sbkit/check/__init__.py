"""`sbkit check`: everything that would go wrong in a run, found before its first step."""

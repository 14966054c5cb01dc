"""Tasks: what a model predicts, how predictions are scored, and which commands run bundles."""

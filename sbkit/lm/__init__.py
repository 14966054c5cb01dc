"""Language models: n-gram models with back-off, their training, and ARPA files."""

"""CTC beam search with language models and hotwords."""

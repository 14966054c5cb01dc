"""Text: normalization, verbalization, tokenizers, vocabularies, language tags, recognized words."""

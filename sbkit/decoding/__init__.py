"""Decoding: from CTC log-probabilities to texts, and words with times and confidences."""

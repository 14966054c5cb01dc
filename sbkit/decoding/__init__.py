"""Decoding: from CTC log-probabilities to texts, and words with times and confidences.

A decoder is greedy, or a prefix beam search with language models and hotwords. The attention
decoder of a model may rescore. Only the modules that fit a decoder, on all ranks of a training,
import torch.
"""

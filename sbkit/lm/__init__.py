"""Language models: n-gram models with back-off, their training, and ARPA files.

`NgramModel` scores text word by word; `train` is KenLM's modified Kneser-Ney smoothing in numpy.
"""

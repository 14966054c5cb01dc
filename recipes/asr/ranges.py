"""What the numbers of this recipe's YAMLs may be, beside those that the classes declare."""

from sbkit.config.ranges import NOT_NEGATIVE, SHARE, Range
from sbkit.data.sampler import TrainSampler

RANGES = {
    **TrainSampler.RANGES,
    "ctc_weight": Range(low=0.01, high=1, advice="All decoding is by CTC, which must learn."),
    "inter_ctc_weight": Range(low=0, high=0.99, advice="At 1 nothing trains the upper encoder."),
    "label_smoothing": SHARE,
    "min_seconds": NOT_NEGATIVE,
    "eval_batch_seconds": Range(low=1, advice="120 is usual."),
}

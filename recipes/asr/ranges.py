"""What the numbers of this recipe's YAMLs may be, beside those that the classes declare."""

from sbkit.config.ranges import NOT_NEGATIVE, SHARE, Range
from sbkit.data.sampler import TrainSampler

RANGES = {
    **TrainSampler.RANGES,
    **dict.fromkeys(("ctc_weight", "inter_ctc_weight", "label_smoothing"), SHARE),
    "min_seconds": NOT_NEGATIVE,
    "eval_batch_seconds": Range(low=1, advice="120 is usual."),
}

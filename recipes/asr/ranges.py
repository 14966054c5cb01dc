"""What the numbers of this recipe's YAMLs may be, beside those that the classes declare."""

from recipes import prepare
from sbkit.config.ranges import SHARE, Range

RANGES = {
    **prepare.RANGES,
    "ctc_weight": Range(low=0.01, high=1, advice="All decoding is by CTC, which must learn."),
    "inter_ctc_weight": Range(low=0, high=0.99, advice="At 1 nothing trains the upper encoder."),
    "label_smoothing": SHARE,
}

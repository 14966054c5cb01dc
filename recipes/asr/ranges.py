"""What the numbers of this recipe's YAMLs may be."""

from sbkit.config.ranges import Range

SHARE = Range(low=0, high=1, advice="0 is none, 1 is all.")
AT_LEAST_NONE = Range(low=0, whole=True, advice="Pass 0 for none.")
AT_LEAST_ONE = Range(low=1, whole=True, advice="Pass 1 for the smallest.")
NOT_NEGATIVE = Range(low=0, advice="Pass 0 for none.")

RANGES = {
    **dict.fromkeys(("min_seconds", "lr", "weight_decay"), NOT_NEGATIVE),
    **dict.fromkeys(("time_masks", "time_width", "freq_masks", "freq_width"), AT_LEAST_NONE),
    **dict.fromkeys(("concat_prob", "max_time_fraction", "warmup_fraction", "dropout"), SHARE),
    **dict.fromkeys(("ctc_weight", "inter_ctc_weight", "label_smoothing"), SHARE),
    **dict.fromkeys(("cnn_channels", "d_model", "nhead", "d_ffn", "kernel_size"), AT_LEAST_ONE),
    "num_encoder_layers": AT_LEAST_ONE,
    "num_decoder_layers": AT_LEAST_NONE,
    "n_mels": Range(low=3, whole=True, advice="80 is usual."),
    "eval_batch_seconds": Range(low=1, advice="120 is usual."),
}

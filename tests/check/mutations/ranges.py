"""Numbers that would end a run, or let it do nothing."""

from tests.check.harness import Expected, Mutation

MUTATIONS = [
    Mutation(
        name="numbers out of their range",
        options=("--log_every=0", "--average_checkpoints=0"),
        text=(("stall_seconds: 120", "stall_seconds: -1"),),
        expected=(
            Expected("ranges", "log_every", ("`log_every` must be a whole number", "is 0")),
            Expected("ranges", "average_checkpoints", ("of at least 1", "is 0")),
            Expected("ranges", "stall_seconds", ("a number from 0 to 86400", "is -1")),
        ),
    ),
    Mutation(
        name="numbers of the recipe out of their range",
        options=("--concat_prob=2", "--time_masks=-1", "--warmup_fraction=3"),
        expected=(
            Expected("ranges", "concat_prob", ("a number from 0 to 1", "is 2")),
            Expected("ranges", "time_masks", ("of at least 0", "is -1")),
            Expected("ranges", "warmup_fraction", ("a number from 0 to 1", "is 3")),
        ),
    ),
    Mutation(
        name="lists in place of a word",
        text=(
            ("\nprecision: fp32", "\nprecision: [bf16]"),
            ("audio_store: pcm", "audio_store: [pcm]"),
        ),
        expected=(
            Expected("placement", "precision", ("one of fp32, bf16, fp16", "['bf16']")),
            Expected("splits", "audio_store", ("one of pcm, flac, none", "['pcm']")),
        ),
    ),
    Mutation(
        name="a CTC head that nothing trains",
        options=("--ctc_weight=0",),
        expected=(Expected("ranges", "ctc_weight", ("from 0.01 to 1", "is 0")),),
    ),
    Mutation(
        name="language models without a decoder",
        options=("--word_lm_order=1",),
        text=(("decoder: !new:sbkit", "another_decoder: !new:sbkit"),),
        expected=(Expected("brain", "word_lm_order", ("belong to a `decoder`", "has none")),),
    ),
    Mutation(
        name="an argument out of the range that its class declares",
        text=(("    time_masks: !ref <time_masks>\n", "    time_masks: -1\n"),),
        expected=(Expected("ranges", "spec_augment.time_masks", ("at least 0", "is -1")),),
    ),
]

"""What can be wrong with where a run computes, and in which precision."""

from tests.check.harness import Expected, Mutation

EIGHT = {"target": "cuda:8"}
ROOMY = ("--device=cuda", "--batch_seconds=60", "--concat_prob=0.0")
FEW_STEPS = Expected("batches", "--batch_seconds", ("of train make 1",), stops=False)


MUTATIONS = [
    Mutation(
        name="fp16 on the CPU",
        options=("--precision=fp16",),
        expected=(Expected("placement", "precision", ("on cpu", "fp16", "--precision=bf16")),),
    ),
    Mutation(
        name="a precision of another spelling",
        options=("--precision=bf61",),
        expected=(Expected("placement", "precision", ("fp32, bf16, fp16", "'bf61'")),),
    ),
    Mutation(
        name="a device that this machine has not",
        options=("--device=cuda:99",),
        expected=(Expected("placement", "device", ("torch finds", "cuda:99")),),
    ),
    Mutation(
        name="a device of no form",
        options=("--device=cuda0",),
        expected=(Expected("placement", "device", ("cuda:N", "'cuda0'")),),
    ),
    Mutation(
        name="a device and two precisions at once",
        options=(*ROOMY, "--device=cuda:9", "--precision=fp8", "--eval_precision=fp4"),
        expected=(
            Expected("placement", "device", ("the target has 8 devices", "cuda:9")),
            Expected("placement", "precision", ("'fp8'",)),
            Expected("placement", "eval_precision", ("'fp4'",)),
            FEW_STEPS,
        ),
        **EIGHT,
    ),
    Mutation(
        name="batches too small for eight processes",
        options=("--device=cuda",),
        expected=(Expected("batches", "batch_seconds", ("8 processes",), stops=False),),
        **EIGHT,
    ),
    Mutation(name="healthy on eight devices", options=ROOMY, expected=(FEW_STEPS,), **EIGHT),
]

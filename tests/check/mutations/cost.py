"""What can be wrong with what a run takes."""

from sbkit.check.check import CHECKS
from tests.check.harness import Expected, Mutation

MUTATIONS = [
    Mutation(
        name="more checkpoints than any disk holds",
        options=("--average_checkpoints=1000000000",),
        checks=CHECKS,
        expected=(Expected("cost", "output_folder", ("are free", "full disk")),),
    ),
]

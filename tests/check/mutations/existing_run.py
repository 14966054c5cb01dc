"""What can be wrong with the run folder, and with what would be exported."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from sbkit.base.checksums import write_checksums
from tests.check.harness import Expected, Mutation


def undeclared(run: Path) -> None:
    with checkpoint(run) as folder:
        torch.save({"0.conv1.bias": torch.zeros(5)}, folder / "model.ckpt")


def cut_short(run: Path) -> None:
    with checkpoint(run) as folder:
        (folder / "model.ckpt").write_bytes(bytes(100))
    (folder / "model.ckpt").write_bytes(bytes(99))


@contextmanager
def checkpoint(run: Path) -> Iterator[Path]:
    """Make a checkpoint that is whole, of what is written into its folder."""
    folder = run / "checkpoints" / "CKPT+2026-11-20+10-00-00+00"
    folder.mkdir(parents=True)
    (folder / "CKPT.yaml").write_text("unixtime: 1.0\n")
    yield folder
    write_checksums(folder)


MUTATIONS = [
    Mutation(
        name="a checkpoint cut short, and no other",
        run=cut_short,
        expected=(
            Expected("run_folder", "mutated.yaml:1", ("No checkpoint in", "all 1 are damaged")),
        ),
    ),
    Mutation(
        name="checkpoints without the declaration of their run",
        run=undeclared,
        expected=(Expected("run_folder", ".yaml:1", ("run_config.json must be", "Put it back")),),
    ),
    Mutation(
        name="weights to begin with that are nowhere",
        options=("--init_from=/nowhere",),
        expected=(Expected("initial_weights", "init_from", ("/nowhere is neither",)),),
    ),
    Mutation(
        name="a size that only running code could tell",
        text=(
            (
                "ctc_lin: !new:torch.nn.Linear\n    in_features: !ref <d_model>",
                "ctc_lin: !new:torch.nn.Linear\n    in_features: !apply:builtins.max [!ref "
                "<d_model>, 1]",
            ),
        ),
        expected=(Expected("export", "ctc_lin", ("!apply:builtins.max",), stops=False),),
    ),
]

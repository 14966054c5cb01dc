"""Devices and ranks: one device and precision for each process, and collective operations.

Names are imported on first use, so that importing this package does not import torch.
"""

from typing import TYPE_CHECKING

from sbkit.base.imports import lazy_names

if TYPE_CHECKING:
    from sbkit.distributed.device import Placement as Placement
    from sbkit.distributed.ranks import gather_over_ranks as gather_over_ranks
    from sbkit.distributed.ranks import main_rank_first as main_rank_first
    from sbkit.distributed.ranks import rank as rank
    from sbkit.distributed.ranks import sum_over_ranks as sum_over_ranks
    from sbkit.distributed.ranks import world_size as world_size

__getattr__, __dir__ = lazy_names(
    "sbkit.distributed",
    Placement="device",
    gather_over_ranks="ranks",
    main_rank_first="ranks",
    rank="ranks",
    sum_over_ranks="ranks",
    world_size="ranks",
)

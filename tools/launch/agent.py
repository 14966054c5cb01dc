"""torchrun for runs that a signal may stop: ``python -m tools.launch.agent [options] ...``.

torchrun passes a signal on to the ranks, and kills those that have not ended 30 s later. But then
it prints a traceback and exits with code 1, and it restarts ranks that ended by themselves.
"""

import os
import signal
import sys
from importlib import import_module
from types import FrameType
from typing import Any, NoReturn

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import RendezvousError

from sbkit.base.errors import ASKED_TO_STOP, BAD_INPUT, SbkitError
from sbkit.base.process import run_main

torchrun: Any = import_module("torch.distributed.run")
launcher: Any = import_module("torch.distributed.launcher.api")

BY_THE_AGENT = -signal.SIGTERM  # the exit code of ranks that it stops because another has failed


class Agent(LocalElasticAgent):
    """Restart ranks that died, but not ranks that were asked to stop or refused their input."""

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        codes = {failure.exitcode for failure in result.failures.values()} - {BY_THE_AGENT}
        if codes and codes <= {ASKED_TO_STOP, BAD_INPUT}:
            self._remaining_restarts = 0
        return result


def main() -> int:
    """Run torchrun, and return the exit code of its ranks."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, leave)
    launcher.LocalElasticAgent = Agent  # torchrun has no option for it
    # Else ranks look for each other where those were that have died (pytorch #135712, #167288).
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    options = torchrun.parse_args(sys.argv[1:])
    try:
        torchrun.run(options)
    except SignalException:
        return ASKED_TO_STOP
    except ChildFailedError as error:
        _, first = error.get_first_failure()
        message: Any = first.message  # a mapping where a rank has said why it refused
        print(error if isinstance(message, str) else message["message"], file=sys.stderr)
        return first.exitcode if first.exitcode > 0 else 128 - first.exitcode
    except RendezvousError as error:
        raise SbkitError(
            f"{options.nnodes} machines must meet at {options.rdzv_endpoint} as "
            f"`{options.rdzv_id}`, but not all came, or one has ended the run. Start the same "
            "command on each of them, and see that they all reach that port."
        ) from error
    return 0


def leave(number: int, frame: FrameType | None) -> NoReturn:
    """Exit while there are no ranks yet; later, torchrun's own handler replaces this one."""
    raise SignalException("asked to leave", signal.Signals(number))


if __name__ == "__main__":
    run_main(main)

"""torchrun for runs that may be asked to stop: ``python -m tools.launch.agent [options] ...``.

Torchrun forwards a signal to its ranks and kills those that still run 30 s later. But then it ends
with a traceback and exit code 1, and it restarts ranks that stopped on purpose.
"""

import os
import signal
import sys
import time
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import FrameType
from typing import Any, NoReturn

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import RendezvousError

from sbkit.base.errors import ASKED_TO_STOP, BAD_INPUT, PARTLY_DONE, SbkitError
from sbkit.base.process import SAVED_FILE, run_main

torchrun: Any = import_module("torch.distributed.run")
launcher: Any = import_module("torch.distributed.launcher.api")

SECONDS_OF_WORK = 3600  # without a failure, until all restarts are available again
STOPPED_BY_AGENT = -signal.SIGTERM  # exit code of ranks that stop because another has failed


class Agent(LocalElasticAgent):
    """Restart ranks that died, but not ranks that were asked to stop or refused their input.

    In an elastic run, ranks that were asked to stop restart as well: another machine has joined or
    left the run. If this machine is to leave, the agent itself gets the signal, and it ends.

    After an hour without a failure in which a checkpoint was saved, all restarts are available
    again.
    """

    def __init__(self, *, is_elastic: bool, **options: Any) -> None:
        """Take torchrun's options for its own agent."""
        super().__init__(**options)
        self._is_elastic = is_elastic
        self._last_failure = time.time()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        codes = {failure.exitcode for failure in result.failures.values()} - {STOPPED_BY_AGENT}
        if codes == {ASKED_TO_STOP} and self._is_elastic:
            self._remaining_restarts += 1  # torchrun counts it down, as if they had died
        elif codes and codes <= {ASKED_TO_STOP, BAD_INPUT, PARTLY_DONE}:
            self._remaining_restarts = 0
        elif codes:
            save_time = Path(os.environ[SAVED_FILE]).stat().st_mtime
            start, self._last_failure = self._last_failure, time.time()
            if save_time > start and self._last_failure - start > SECONDS_OF_WORK:
                self._remaining_restarts = worker_group.spec.max_restarts
        return result


def main() -> int:
    """Run torchrun, and return the exit code of its ranks."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, leave)
    options = torchrun.parse_args(sys.argv[1:])
    min_nodes, _, max_nodes = options.nnodes.partition(":")
    is_elastic = max_nodes not in ("", min_nodes)
    launcher.LocalElasticAgent = partial(Agent, is_elastic=is_elastic)  # torchrun has no option
    # Otherwise restarted ranks look for each other at the port of ranks that have died (pytorch
    # #135712, #167288).
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    try:
        with NamedTemporaryFile(prefix="sbkit-") as file:
            os.environ[SAVED_FILE] = file.name
            torchrun.run(options)
    except SignalException:
        return ASKED_TO_STOP
    except ChildFailedError as error:
        failures = error.failures.values()
        first = min(failures, key=lambda f: (f.exitcode == STOPPED_BY_AGENT, f.timestamp))
        message: Any = first.message  # a mapping if a rank has said why it refused its input
        print(error if isinstance(message, str) else message["message"], file=sys.stderr)
        return first.exitcode if first.exitcode > 0 else 128 - first.exitcode
    except RendezvousError as error:
        raise SbkitError(
            f"{options.nnodes} machines must meet at {options.rdzv_endpoint} as "
            f"`{options.rdzv_id}`, but not all joined, or one has ended the run. Start the same "
            "command on each of them, and check that they all reach that port."
        ) from error
    return 0


def leave(number: int, frame: FrameType | None) -> NoReturn:
    """Exit before there are ranks; torchrun installs its own handler when it starts them."""
    raise SignalException("asked to leave", signal.Signals(number))


if __name__ == "__main__":
    run_main(main)

"""The process in which a rank tries what may crash or hang: torch, Horovod, MPI, and the measurements over all ranks.

Before and after each stage it writes a JSON line into a pipe, so that the supervisor knows where it was when it fell silent.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, TextIO

from hvd_adaptive.exit_codes import EXIT_STAGE_FAILED

# A rank that computes or compiles tells the heartbeats so; only one that hangs for so long is named.
_STALL_LIMIT_S = 60.0


class Stages:
    """Runs stages by name and tells the supervisor of each.

    Args:
        pipe: where the lines go.

    Attributes:
        facts: what each stage has found so far; {"error": text} of one that failed.
    """

    def __init__(self, pipe: TextIO) -> None:
        self._pipe = pipe
        self.facts: dict[str, Any] = {}

    def tell(self, **line: Any) -> None:
        """Writes a line."""
        self._pipe.write(json.dumps(line) + "\n")
        self._pipe.flush()

    def run(self, name: str, action: Callable[[], Any], *, needed: bool = False) -> Any:
        """Runs a stage; returns what it found.

        Args:
            name: of the stage.
            action: returns JSON values.
            needed: nothing after it can work without it.

        Raises:
            SystemExit: if a needed stage failed.
        """
        self.tell(begin=name)
        try:
            found = action()
        except Exception as error:
            reason = str(error) or type(error).__name__
            if not isinstance(error, (RuntimeError, ValueError, ImportError, OSError)):
                reason = traceback.format_exc(limit=-3)
            found = {"error": reason}
        self.facts[name] = found
        self.tell(end=name, facts=found)
        if needed and isinstance(found, dict) and "error" in found:
            self._pipe.close()
            # MPI may be half started, and its end may hang.
            os._exit(EXIT_STAGE_FAILED)
        return found


def main(arguments: dict[str, Any]) -> None:
    """Runs all stages as this rank, or those that need no other rank. COLLECTIVE if ``join``.

    Args:
        arguments: ``pipe`` (file descriptor), ``join`` (Horovod, MPI and the world), ``device``, ``probe_seconds``,
            ``machine`` (facts of this rank that are known already).
    """
    # What MPI starts shall not keep the pipe open when this process is gone.
    os.set_inheritable(arguments["pipe"], False)
    stages = Stages(os.fdopen(arguments["pipe"], "w", encoding="utf-8"))
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    stages.facts["machine"] = arguments["machine"]

    def load_torch() -> dict[str, Any]:
        from hvd_adaptive.doctor import measure

        return measure.describe_torch()

    stages.run("torch", load_torch, needed=True)
    transport = None
    if arguments["join"]:
        backend = arguments["machine"]["backend"]
        if backend == "horovod":
            from hvd_adaptive.comm import mpi_library

            stages.run("horovod", mpi_library.describe_horovod, needed=True)
            stages.run("mpi4py", mpi_library.describe_mpi4py, needed=True)

        def join() -> dict[str, Any]:
            nonlocal transport
            from hvd_adaptive.comm import connect

            transport = connect(stall_limit_s=_STALL_LIMIT_S, backend=backend, mpi_alone=backend == "horovod")
            return _describe_world(transport)

        stages.run("world", join, needed=True)
    if transport is None:
        from hvd_adaptive.comm.threads import LocalTransport

        transport = LocalTransport()
    _measure(stages, transport, arguments)
    if arguments["join"]:
        gathered = stages.run("report", lambda: transport.allgather_object(stages.facts), needed=True)
        if transport.rank == 0:
            stages.tell(ranks=gathered)
    stages.run("end", transport.close, needed=True)
    stages.tell(done=True)


def _describe_world(transport: Any) -> dict[str, Any]:
    return {
        "rank": transport.rank,
        "world_size": transport.world_size,
        "local_rank": transport.local_rank,
        "local_size": transport.local_size,
        **transport.describe(),
    }


def _measure(stages: Stages, transport: Any, arguments: dict[str, Any]) -> None:
    import torch

    from hvd_adaptive.comm.protocols import long_task
    from hvd_adaptive.doctor import measure

    cores = arguments["machine"]["cores"]
    chosen = stages.run("device", lambda: measure.choose_device(arguments["device"], transport, cores))
    device = torch.device(chosen.get("device", "cpu"))

    def alone(what: str, action: Callable[[], Any]) -> Callable[[], Any]:
        def watched() -> Any:
            with long_task(transport, what):
                return action()

        return watched

    if transport.local_rank == 0 or device.type == "cuda":
        stages.run("kernels", alone("compiling kernels", lambda: measure.compile_kernels(device)))
    stages.run("meeting", lambda: {"waited_s": transport.rendezvous("doctor speed")})
    speed = alone("measuring speed", lambda: measure.compute_speed(device, arguments["probe_seconds"]))
    stages.run("speed", speed)
    if transport.world_size > 1:
        # A rank that fails here leaves the others waiting: it ends, and the heartbeats end them.
        stages.run("claims", lambda: measure.claim_latency(transport), needed=True)
        stages.run("collectives", lambda: measure.collectives(transport), needed=True)
        stages.run("links", lambda: measure.links(transport), needed=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

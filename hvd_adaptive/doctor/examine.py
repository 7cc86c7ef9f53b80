"""From a rank's child, or from ranks started here, to the page's contents. Imports neither torch nor MPI."""

from __future__ import annotations

import datetime
import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

from hvd_adaptive.cluster.binding import LauncherInfo, read_launcher
from hvd_adaptive.cluster.relaunch import build_command, choose_launcher, meeting_place
from hvd_adaptive.doctor import hardware, software
from hvd_adaptive.doctor.findings import Facts, Finding, count
from hvd_adaptive.doctor.machine import machine_facts
from hvd_adaptive.doctor.supervise import Outcome, ending_signals, supervise
from hvd_adaptive.doctor.text_page import document

OnStage = Callable[[str], None]

# Rank 0 must have spoken before a rank that failed lets the launcher end the job.
_PATIENCE_S = 15.0
_MARK = "HVD_ADAPTIVE_DOCTOR "
_MOST_CHARACTERS = 700
_END_LIMIT_S = 5.0

_STAGES = {
    "start": ("this Python does not run hvd_adaptive", "scripts/setup.sh"),
    "torch": ("torch does not load", "scripts/setup.sh --recreate; compare LD_LIBRARY_PATH with the one at the set-up"),
    "horovod": (
        "Horovod does not load",
        "it was built against another torch or MPI: load the modules of the set-up, check LD_LIBRARY_PATH, or "
        "scripts/setup.sh --recreate builds it anew",
    ),
    "mpi4py": ("mpi4py does not load", "unset MPI4PY_LIBMPI, load the MPI of the set-up, or scripts/setup.sh --recreate"),
    "world": ("the ranks do not meet", None),
    "kernels": ("kernels do not compile", "set NUMBA_CACHE_DIR to a local folder that can be written"),
    "meeting": ("the ranks do not meet a second time", "look for a rank that hangs"),
    "speed": ("the compute probe does not end", "the device hangs: nvidia-smi, dmesg"),
    "claims": ("claims fail", "the hosts must accept TCP connections from each other on all ports"),
    "collectives": ("a collective fails", "MPI uses a network that leads nowhere: OMPI_MCA_btl_tcp_if_include=10.0.0.0/8"),
    "report": ("the ranks' findings are not gathered", "look for a rank that hangs"),
    "end": ("the world does not end", "training would hang at its end, too: look for a rank that hangs"),
    "links": ("a link between hosts fails", "MPI uses a network that leads nowhere: OMPI_MCA_btl_tcp_if_include=10.0.0.0/8"),
}  # fmt: skip
_NO_MEETING = (
    "some rank has not started, or MPI cannot connect the hosts: look for a rank that says something else; name the network "
    "between the hosts (Open MPI: OMPI_MCA_btl_tcp_if_include=10.0.0.0/8, MPICH: MPIR_CVAR_NETWORK_IFACE=eth0); if starting "
    "takes that long, raise --limit"
)


def examine_rank(
    *, backend: str, device: str, probe_seconds: float, limit_s: float, on_stage: OnStage
) -> dict[str, Any] | None:
    """Examines this process's world as the rank that it is. COLLECTIVE, but it ends on every rank whatever others do.

    Args:
        backend: as for ``train``.
        device: as for ``train``.
        probe_seconds: length of the compute probe.
        limit_s: seconds that each check may take.
        on_stage: called when a check begins.

    Returns:
        The page's contents on rank 0; on other ranks only where this rank found what rank 0 cannot know; else None.
    """
    info = read_launcher(os.environ)
    machine = machine_facts(_backend(backend, info))
    arguments = {"join": True, "device": device, "probe_seconds": probe_seconds, "machine": machine}
    outcome = supervise(arguments, limit_s=limit_s, on_stage=on_stage)
    rank = info.rank or 0
    if rank:
        lonely = outcome.stage is not None and outcome.kind != "ended"
        return _document(info, [outcome.facts], [_failure(outcome, limit_s)], joined=False) if lonely else None
    if outcome.ranks is not None:
        failures = [] if outcome.stage is None else [_failure(outcome, limit_s)]
        return _document(info, outcome.ranks, failures, joined=True)
    failure = _failure(outcome, limit_s)
    facts = outcome.facts
    # A launcher that ends the job grants about a second.
    if outcome.kind != "ended" and ("world" not in facts or "error" in facts["world"]):
        facts = {**_alone(arguments, limit_s, on_stage), **facts}
    return _document(info, [facts], [failure], joined=False)


def examine_by_launching(
    num_ranks: int, arguments: Sequence[str], *, backend: str, device: str, limit_s: float, on_stage: OnStage
) -> dict[str, Any]:
    """Starts ranks under mpirun that examine their world, and returns what rank 0 says.

    Args:
        num_ranks: ranks to start, >= 1.
        arguments: of ``hvd-adaptive``, for the ranks.
        backend: as for ``train``.
        device: as for ``train``.
        limit_s: seconds that each check may take.
        on_stage: called when a check of rank 0 begins.

    Returns:
        The page's contents; this process's alone, with what the launcher said, if rank 0 says nothing.

    Raises:
        ValueError: num_ranks is below 1.
    """
    machine = machine_facts(_backend(backend, read_launcher({})))
    try:
        with meeting_place(os.environ) as place:
            command, env = build_command(num_ranks, arguments, launcher=choose_launcher(os.environ, backend))
            found, text = _listen_to_ranks(command, {**env, **place} if backend == "torch" else env, limit_s, on_stage)
    except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
        found, text = None, str(error)
    if found is not None:
        return found
    own = {"join": False, "device": device, "probe_seconds": 0.0, "machine": machine}
    remedy = "start one rank by hand with the same mpirun; load the MPI of the set-up, or use the site's launcher without -np"
    failure = Finding("launcher", "problem", f"{num_ranks} ranks do not start: {_shortened(text)}", remedy)
    return _document(read_launcher({}), [_alone(own, limit_s, on_stage)], [failure], joined=False)


def _backend(option: str, info: LauncherInfo) -> str:
    # As comm.choose_backend, but that what is missing is for the page to say.
    return ("torch" if info.name == "torchrun" else "horovod") if option == "auto" else option


def tell_launching_process(**line: Any) -> None:
    """Says something to the process that waits in `examine_by_launching`."""
    print(_MARK + json.dumps(line), flush=True)


def wait_for_rank_0() -> None:
    """Gives rank 0 time to say its page before this rank's exit makes the launcher end the job."""
    time.sleep(_PATIENCE_S)


def _alone(arguments: dict[str, Any], limit_s: float, on_stage: OnStage) -> Facts:
    """Returns what this rank finds without Horovod and MPI, as far as it comes."""
    outcome = supervise({**arguments, "join": False}, limit_s=limit_s, on_stage=on_stage)
    return outcome.facts


def judge(ranks: Sequence[Facts], *, joined: bool) -> list[Finding]:
    """Returns the findings in the order in which people should read them.

    Args:
        ranks: facts of the ranks, in rank order; of this rank alone where they did not meet.
        joined: whether the ranks met; else what only all ranks together show is left out.
    """
    judges: list[Callable[[Sequence[Facts]], list[Finding]]] = [
        software.versions, software.horovod, software.mpi_library, software.world,
        hardware.devices, hardware.cores, hardware.shared_memory, hardware.kernels, hardware.speeds,
    ]  # fmt: skip
    if joined:
        judges += [hardware.claims, hardware.collectives, hardware.links]
    return [finding for one in judges for finding in one(ranks)]


def _failure(outcome: Outcome, limit_s: float) -> Finding:
    stage = outcome.stage or "start"
    what, remedy = _STAGES.get(stage, (f"{stage} fails", None))
    subject = {"start": "Python", "torch": "torch", "horovod": "Horovod", "mpi4py": "mpi4py"}.get(stage, stage)
    text = _shortened(outcome.text)
    if outcome.kind == "hang":
        text = f"{what} within {limit_s:g} s" + (f": {text}" if text else "")
        remedy = (
            _NO_MEETING if stage == "world" else f"{remedy or 'look what it waits for'}; a slow start needs a larger --limit"
        )
    elif outcome.kind == "ended":
        text = "the launcher ended the job here" + (f": {text}" if text else "; the message of another rank says why")
        remedy = None if text else remedy
    else:
        if f"No module named '{stage}'" in text:
            remedy = "scripts/setup.sh" + ("; or, to try without Horovod, --backend torch" if stage == "horovod" else "")
        text = f"{what}: {text}"
    return Finding(subject, "problem", text, remedy)


def _shortened(text: str) -> str:
    """Returns the end of a long text, from a whole line on where it has several."""
    text = "\n".join(line.strip() for line in text.strip().splitlines() if line.strip())
    if len(text) > _MOST_CHARACTERS:
        text = "... " + text[-_MOST_CHARACTERS:].partition("\n" if "\n" in text[-_MOST_CHARACTERS:] else " ")[2]
    return text


def _document(info: LauncherInfo, ranks: Sequence[Facts], failures: list[Finding], *, joined: bool) -> dict[str, Any]:
    now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    hosts = list(dict.fromkeys(facts["machine"]["host"] for facts in ranks))
    by = "started alone" if info.name == "none" else f"under {info.name}"
    who = f"rank {info.rank} of {info.world_size}" if not joined and info.world_size else count(len(ranks), "rank")
    shown = ", ".join(hosts[:4]) + (f" and {len(hosts) - 4} more" if len(hosts) > 4 else "")
    findings = [*failures, *judge(ranks, joined=joined)]
    return document(f"hvd-adaptive doctor: {who} {by}, on {shown}; {now}", findings, ranks)


def _listen_to_ranks(
    command: Sequence[str], env: dict[str, str], limit_s: float, on_stage: OnStage
) -> tuple[dict[str, Any] | None, str]:
    """Runs the launcher; returns rank 0's page and what was said besides. From the main thread."""
    found: dict[str, Any] | None = None
    other: list[str] = []
    with tempfile.TemporaryFile() as errors, ending_signals():
        child = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, start_new_session=True
        )
        assert child.stdout is not None
        hung, buffer = False, b""
        try:
            while True:
                # A check, and the fallback's after it, may take its limit before rank 0 says the next word.
                if not select.select([child.stdout], [], [], 2 * limit_s + _END_LIMIT_S)[0]:
                    hung = True
                    break
                chunk = os.read(child.stdout.fileno(), 1 << 16)
                if not chunk:
                    break
                *lines, buffer = (buffer + chunk).split(b"\n")
                for line in (raw.decode(errors="replace") for raw in lines):
                    if not line.startswith(_MARK):
                        other.append(line)
                        continue
                    said = json.loads(line[len(_MARK) :])
                    found = said.get("document", found)
                    if "stage" in said:
                        on_stage(said["stage"])
            child.wait(_END_LIMIT_S if hung or found else limit_s)
        except subprocess.TimeoutExpired:
            hung = True
        finally:
            if child.poll() is None:
                child.terminate()
                try:
                    child.wait(_END_LIMIT_S)
                except subprocess.TimeoutExpired:
                    os.killpg(child.pid, signal.SIGKILL)
                    child.wait()
            child.stdout.close()
        errors.seek(0)
        text = "\n".join([*other, errors.read().decode(errors="replace")])
    how = f"{command[0]} " + ("did not end in time" if hung else f"ended with exit code {child.returncode}")
    return found, f"{how}\n{text}"

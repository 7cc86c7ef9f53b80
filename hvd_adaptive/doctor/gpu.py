"""``hvd-adaptive doctor --gpu``: checks a first GPU node, each check in processes that may crash or hang. Imports no torch.

Its file can be attached to a report: it holds neither names of hosts and people nor the environment.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hvd_adaptive.cluster.relaunch import choose_launcher, meeting_place, python_module, ranks_command
from hvd_adaptive.doctor.findings import Facts, Finding, count
from hvd_adaptive.doctor.gpu_verdict import WHAT, judge_check
from hvd_adaptive.doctor.machine import cpu_model, horovod_build, installed_versions
from hvd_adaptive.doctor.supervise import ending_signals, how_it_ended
from hvd_adaptive.doctor.text_page import document

# Seconds of each check; a GPU's first use loads libraries from disk, and kernels compile.
LIMITS_S = {"gpu": 40.0, "kernels": 60.0, "codecs": 40.0, "events": 30.0, "allreduce": 40.0, "sharing": 40.0, "training": 60.0}
TOTAL_S = 175.0
_TAIL_CHARACTERS = 1500
_END_S = 3.0
_MOST_RANKS = 4
OnCheck = Callable[[str], None]


def examine_gpu(
    *, backend: str, on_check: OnCheck = lambda name: None, limits_s: Mapping[str, float] = LIMITS_S
) -> dict[str, Any]:
    """Runs all checks and returns the page's contents. From the main thread.

    Args:
        backend: what carries the ranks' tensors.
        on_check: called when a check begins.
        limits_s: seconds of each check; all together take at most ``TOTAL_S``.
    """
    start = time.monotonic()
    results: dict[str, Facts] = {}
    for name, limit_s in limits_s.items():
        num_gpus = results.get("gpu", {}).get("num_gpus", 0)
        if name != "gpu" and not num_gpus:
            break
        on_check(name)
        left_s = TOTAL_S - (time.monotonic() - start)
        if left_s < 5 and results:
            results[name] = {"error": f"not begun after {TOTAL_S - left_s:.0f} s of other checks", "kind": "late"}
            continue
        ranks = {"allreduce": min(num_gpus, _MOST_RANKS), "sharing": 2, "training": 2}.get(name)
        one_gpu = name == "sharing" or (name == "training" and num_gpus == 1)
        device = "auto" if name == "gpu" else "cuda:0" if one_gpu else "cuda"
        found = run_check(name, device=device, num_ranks=ranks, backend=backend, limit_s=min(limit_s, left_s))
        if found.get("kind") == "hang" and left_s < limit_s:
            # The time of all checks was over, not its own: the node is slow, and nothing says that it hung.
            found["kind"] = "late"
        results[name] = found
    findings = [judge_check(name, facts) for name, facts in results.items()]
    skipped = [name for name in limits_s if name not in results]
    if skipped:
        findings.append(Finding("not tried", "warning", "; ".join(WHAT[name] for name in skipped)))
    facts = {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_model(),
        "versions": installed_versions(),
        "horovod_built_for": horovod_build(),
        "backend": backend,
        "seconds": round(time.monotonic() - start, 1),
        "checks": results,
    }
    page = document("hvd-adaptive doctor --gpu", findings, [facts])
    return cleaned({**page, "verdict": verdict(results, page["problems"])})


def verdict(results: Mapping[str, Facts], num_problems: int) -> str:
    """Returns the last line of the page.

    Args:
        results: the facts of each check that was begun.
        num_problems: among the findings.
    """
    if not results.get("gpu", {}).get("num_gpus"):
        return "No GPU that torch can use: nothing was tried, and nothing is shown. Training on CPUs is another question."
    if num_problems:
        return f"{count(num_problems, 'problem')}: do not train on this node's GPUs before they are mended."
    if late := [WHAT[name] for name, facts in results.items() if facts.get("kind") == "late"]:
        return f"What was tried works. The time was over before {' and '.join(late)}: run it again."
    return "This node's GPUs do what training needs."


def run_check(
    name: str, *, device: str, num_ranks: int | None, backend: str, limit_s: float, extra: Mapping[str, str] | None = None
) -> Facts:
    """Runs a check in processes of its own; returns its facts, or {"error": text, "kind": "crash", "hang" or ""}.

    Args:
        name: of the check.
        device: of its ranks.
        num_ranks: ranks under the launcher; None: one process without.
        backend: what carries the ranks' tensors.
        limit_s: seconds after which it is ended.
        extra: variables of the processes besides this one's.
    """
    environment = dict(os.environ)
    with tempfile.TemporaryDirectory(prefix="hvd-adaptive-gpu-") as folder, contextlib.ExitStack() as stack:
        report = Path(folder) / "facts.json"
        command = [*python_module("hvd_adaptive.doctor.gpu_checks"), name, device, backend, str(report)]
        if num_ranks is not None:
            try:
                launcher = choose_launcher(environment, backend)
                command, environment = ranks_command(num_ranks, command, launcher=launcher)
            except RuntimeError as error:
                return {"error": str(error), "kind": ""}
            if backend == "torch":
                environment |= stack.enter_context(meeting_place(environment))
        code, said = _run(command, {**environment, **(extra or {})}, limit_s)
        facts: Facts | None = None
        with contextlib.suppress(OSError, ValueError):
            facts = json.loads(report.read_text())
    if facts is not None and (code == 0 or "error" in facts):
        return facts
    tail = said.strip()[-_TAIL_CHARACTERS:]
    if code is None:
        return {"error": f"not over after {limit_s:.0f} s. {tail}".strip(), "kind": "hang"}
    return {"error": f"{how_it_ended(code)}. {tail}".strip(), "kind": "crash"}


def _run(command: Sequence[str], environment: Mapping[str, str], limit_s: float) -> tuple[int | None, str]:
    """Runs a command; returns its exit code, None where it was ended after its time, and what it said. From the main thread."""
    with tempfile.TemporaryFile() as output, ending_signals():
        child = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )  # fmt: skip
        code: int | None = None
        try:
            code = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            # A launcher ends its ranks, which are in sessions of their own.
            child.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_END_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        output.seek(0)
        return code, output.read().decode(errors="replace")


def cleaned(value: Any) -> Any:
    """Returns JSON values without names of this host and its person, and folders of theirs."""
    if isinstance(value, dict):
        return {key: cleaned(part) for key, part in value.items()}
    if isinstance(value, list):
        return [cleaned(part) for part in value]
    if not isinstance(value, str):
        return value
    for private, public in _private():
        # Programs write a host's name with its domain or without.
        domain = r"(\.[\w-]+)*" if public == "HOST" else ""
        value = re.sub(rf"(?<![\w-]){re.escape(private)}{domain}(?![\w-])", public, value)
    return value


def _private() -> list[tuple[str, str]]:
    names = [(str(Path.home()), "~"), (sys.prefix, "PREFIX"), (os.getcwd(), "FOLDER")]
    host = socket.gethostname()
    names += [(name, "HOST") for name in (host, host.partition(".")[0])]
    with contextlib.suppress(KeyError, OSError):
        names.append((getpass.getuser(), "USER"))
    # Longer ones first: a folder may be inside of another.
    return sorted(((p, q) for p, q in names if len(p) > 2 and p != "root"), key=lambda pair: -len(pair[0]))

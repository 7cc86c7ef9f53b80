"""What the facts of ``hvd-adaptive doctor --gpu`` mean, in plain words. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable

from hvd_adaptive.doctor.findings import Facts, Finding, amount, count, seconds

# A step's events may miss what the process does between two steps, and no more.
_LEAST_EVENTS, _MOST_EVENTS = 0.7, 1.05
# Part of the steps' time in which their work was given out: above it the device was never behind, and events prove little.
_MOST_LAUNCHES = 0.5
# Of a copy's speed: slower codecs are no use on any link between GPUs.
_LEAST_CODEC_SPEED = 0.02
_SLOW_COMPILE_S = 30.0
_AGAIN = "run it again: libraries load and kernels compile more slowly the first time"
_REPORT_IT = "attach the file to a report: this is ours to mend"


def judge_check(name: str, facts: Facts) -> Finding:
    """Returns what a check's facts mean.

    Args:
        name: of the check.
        facts: as it returned them; {"error": text} where it failed, with "kind" where it crashed or hung, or was ended early.
    """
    if facts.get("kind") == "late":
        return Finding(name, "warning", f"{WHAT[name]}: not tried, as the time of all checks was over: {facts['error']}", _AGAIN)
    if "error" in facts:
        kind = {"crash": "crashed", "hang": "hung"}.get(facts.get("kind", ""), "failed")
        return Finding(name, "problem", f"{WHAT[name]} {kind}: {facts['error']}", _REMEDY.get(name, _REPORT_IT))
    return _JUDGES[name](facts)


def _gpu(facts: Facts) -> Finding:
    if not facts["num_gpus"]:
        built = "this torch is built without CUDA" if facts["cuda"] is None else f"torch is built for CUDA {facts['cuda']}"
        return Finding(
            "gpu", "problem", f"torch sees no GPU here: {built}. Nothing of a GPU was tried.",
            "run it on a node with a GPU (nvidia-smi shows it), inside of a job that has been given one; "
            "scripts/setup.sh --cuda installs what a GPU needs",
        )  # fmt: skip
    one = f"{facts['name']} (compute capability {facts['capability']}, {amount(facts['memory_bytes'])})"
    many = f", {facts['num_gpus']} GPUs in view" if facts["num_gpus"] > 1 else ""
    if facts["sum"] != 1000:
        return Finding("gpu", "problem", f"{one}: a sum of 1000 ones is {facts['sum']:g}", "the GPU or its driver is broken")
    if facts["num_different_gpus"] != facts["num_gpus"]:
        return Finding("gpu", "problem", f"{one}{many}, of which some have the same UUID", _REPORT_IT)
    return Finding("gpu", "ok", f"{one}{many}; torch {facts['torch']}, CUDA {facts['cuda']}, NCCL {_dotted(facts['nccl'])}")


def _kernels(facts: Facts) -> Finding:
    if facts["differing"]:
        named = "; ".join(facts["differing"][:4])
        text = f"{len(facts['differing'])} of {facts['codes']} codes differ from the CPU's bits: {named}"
        return Finding("kernels", "problem", text, f"use no compression on this GPU; {_REPORT_IT}")
    text = f"{facts['codes']} codes have the CPU's bits; the first one took {seconds(facts['compile_s'])} to compile"
    if facts["compile_s"] > _SLOW_COMPILE_S:
        return Finding("kernels", "warning", text, "let TRITON_CACHE_DIR be a local folder that stays")
    return Finding("kernels", "ok", text)


def _codecs(facts: Facts) -> Finding:
    parts, slow = [], []
    for name, speed in facts["codecs"].items():
        parts.append(f"{name} {speed['encode_gb_s']:.0f} and {speed['decode_add_gb_s']:.0f}")
        if min(speed["encode_gb_s"], speed["decode_add_gb_s"]) < _LEAST_CODEC_SPEED * speed["copy_gb_s"]:
            slow.append(name)
    copy = max(speed["copy_gb_s"] for speed in facts["codecs"].values())
    text = f"GB/s encoded, and decoded and added: {', '.join(parts)}; a copy {copy:.0f}"
    if slow:
        return Finding("codecs", "warning", f"{text}. Too slow to be of use: {', '.join(slow)}", _REPORT_IT)
    return Finding("codecs", "ok", text)


def _events(facts: Facts) -> Finding:
    part, launched = facts["event_s"] / facts["wall_s"], facts["launch_s"] / facts["wall_s"]
    text = f"events of {facts['num_steps']} steps add up to {part:.0%} of the wall clock's {seconds(facts['wall_s'])}"
    if not facts["in_order"] or not _LEAST_EVENTS <= part <= _MOST_EVENTS:
        return Finding("events", "problem", text, f"ranks' speeds would be wrong: use --batch-size-rule fixed; {_REPORT_IT}")
    if launched > _MOST_LAUNCHES:
        remedy = "is another program using this host's cores? Then the GPU waits for this process, in training as well"
        return Finding("events", "warning", f"{text}, but giving out the work took {launched:.0%} of it", remedy)
    return Finding("events", "ok", f"{text}; giving out the work took {launched:.0%} of it")


def _allreduce(facts: Facts) -> Finding:
    text = f"{count(facts['world_size'], 'rank')} over {facts['carrier'] or 'one process'}: sums of CUDA tensors "
    if not facts["right"]:
        return Finding("allreduce", "problem", f"{text}are WRONG", _REPORT_IT)
    text += f"are right, {facts['gb_s']:.3g} GB/s"
    if facts["world_size"] == 1:
        return Finding("allreduce", "warning", f"{text}. One GPU: NCCL between GPUs was not tried", "run it on a node with two")
    return Finding("allreduce", "ok", text)


def _sharing(facts: Facts) -> Finding:
    if not facts["found"] or facts["own_gpus"]:
        return Finding("sharing", "problem", "two ranks on one GPU were not found by its UUID", _REPORT_IT)
    if not facts["right"]:
        return Finding("sharing", "problem", "two ranks on one GPU: their sums through the host are WRONG", _REPORT_IT)
    return Finding("sharing", "ok", f"two ranks on one GPU find it by its UUID; sums through the host: {facts['gb_s']:.3g} GB/s")


def _training(facts: Facts) -> Finding:
    losses = facts["losses"]
    text = (
        f"{len(facts['samples'])} ranks, {len(losses)} merges of 4 bits in {seconds(facts['seconds'])}: loss {losses[0]:.3f} to "
        f"{losses[-1]:.3f}, samples of the ranks {', '.join(map(str, facts['samples']))}, models equal after every merge"
    )
    if not losses[-1] < 0.9 * losses[0]:
        return Finding("training", "problem", f"{text}; the loss does not fall", _REPORT_IT)
    if not all(facts["samples"]):
        return Finding("training", "problem", f"{text}; a rank got nothing to compute", _REPORT_IT)
    return Finding("training", "ok", text)


def _dotted(version: list[int]) -> str:
    return ".".join(map(str, version))


_JUDGES: dict[str, Callable[[Facts], Finding]] = {
    "gpu": _gpu, "kernels": _kernels, "codecs": _codecs, "events": _events, "allreduce": _allreduce, "sharing": _sharing,
    "training": _training,
}  # fmt: skip
WHAT = {
    "gpu": "the look at the GPU",
    "kernels": "the comparison of the kernels' bits",
    "codecs": "the measurement of the codecs",
    "events": "the measurement of steps by events",
    "allreduce": "sums over ranks",
    "sharing": "two ranks on one GPU",
    "training": "a short training",
}
_REMEDY = {
    "gpu": "nvidia-smi and dmesg say what the driver thinks; torch.cuda.is_available() must be True",
    "allreduce": "NCCL_DEBUG=INFO says what NCCL tried; --backend torch does without Horovod; see docs/troubleshooting.md",
}

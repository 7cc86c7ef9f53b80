"""Judges devices, cores, memory, speed and links. Pure: facts in, findings out."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence

from hvd_adaptive.cluster.device_places import DevicePlace, missing_gpus, shared_devices
from hvd_adaptive.cluster.patience import BUSY_WAITING, NOT_BUILT
from hvd_adaptive.doctor.findings import (
    MOST_NAMED,
    Facts,
    Finding,
    amount,
    count,
    errors_of,
    good,
    numbers,
    percent,
    ranks_by_host,
    seconds,
    shown,
    span,
)

# Below this part of the median of ranks with the same device a rank is called slow.
SLOW_RANK = 0.8
SLOW_LINK = 0.5
# A claim between hosts takes tens of microseconds on an idle network; two ranks on one core make it milliseconds.
SLOW_CLAIM_S = 2e-3
STARVED_SHARE = 0.75
_DOCKER_SHM_BYTES = 64 << 20
_SHM_BYTES_A_RANK = 8 << 20


def devices(ranks: Sequence[Facts]) -> list[Finding]:
    """Maps ranks to GPUs, and finds those that are shared, idle or not seen."""
    findings = [Finding("devices", "problem", f"{numbers(who)}: {text}") for text, who in errors_of(ranks, "device").items()]
    chosen = [good(facts, "device") for facts in ranks]
    places = [DevicePlace(**{**one["place"], "visible": tuple(one["place"]["visible"])}) for one in chosen if one]
    try:
        warnings = [missing_gpus(places), shared_devices(places)]
        findings += [Finding("devices", "warning", warning) for warning in warnings if warning]
    except RuntimeError as error:
        findings.append(Finding("devices", "problem", str(error)))
    for facts in ranks:
        smi, torch = facts["machine"]["nvidia_smi"], good(facts, "torch")
        if not smi or not torch:
            continue
        host = facts["machine"]["host"]
        if "error" in smi:
            text = f"nvidia-smi fails on {host}: {smi['error']}"
            findings.append(
                Finding("devices", "problem", text, "the driver is not well: drain the host, or reload the driver")
            )
            break
        if smi["gpus"] and not torch["num_gpus"]:
            why = (
                "this torch is a CPU build"
                if torch["cuda"] is None
                else "torch sees none (CUDA_VISIBLE_DEVICES, driver version)"
            )
            text = f"{host} has {len(smi['gpus'])} GPU(s), but {why}"
            findings.append(Finding("devices", "warning", text, "scripts/setup.sh --torch-spec with a CUDA build of torch"))
            break
    if findings:
        return findings
    lines = []
    for host, members in ranks_by_host(ranks).items():
        known = {rank: one for rank in members if (one := chosen[rank])}
        if not known:
            continue
        if all(one["device"] == "cpu" for one in known.values()):
            lines.append(f"{host}: CPU, {span([one['threads'] for one in known.values()])} thread(s) a rank")
        else:
            listed = [f"{rank}={one['device']} {one.get('name', '')}".strip() for rank, one in known.items()]
            lines.append(f"{host}: {shown(listed)}")
    return [Finding("devices", "ok", shown(lines, "; "))] if lines else []


def cores(ranks: Sequence[Facts]) -> list[Finding]:
    """Compares the cores that the ranks of a host may run on."""
    findings, fits = [], []
    for host, members in ranks_by_host(ranks).items():
        masks = {rank: set(ranks[rank]["machine"]["cores"]) for rank in members}
        sharers: defaultdict[int, list[int]] = defaultdict(list)
        for rank, mask in masks.items():
            for core in mask:
                sharers[core].append(rank)
        own = {rank: sum(1 / len(sharers[core]) for core in mask) for rank, mask in masks.items()}
        crowded = [rank for rank in members if own[rank] < 1 - 1e-9]
        available = ranks[members[0]]["machine"]["host_cores"]
        idle = sorted(set(available) - set(sharers))
        if crowded and idle:
            taken = sorted({core for rank in crowded for core in masks[rank]})
            bound = f"core{'s' * (len(taken) > 1)} {shown(taken)}"
            text = f"{numbers(crowded)} on {host} are bound to {bound}, and no rank uses {shown(idle)}"
            remedy = "mpirun --bind-to none; Slurm: --cpu-bind=none or --cpus-per-task=K; no taskset around the launcher"
            findings.append(Finding("cores", "problem", text, remedy))
        elif crowded:
            text = f"{len(members)} ranks on {host} share {count(len(sharers), 'core')}: they wait for each other's core"
            findings.append(
                Finding("cores", "warning", text, "start fewer ranks a host, or ask the scheduler for more cores")
            )
        elif max(own.values()) < len(available) / len(members) / 2:
            text = f"the launcher binds each rank on {host} to {span(own.values())} of {len(available)} cores"
            findings.append(Finding("cores", "warning", text, "mpirun --bind-to none, or Slurm's --cpus-per-task"))
        quota = ranks[members[0]]["machine"]["cpu_quota"]
        if quota is not None and quota < len(members):
            text = f"{host} grants {quota:.3g} cores of time (CPU quota) to {len(members)} ranks"
            findings.append(
                Finding("cores", "warning", text, "raise the container's or job's CPU limit, or set --num-threads")
            )
        if any(ranks[rank]["machine"]["busy_waiting"] for rank in members):
            findings.append(Finding("cores", "warning", f"on {host} {BUSY_WAITING}", NOT_BUILT))
        fits.append(f"{span(own.values())} of {len(available)} a rank")
    return findings or [Finding("cores", "ok", "; ".join(dict.fromkeys(fits)))]


def shared_memory(ranks: Sequence[Facts]) -> list[Finding]:
    """Judges the room in /dev/shm."""
    findings, sizes = [], []
    for host, members in ranks_by_host(ranks).items():
        machine = ranks[members[0]]["machine"]
        if machine["shm_bytes"] is None:
            continue
        total, free = machine["shm_bytes"], machine["shm_free_bytes"]
        text = f"/dev/shm on {host} has {amount(free)} free of {amount(total)}"
        remedy = "docker run --shm-size=1g, or remove what fills it"
        if free < _SHM_BYTES_A_RANK * len(members):
            wrong = f"{text}: too little for MPI's buffers of {count(len(members), 'rank')}"
            findings.append(Finding("shared memory", "problem", wrong, remedy))
        elif total <= _DOCKER_SHM_BYTES:
            wrong = f"{text}: DataLoader workers fill that and die with a bus error"
            findings.append(Finding("shared memory", "warning", wrong, remedy))
        sizes.append((free, text))
    return findings or ([Finding("shared memory", "ok", min(sizes)[1])] if sizes else [])


def kernels(ranks: Sequence[Facts]) -> list[Finding]:
    """Says whether the codecs' kernels compile."""
    wrong = [
        Finding(
            "kernels", "warning", f"{numbers(who)}: {text}", "--compression will not work as it should until this is mended"
        )
        for text, who in errors_of(ranks, "kernels").items()
    ]
    found = [one for facts in ranks if (one := good(facts, "kernels"))]
    if wrong or not found:
        return wrong
    slowest = max(found, key=lambda one: float(one["first_s"]))
    text = f"{slowest['backend']}, ready in {seconds(slowest['first_s'])}"
    if slowest["backend"] == "torch":
        return [Finding("kernels", "warning", "no Triton: codecs run several times slower on the GPU", "pip install triton")]
    return [Finding("kernels", "ok", f"{text} (compiled once, kept on disk)")]


def speeds(ranks: Sequence[Facts]) -> list[Finding]:
    """Compares the compute probes of ranks with the same device model; of CPUs, of those with as many threads."""
    by_model: defaultdict[str, dict[int, Facts]] = defaultdict(dict)
    for rank, facts in enumerate(ranks):
        speed, device = good(facts, "speed"), facts.get("device", {})
        if speed:
            cpu = f"{facts['machine']['cpu']}, {count(device.get('threads', 'unknown'), 'thread')}"
            by_model[device.get("name") or cpu][rank] = speed
    findings = [Finding("speed", "warning", f"{numbers(who)}: {text}") for text, who in errors_of(ranks, "speed").items()]
    starved = {
        rank: one["cpu_share"]
        for members in by_model.values()
        for rank, one in members.items()
        if one.get("cpu_share", 1) < STARVED_SHARE
    }
    if starved:
        whose = "its threads'" if len(starved) == 1 else "their threads'"
        text = f"{numbers(sorted(starved))} got {percent(starved.values())} of {whose} time: something else runs on the cores"
        findings.append(Finding("busy cores", "warning", text, "end what else runs there (top), or take fewer ranks a host"))
    texts = []
    for model, members in by_model.items():
        median = statistics.median(one["flops"] for one in members.values())
        relative = {rank: one["flops"] / median for rank, one in members.items()}
        spread = f" (ranks: {percent(relative.values())} of that)" if len(relative) > 1 else ""
        texts.append(f"{model}: {median / 1e9:.3g} GFLOP/s{spread}")
        for rank in sorted(relative.keys() - starved.keys()):
            if relative[rank] < SLOW_RANK:
                where = f"rank {rank} on {ranks[rank]['machine']['host']}"
                text = f"{where} computes at {relative[rank]:.0%} of the median of its kind ({model})"
                look = "that host's clock, temperature and neighbours"
                if "cpu_share" not in members[rank]:
                    look = "nvidia-smi -q -d PERFORMANCE,TEMPERATURE there"
                remedy = f"look at {look}; adaptive training goes on with it, plain Horovod waits for it"
                findings.append(Finding("slow rank", "warning", text, remedy))
    if not texts:
        return findings
    return [*findings[:MOST_NAMED], Finding("speed", "ok", "; ".join(texts))]


def claims(ranks: Sequence[Facts]) -> list[Finding]:
    """Judges the time of a claim at the shared cursor."""
    found = {rank: one for rank, facts in enumerate(ranks) if (one := good(facts, "claims"))}
    if not found:
        return []
    slow = [rank for rank, one in found.items() if one["median_s"] > SLOW_CLAIM_S]
    medians = [one["median_s"] for one in found.values()]
    text = f"one claim takes {seconds(statistics.median(medians))}, at worst {seconds(max(medians))} (medians of ranks)"
    text += f"; 99% within {seconds(max(one['p99_s'] for one in found.values()))}"
    if slow:
        remedy = "rank 0's host serves the claims and must not be crowded: see what else runs there (top), or take larger batches"
        return [Finding("claims", "warning", f"{text}; slow on {numbers(slow)}", remedy)]
    return [Finding("claims", "ok", text)]


def collectives(ranks: Sequence[Facts]) -> list[Finding]:
    """Says what small and large collectives of all ranks take."""
    found = [one for facts in ranks if (one := good(facts, "collectives"))]
    if not found:
        return []
    small, large, gather = (max(one[name] for one in found) for name in ("small_s", "large_s", "gather_s"))
    size = found[0]["large_bytes"]
    text = f"allreduce of {amount(found[0]['small_bytes'])} {seconds(small)}, of {amount(size)} {seconds(large)}"
    return [Finding("collectives", "ok", f"{text} ({size / large / 1e9:.2g} GB/s); gather {seconds(gather)}")]


def links(ranks: Sequence[Facts]) -> list[Finding]:
    """Compares the links between hosts."""
    found = ranks[0].get("links")
    if not isinstance(found, list) or not found:
        return []
    median = statistics.median(one["bytes_per_s"] for one in found)
    findings = [
        Finding(
            "links",
            "warning",
            f"{one['from']} to {one['to']}: {one['bytes_per_s'] / 1e6:.3g} MB/s, {one['bytes_per_s'] / median:.0%} of the median",
            "check that host's cable, port and driver (ethtool, ibstat), or which network MPI uses (btl_tcp_if_include)",
        )
        for one in found
        if one["bytes_per_s"] < SLOW_LINK * median
    ]
    rates = [one["bytes_per_s"] / 1e6 for one in found]
    rate = f"{min(rates):.3g}" if max(rates) < 1.01 * min(rates) else f"{min(rates):.3g} to {max(rates):.3g}"
    small_s = max(one["small_s"] for one in found)
    text = f"{count(len(found), 'link')} between hosts: {rate} MB/s; {amount(found[0]['small_bytes'])} in {seconds(small_s)}"
    remedy = None
    if max(rates) < 300:
        remedy = "slow for large models: --compression maxmin:4 (docs/compression.md), longer --mega-batch"
    return [*findings[:MOST_NAMED], Finding("links", "ok", text, remedy)]

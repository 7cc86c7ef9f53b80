"""Whether merges are encoded where nobody has said so."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from hvd_adaptive.comm.protocols import Collectives, is_one_host
from hvd_adaptive.compress.codec import compile_kernels
from hvd_adaptive.compress.parse import parse_codec
from hvd_adaptive.compress.policy import TensorInfo, parse_policy
from hvd_adaptive.config import Config
from hvd_adaptive.exchange.exchange import Exchange

log = logging.getLogger(__name__)

# A trial of 2 MB takes 0.2 s over 100 Mbit/s, and more than a message's own time over 1 Gbit/s. It must be so many times faster.
_TRIAL_ELEMENTS = 1 << 19
_LEAST_GAIN = 1.5
_NUM_TRIALS = 2


def chosen_codec(codec: str, config: Config, transport: Collectives, *, device: torch.device, num_elements: int) -> str:
    """Returns the codec if ranks are on several hosts and sums are much faster with it, else "none". COLLECTIVE.

    Rank 0 warns of a codec, which loses a part of what is sent, and says how to do without.

    Args:
        codec: to try.
        config: the reducer, and whether codecs' losses are kept.
        transport: the world.
        device: of what will be summed.
        num_elements: of what will be summed, fp32.
    """
    if is_one_host(transport):
        return "none"
    # At least one: a rank whose shard of the model is empty takes part as well.
    num_tried = min(max(1, num_elements), _TRIAL_ELEMENTS)
    values = torch.randn(num_tried, dtype=torch.float32, generator=torch.Generator().manual_seed(0)).to(device)
    exchange = Exchange(transport, parse_policy(codec), reducer=config.reducer)
    compile_kernels(parse_codec(codec), device, error_feedback=config.error_feedback)
    # A matrix, as vectors are left as they are.
    infos = [TensorInfo("trial", (1, values.numel()))]
    candidates = {
        "none": lambda flat: transport.allreduce_sum_(flat, name="trial.none"),
        codec: lambda flat: exchange.sum_(flat, "trial", step=0, tensors=infos),
    }
    name, seconds = fastest(transport, candidates, values)
    if name != "none" and transport.speaks:
        log.warning(
            "compression: merges are encoded as %s, as %.1f MB take %.0f ms so, and %.0f ms in full. Set compression 'none' to "
            "send all bits, or %r to do without the trial",
            codec, values.nbytes / 1e6, 1e3 * seconds[name], 1e3 * seconds["none"], codec,
        )  # fmt: skip
    return name


def fastest(
    transport: Collectives, candidates: Mapping[str, Callable[[Tensor], None]], values: Tensor
) -> tuple[str, dict[str, float]]:
    """Times each candidate on a tensor and returns the name of the fastest, and the seconds of all. COLLECTIVE.

    The slowest rank's time counts, the median of the trials, after one more trial that compiles and connects; all ranks decide
    from the same numbers. Candidates take turns, so that a load that comes and goes disturbs all alike. The first
    candidate wins unless another takes less time by a factor.

    Args:
        transport: the world.
        candidates: each sums a tensor over ranks in place; in the same order on all ranks.
        values: what to sum; stays as it is.
    """
    seconds = np.zeros((_NUM_TRIALS + 1, len(candidates)))
    for trial in range(_NUM_TRIALS + 1):
        for index, (name, run) in enumerate(candidates.items()):
            flat = values.clone()
            transport.rendezvous(f"trial of {name}")
            begin = time.perf_counter()
            run(flat)
            if flat.is_cuda:
                torch.cuda.synchronize(flat.device)
            seconds[trial, index] = time.perf_counter() - begin
    slowest = transport.allgather_stats(seconds[1:].reshape(-1)).max(axis=0).reshape(_NUM_TRIALS, -1)
    medians = np.median(slowest, axis=0)
    best = int(medians.argmin())
    if medians[best] * _LEAST_GAIN > medians[0]:
        best = 0
    names = list(candidates)
    taken = dict(zip(names, medians.tolist(), strict=True))
    if transport.speaks:
        times = ", ".join(f"{name} {1e3 * value:.1f} ms" for name, value in taken.items())
        mib = values.numel() * values.element_size() / 2**20
        log.info("exchange: %s is the fastest for %.1f MiB (%s)", names[best], mib, times)
    return names[best], taken

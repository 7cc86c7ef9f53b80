"""How ranks share and merge: a frozen dataclass, validated on construction. Imports no MPI, and no torch as a rule."""

from __future__ import annotations

import difflib
import functools
from dataclasses import dataclass, fields
from typing import Any

from hvd_adaptive.combinations import SIZE_RULES, check_combinations
from hvd_adaptive.validation import check_codecs, check_ranges, check_types_and_choices, option

_LOCAL = ("local",)
# Options that are gone, as the files of older runs have them that did not set them.
GONE_OPTIONS = (("overlap_merge", False), ("outer_bias_correction", False))
# Values that are gone, so that a run that had them goes on with another one.
GONE_VALUES = (("reducer", "auto"),)


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """How ranks share the work and merge their models: all that :class:`hvd_adaptive.Session` needs.

    Every field is an option of ``hvd-adaptive train``, whose help describes it; ``metadata["help"]`` holds that text.

    Raises:
        ValueError: on construction, naming the field, the requirement and the value.
        TypeError: for an option that there is not.
    """

    strategy: str = option(
        "local",
        "local (default): ranks step alone, models are merged; sync: ranks share steps; horovod: plain",
        "local",
        "sync",
        "horovod",
        "sma",
    )
    backend: str = option(
        "auto",
        "what carries tensors: horovod, or torch.distributed; auto (default): torch under torchrun",
        *("auto", "horovod", "torch"),
    )
    island: str | None = option(
        None,
        "ranks that compute each batch together and merge as one: 'node' (those of a host), their number, or each island's, as "
        "in 1,3; batch_size is then an island's (default: each rank by itself)",
        strategy=_LOCAL,
    )
    batch_size: int = option(64, "samples in a rank's batch, at the start")
    min_batch_size: int | None = option(
        None, "smallest batch of a rank, samples (default: batch_size / 8, as in the paper)",
        strategy=("local", "sync"),
    )
    max_batch_size: int | None = option(
        None,
        "largest batch, a round's last: 1/16 more; samples (default: batch_size; proportional: 8 x)",
        strategy=("local", "sync"),
    )
    mega_batch: int | None = option(
        None, "samples over all ranks between two merges (default: 50 batches, at most 1/8 of the data)"
    )
    batch_size_rule: str | None = option(
        None,
        "how batch sizes follow the ranks' speeds; proportional: all ranks' steps take equally long, the sum of sizes stays; "
        "local: fixed (default), paper, heterogpu, proportional; sync: proportional (default), static (by the first 33 steps' "
        "speeds), fixed",
        *("fixed", "paper", "heterogpu", "static", "proportional"),
    )
    batch_size_step: float | None = option(
        None, "samples a batch size moves: beta of 'paper' (default: min_batch_size / 2), the step of 'heterogpu' (default: 32)",
        size_rule=("paper", "heterogpu"),
    )
    lr_rule: str = option(
        "auto",
        "how the learning rate follows a batch's size; auto: linear for sgd and momentum, none for adaptive optimizers",
        *("auto", "linear", "sqrt", "none"),
        strategy=_LOCAL,
    )
    reference_batch_size: int | None = option(
        None, "batch size at which the optimizer's own learning rate holds, for lr_rule linear and sqrt (default: batch_size)",
        strategy=_LOCAL,
    )
    warmup_epochs: float = option(0.0, "epochs at the start with the smallest batch size and a learning rate that rises linearly")
    lr_decay: float = option(0.0, "learning rate is divided by 1 + lr_decay x (epoch - warmup_epochs)")
    work: str = option(
        "samples",
        "what a batch size counts; with nonzeros a batch of long rows has fewer samples",
        "samples",
        "nonzeros",
        strategy=_LOCAL,
    )
    merge_weights: str = option(
        "auto",
        "what a rank counts in a merge: auto (default), updates, dual-averaging or fisher-rows",
        *("auto", "updates", "samples", "uniform", "paper", "heterogpu", "dual-averaging", "fisher-rows"),
        strategy=_LOCAL,
    )
    perturbation: bool = option(
        False, "the Adaptive SGD paper's perturbation of merge_weights paper and heterogpu",
        merge_weights=("paper", "heterogpu"),
    )
    perturbation_threshold: float = option(0.1, "L2 norm per parameter under which the perturbation acts", perturbation=(True,))
    perturbation_delta: float = option(0.1, "size of the perturbation", perturbation=(True,))
    outer_step: str | None = option(
        None,
        "how the merged change moves the model; none: directly; momentum (the paper's), nesterov (DiLoCo's): with momentum over "
        "merges; cautious: as nesterov where both have the same sign. With Adam and its kin it begins after 100 updates of the "
        "fastest rank (default: cautious for torch's Adam and its kin, in Session on several ranks; in train nesterov for SGD "
        "without momentum; else none)",
        "none", "momentum", "nesterov", "cautious",
        strategy=_LOCAL,
    )
    outer_lr: float | None = option(
        None, "learning rate of the outer step (default: 0.7 for nesterov, for cautious by its momentum, else 1)", strategy=_LOCAL
    )
    outer_momentum: float | None = option(
        None, "momentum of the outer step (default: 0.9; cautious: it looks back over the last fifth of all updates so far)",
        strategy=("local", "sma"), outer_step=(None, "momentum", "nesterov", "cautious"),
    )
    outer_state: str = option(
        "device",
        "where the global model, the outer step's velocity and what a codec has lost are; host: in pinned host memory, from "
        "where each merge takes them piece by piece, for models near the GPU's size",
        "device", "host",
        strategy=_LOCAL,
    )
    optimizer_state: str | None = option(
        None,
        "a rank's optimizer state after a merge (default: average for rowwise Adagrad, and for torch's Adagrad, Adam and its kin "
        "without compression; reset for LBFGS; else keep)",
        *("keep", "reset", "average"),
        strategy=_LOCAL,
    )
    hash_interval: int = option(
        10, "rounds between checks that all ranks hold the same model (sync: after rounds 1, 2, 4, ... as well); 0: never"
    )
    seed: int = option(0, "seed of the shuffling and of the model's initial weights")
    stall_limit_s: float = option(60.0, "seconds after which a dead, frozen or stuck rank ends the job")
    straggler_limit: float = option(
        3.0, "warn of a rank that computes this many times slower than the other ranks, or than before; 0: never"
    )
    drain_limit_s: float = option(
        60.0,
        "seconds that the ranks have after SIGUSR1 or SIGTERM to close the round and write a checkpoint; then the job ends with "
        "an older one",
    )
    slowdown: str | None = option(
        None, "emulate unequal ranks: for each rank, how many times as long its steps take, as in 8,8,4,2"
    )
    global_batch_size: int | None = option(
        None, "samples of a step over all ranks, for 'sync' (default: batch_size x number of ranks)",
        strategy=("sync",),
    )
    accumulation_steps: int = option(
        1, "micro-batches of each rank whose gradients are added up before a step, for 'sync'",
        strategy=("sync",),
    )
    micro_batch_size: int | None = option(
        None,
        "samples of every forward pass; a step adds up the gradients of several, so shapes stay the same and a compiled model is "
        "compiled once; for 'local' and 'sync' (default: whole batches, of any size)",
        strategy=("local", "sync"), accumulation_steps=(1,), work=("samples",), logical_ranks=(None,),
    )
    loss_reduction: str = option(
        "mean",
        "what the loss is, for 'sync': a mean or a sum over the samples of a batch, or a mean over targets (tokens, say), which "
        "the loop counts in batch.num_targets; for micro-batches of 'local': mean or targets",
        *("mean", "sum", "targets"),
        strategy=("local", "sync"),
    )
    logical_ranks: int | None = option(
        None,
        "train as this many logical ranks, which the ranks play in turn: the same bits for any number of ranks up to this, on "
        "equal hardware; nothing adapts to speeds",
    )
    record: bool = option(False, "write what --replay needs to repeat the run bit for bit")
    replay: str | None = option(
        None, "run directory of a recorded run: repeat it bit for bit, with its options and number of ranks"
    )
    num_threads: int | None = option(
        None,
        "torch's threads of each rank on a CPU; with logical_ranks part of the result (default: OMP_NUM_THREADS, else its "
        "share of the host's cores; 1 with logical_ranks)",
    )
    reference_ranks: int | None = option(
        None,
        "number of ranks that batch_size and the learning rate are meant for; with another number elastic_batch says what "
        "changes (default: the present number; with --elastic: --max-np)",
    )
    elastic_batch: str = option(
        "fixed-global",
        "what stays the same with another number of ranks; fixed-global: total batch and learning rate; fixed-per-rank: a rank's "
        "batch, while mega_batch, and the learning rate of sync and horovod, follow the number of ranks",
        *("fixed-global", "fixed-per-rank"),
    )
    dispatch: str = option(
        "dynamic",
        "who computes what of a mega-batch; dynamic: a rank that is free takes the next batch; equal: each rank has one Nth "
        "(with merge_weights uniform: plain local SGD); proportional: each rank has a part by its speed in the last round",
        "dynamic",
        "equal",
        "proportional",
        strategy=_LOCAL,
    )
    merge_period: str | None = option(
        None,
        "samples between two merges; fixed: mega_batch; auto: mega_batch, or more, so that merges take at most merge_share of "
        "the time (default: fixed; in Session and run auto for torch's Adam and its kin, from few batches a rank on)",
        "fixed",
        "auto",
        strategy=_LOCAL,
    )
    merge_share: float = option(
        0.03, "part of the time that merges may take, for merge_period auto",
        merge_period=("auto",),
    )
    sparse_merge: str = option(
        "auto",
        "of parameters with sparse gradients, merge only the rows that some rank touched; auto: where that takes less time",
        *("auto", "always", "never"),
        strategy=_LOCAL,
    )
    sma_alpha: float | None = option(
        None, "how far strategy sma (CROSSBOW's model averaging) pulls replicas to their mean, in (0, 1] (default: 1 / ranks)",
        strategy=("sma",),
    )
    merges_per_round: int | None = option(
        None,
        "merge the whole model so often in a round, all but the last time beside the next steps (default: 1; in Session up to 8 "
        "for torch's Adam and its kin on ranks of like speeds, where merges take long and nothing sets the length of rounds)",
        strategy=_LOCAL,
    )
    merge_fragments: int = option(
        1,
        "merge the model in so many fragments of layers, each at its own place of the round, beside the next steps (Streaming "
        "DiLoCo): the link carries one of them at a time",
        strategy=_LOCAL,
    )
    fragment_delay: float | None = option(
        None,
        "from sending a fragment to taking its sum in, as a part of a round, in [0, 1] (default: half of what is between two "
        "fragments)",
        strategy=_LOCAL,
    )
    fragment_alpha: float = option(
        0.5, "how much of its distance to the merged fragment a rank keeps, in [0, 1)",
        strategy=_LOCAL,
    )
    outlier_limit: float = option(
        0.0,
        "leave a rank's progress out of a merge where its norm is so many standard deviations above the rank's own history "
        "(A-EDiT: 3); 0: never",
        strategy=_LOCAL,
    )
    clip_delta: float = option(
        0.0, "largest norm of what a merge adds to the model, as far as the ranks' own norms bound it (A-EDiT: 10); 0: any",
        strategy=_LOCAL,
    )
    compression: str = option(
        "auto", "none, fp16, maxmin:4, ...; auto (default): none; in Session by a trial (docs/compression.md)",
        strategy=("local", "sync"),
    )
    reducer: str = option(
        "by-host",
        "how encoded values are summed; by-host: hierarchical where several hosts have several ranks each, equally many, "
        "else sra",
        *("by-host", "sra", "hierarchical", "allreduce"),
        strategy=("local", "sync"),
    )
    error_feedback: bool = option(True, "add what a codec has lost to what it encodes next; costs a copy of the model")
    auto_bits: int = option(
        0, "every so many merges ('local') or steps ('sync'), choose each layer's bits anew at --compression's error; 0: off"
    )

    def __post_init__(self) -> None:
        check_types_and_choices(self)
        check_ranges(self)
        check_combinations(self)
        check_codecs(self)

    @property
    def size_rule(self) -> str:
        """How batch sizes follow the ranks' speeds: ``batch_size_rule`` or the strategy's default."""
        return self.batch_size_rule or SIZE_RULES[self.strategy][0]

    @property
    def weight_rule(self) -> str:
        """What each rank's delta counts in a merge; 'updates' for 'auto', of which only ``train`` knows more."""
        return "updates" if self.merge_weights == "auto" else self.merge_weights

    @property
    def batch_size_bounds(self) -> tuple[int, int]:
        """Smallest and largest batch size, samples."""
        unit = self.micro_batch_size or 1
        low = self.min_batch_size if self.min_batch_size is not None else max(unit, self.batch_size // 8 // unit * unit)
        # The sum of sizes stays with 'proportional', so the fast ranks' must have room above the starting size.
        room = 8 if self.size_rule == "proportional" else 1
        high = self.max_batch_size if self.max_batch_size is not None else max(room * self.batch_size, low)
        return low, high

    @property
    def uses_groups(self) -> bool | None:
        """Whether the ranks may be split into groups, which a transport must know when it starts; see
        :func:`hvd_adaptive.comm.connect`."""
        if self.island is not None:
            return True
        return None if self.encodes and self.reducer == "by-host" else self.encodes and self.reducer == "hierarchical"

    @property
    def encodes(self) -> bool:
        """Whether a codec is set."""
        return self.compression not in ("auto", "none")

    @property
    def sums_seldom(self) -> bool:
        """Whether ranks sum anything only at the end of a round, and not in each step."""
        return self.strategy == "local" and self.island is None

    @property
    def measures_deltas(self) -> bool:
        """Whether ranks tell each other the norms of their deltas."""
        return self.outlier_limit > 0 or self.clip_delta > 0

    @property
    def merges_beside_steps(self) -> bool:
        """Whether the whole model is merged beside steps, but for the end of a round."""
        return (self.merges_per_round or 1) > 1

    @property
    def merge_delay(self) -> float:
        """From sending a fragment to taking its sum in, as a part of a round."""
        return 0.5 / self.merge_fragments if self.fragment_delay is None else self.fragment_delay

    @property
    def repeatable(self) -> bool:
        """Whether the run is recorded or replayed, so that its bits must repeat."""
        return self.record or self.replay is not None

    @property
    def compute_threads(self) -> int | None:
        """Threads that torch computes with, None where the launcher's environment decides."""
        return self.num_threads or (1 if self.logical_ranks else None)

    @property
    def mega_batch_samples(self) -> int:
        """Samples between two merges over all ranks, for data that are large enough."""
        return self.mega_batch if self.mega_batch is not None else 50 * self.batch_size

    @property
    def batch_size_step_samples(self) -> float:
        """Samples a batch size moves by."""
        if self.batch_size_step is not None:
            return self.batch_size_step
        return 32.0 if self.size_rule == "heterogpu" else self.batch_size_bounds[0] / 2

    @property
    def momentum_of_merges(self) -> float | None:
        """Momentum of the outer step; None: it follows the run."""
        return 0.9 if self.outer_momentum is None and self.outer_step != "cautious" else self.outer_momentum

    @property
    def outer_learning_rate(self) -> float | None:
        """Learning rate of the outer step; None: it follows from the momentum."""
        if self.outer_lr is not None or self.outer_step == "cautious":
            return self.outer_lr
        return 0.7 if self.outer_step == "nesterov" else 1.0


_set_fields = Config.__init__


@functools.wraps(_set_fields)
def _check_names(self: Config, **options: Any) -> None:
    known = [field.name for field in fields(Config)]
    for name in options.keys() - set(known):
        near = difflib.get_close_matches(name, known, n=2)
        raise TypeError(f"Config has no option {name!r}" + (f": did you mean {' or '.join(near)}?" if near else ""))
    _set_fields(self, **options)


Config.__init__ = _check_names  # type: ignore[method-assign]

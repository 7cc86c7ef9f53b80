"""What ``hvd-adaptive train`` trains, and for how long: a frozen dataclass. Imports neither torch nor MPI."""

from __future__ import annotations

from dataclasses import dataclass

from hvd_adaptive.combinations import check_needs
from hvd_adaptive.validation import check_not_negative, check_positive, check_types_and_choices, option

# Learning rates that did well on all data sets tried, for rows of unit length; benchmarks/records has them.
_LR = {"sgd": 2.0, "momentum": 1.0, "adagrad": 0.1, "rowwise-adagrad": 0.1, "adam": 0.0025, "adamw": 0.0025}


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """What ``hvd-adaptive train`` trains, on which data, for how long. Fields are options, as in :class:`Config`.

    Raises:
        ValueError: on construction, naming the field, the requirement and the value.
    """

    data: str | None = option(
        None,
        "XMC data: folder, PREFIX of PREFIX_train.txt[.gz], or file (default: data that come with it)",
    )
    test_data: str | None = option(None, "test data, where --data names one file")
    cache_dir: str | None = option(None, "folder of the binary cache (default: the user's cache folder)")
    out: str | None = option(None, "run directory (default: runs/NAME-DATE)")
    name: str | None = option(None, "label of the run in tables and pictures (default: the strategy)")
    epochs: float | None = option(
        None, "stop after X passes over the data (default: 50 without other limits)"
    )
    time_limit: float | None = option(None, "stop after X seconds of training at the end of a round; evaluation does not count")
    target_p1: float | None = option(None, "stop when P@1 on the test data reaches this, in (0, 1]")
    row_norm: str = option(
        "l2", "l2: each row of features is scaled to length 1, so that one learning rate fits all data; none: as in the files",
        "l2", "none",
    )
    hidden_size: int = option(128, "width of the hidden layer")
    input_gradients: str = option("sparse", "gradients of the input layer", "sparse", "dense")
    optimizer: str = option(
        "rowwise-adagrad",
        "rowwise-adagrad (default), adagrad, sgd, momentum, adam or adamw",
        *("sgd", "momentum", "adagrad", "rowwise-adagrad", "adam", "adamw"),
    )
    lr: float | None = option(
        None,
        "learning rate (default: 0.1 for Adagrad; docs/training.md has the others)",
    )
    momentum: float | None = option(
        None, "momentum of optimizer 'momentum' (default: 0.9)", optimizer=("momentum",)
    )
    weight_decay: float | None = option(
        None,
        "weight decay (adamw: 0.01, else 0); needs adamw, or dense gradients and not rowwise-adagrad",
    )
    device: str = option("auto", "auto, cpu, cuda or cuda:K")
    patience: int | None = option(
        None, "stop after N evaluations with no better P@1 (default: 10 without other limits)"
    )
    eval_rounds: int | None = option(
        None, "rounds between evaluations; 0: only at the end (default: 4 evaluations an epoch)"
    )
    eval_samples: int | None = option(
        None, "test samples that evaluations during the run use, the same each time (default: all)"
    )
    calibration: bool = option(True, "measure each rank's own speed before the run, for the utilisation")
    resume: str | None = option(
        None,
        "continue from a checkpoint; auto: the newest in --out, or a fresh start",
    )
    checkpoint_interval: int | None = option(
        None,
        "rounds between checkpoints; 0: none (default: as often as takes at most 5% of the time)",
    )
    keep_checkpoints: int = option(3, "newest checkpoints to keep")
    tensorboard: bool = option(
        False, "write TensorBoard scalars into the run directory; needs the package tensorboard"
    )

    def __post_init__(self) -> None:
        check_types_and_choices(self)
        check_positive(self, "epochs", "time_limit", "hidden_size", "lr", "eval_samples", "patience")
        for name in ("momentum", "weight_decay", "eval_rounds"):
            if getattr(self, name) is not None:
                check_not_negative(self, name)
        check_positive(self, "keep_checkpoints")
        if self.checkpoint_interval is not None:
            check_not_negative(self, "checkpoint_interval")
        if self.resume == "auto" and self.out is None:
            raise ValueError("resume 'auto' needs out: name the run directory with --out")
        if self.momentum is not None and self.momentum >= 1:
            raise ValueError(f"momentum must be in [0, 1), got {self.momentum}")
        if self.target_p1 is not None and not 0 < self.target_p1 <= 1:
            raise ValueError(f"target_p1 must be in (0, 1], got {self.target_p1}")
        if self.test_data is not None and self.data is None:
            raise ValueError("test_data needs data: name the training file with --data")
        check_needs(self)
        if self.input_gradients == "sparse" and self.weight_decay and self.optimizer != "adamw":
            raise ValueError(
                f"weight_decay {self.weight_decay} needs input_gradients 'dense' or optimizer 'adamw', got 'sparse' and "
                f"{self.optimizer!r}: weights shrink in every step, and a sparse step leaves most of them alone"
            )
        if self.optimizer == "rowwise-adagrad" and self.weight_decay:
            raise ValueError(f"weight_decay {self.weight_decay} needs another optimizer than 'rowwise-adagrad', which has none")
        for name in ("target_p1", "patience"):
            if getattr(self, name) is not None and self.eval_rounds == 0:
                raise ValueError(f"{name} needs evaluations on the way: set eval_rounds to 1 or more")

    @property
    def learning_rate(self) -> float:
        """Learning rate of the optimizer."""
        return _LR[self.optimizer] if self.lr is None else self.lr

    @property
    def decay(self) -> float:
        """Weight decay of the optimizer."""
        return (0.01 if self.optimizer == "adamw" else 0.0) if self.weight_decay is None else self.weight_decay

    @property
    def _has_limit(self) -> bool:
        return any(limit is not None for limit in (self.epochs, self.time_limit, self.target_p1, self.patience))

    @property
    def max_epochs(self) -> float | None:
        """Passes over the data after which the run stops, None for no such limit."""
        return self.epochs if self._has_limit else 50.0

    @property
    def evaluations_to_wait(self) -> int | None:
        """Evaluations without a better P@1 after which the run stops, None for no such limit."""
        return self.patience if self._has_limit or self.eval_rounds == 0 else 10

"""What the help of ``train`` groups, and what stands for a value in it."""

from __future__ import annotations

# By title the fields of TrainConfig and Config, in the order of the help.
TRAIN_GROUPS = {
    "data": ("data", "test_data", "cache_dir", "row_norm"),
    "the run": ("out", "name", "epochs", "patience", "time_limit", "target_p1", "device", "num_threads", "seed"),
    "evaluation and records": ("eval_rounds", "eval_samples", "calibration", "tensorboard", "hash_interval"),
    "model and local optimizer": (
        *("hidden_size", "input_gradients", "optimizer", "lr", "momentum", "weight_decay", "optimizer_state"),
        *("lr_rule", "reference_batch_size", "warmup_epochs", "lr_decay"),
    ),
    "how ranks share the work": (
        *("strategy", "batch_size", "mega_batch", "dispatch", "work"),
        *("batch_size_rule", "batch_size_step", "min_batch_size", "max_batch_size"),
    ),
    "merging (strategies local and sma)": (
        *("merge_period", "merge_share", "overlap_merge", "merge_weights"),
        *("perturbation", "perturbation_threshold", "perturbation_delta"),
        *("outer_step", "outer_lr", "outer_momentum", "outer_bias_correction", "sparse_merge", "sma_alpha"),
    ),
    "synchronous steps (strategy sync)": ("global_batch_size", "accumulation_steps", "loss_reduction"),
    "bytes on the wire": ("compression", "reducer", "error_feedback", "auto_bits"),
    "interruptions and another number of ranks": (
        *("resume", "checkpoint_interval", "keep_checkpoints", "drain_limit_s", "reference_ranks", "elastic_batch"),
    ),
    "failing and slow ranks": ("stall_limit_s", "straggler_limit", "slowdown"),
    "repeating a run": ("logical_ranks", "record", "replay"),
}
# What stands for the value; others have their choices, or N, X or TEXT by their type.
PLACEHOLDERS = {
    "cache_dir": "DIR",
    "compression": "CODEC",
    "data": "PATH",
    "device": "DEVICE",
    "name": "NAME",
    "out": "DIR",
    "replay": "RUN_DIR",
    "resume": "auto|PATH",
    "shares": "A,B,...",
    "slowdown": "F,G,...",
    "speeds": "S,T,...",
    "test_data": "FILE",
}
PLACEHOLDERS_BY_TYPE = {int: "N", float: "X", str: "TEXT"}

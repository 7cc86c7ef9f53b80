"""What the help of each command groups, and what stands for a value in it.

``--help`` shows the options that most people decide about, ``--help-all`` the groups called MORE as well.
"""

from __future__ import annotations

TRAIN = {
    "data and model": ("data", "hidden_size", "optimizer", "lr", "seed"),
    "how ranks share the work": ("strategy", "batch_size", "mega_batch", "merge_weights", "compression", "slowdown"),
    "when it ends": ("epochs", "time_limit", "patience"),
    "what is saved": ("out", "resume", "checkpoint_interval", "eval_rounds", "record"),
}
TRAIN_MORE = {
    "what carries tensors": ("backend",),
    "more on data and model": ("test_data", "cache_dir", "row_norm", "input_gradients", "device", "num_threads"),
    "more on the optimizer": (
        *("momentum", "weight_decay", "lr_rule", "reference_batch_size", "warmup_epochs", "lr_decay", "optimizer_state"),
    ),
    "batch sizes": ("micro_batch_size", "batch_size_rule", "min_batch_size", "max_batch_size"),
    "merging (strategy local)": (
        *("island", "merge_period", "merge_share", "sparse_merge"),
        *("merges_per_round", "merge_fragments", "fragment_delay", "fragment_alpha", "outlier_limit", "clip_delta"),
        *("outer_step", "outer_lr", "outer_momentum", "outer_state"),
    ),
    "synchronous steps (strategy sync)": ("global_batch_size", "accumulation_steps", "loss_reduction"),
    "compression": ("reducer", "error_feedback", "auto_bits"),
    "evaluation and records": ("name", "target_p1", "eval_samples", "calibration", "tensorboard", "hash_interval"),
    "interruptions": ("keep_checkpoints", "drain_limit_s", "reference_ranks", "elastic_batch"),
    "failed and slow ranks": ("stall_limit_s", "straggler_limit"),
    "repeating a run": ("replay", "logical_ranks"),
    "for comparisons, with --strategy sma and --merge-weights uniform|samples|paper|heterogpu": (
        *("dispatch", "work", "batch_size_step", "perturbation", "perturbation_threshold", "perturbation_delta", "sma_alpha"),
    ),
}
RUN = {
    "how ranks share the script's batches": (
        *("strategy", "shares", "max_batch_size", "micro_batch_size", "mega_batch", "merge_weights", "compression"),
        *("dry_run", "slowdown", "stall_limit_s"),
    ),
}
RUN_MORE = {
    "merging (strategy local)": (
        *("merge_period", "merge_share", "lr_rule", "optimizer_state"),
        *("outer_step", "outer_lr", "outer_momentum", "hash_interval"),
    ),
    "more": ("interval", "reducer", "error_feedback"),
}
CALIBRATE = {
    "what would be trained": ("data", "hidden_size", "optimizer"),
    "how ranks would share the work": (
        *("batch_size", "min_batch_size", "max_batch_size", "mega_batch", "merge_weights", "compression", "slowdown"),
    ),
}
SIMULATE = {
    "what is compared": ("strategies", "local_steps"),
    "the cluster and the model": (
        *("ranks", "ranks_per_host", "speeds", "samples_per_s", "link", "host_link", "model_mb", "gradient_mb"),
    ),
    "how ranks share the work, as for train": ("batch_size", "mega_batch", "compression", "slowdown"),
}
SIMULATE_MORE = {
    "more on the cluster": (
        *("step_overhead", "jitter", "drift", "latency", "host_latency", "overlap", "exchange_overhead", "merge_gbs"),
        *("codec_gbs", "store_operation", "first_batch", "dataset_size"),
    ),
    "more on what is played": (
        *("rounds", "settle", "min_batch_size", "max_batch_size", "merge_period", "merge_share", "reducer"),
        *("global_batch_size", "seed"),
    ),
}
# What stands for the value; others have their choices, or N, X or TEXT by their type.
PLACEHOLDERS = {
    "cache_dir": "DIR",
    "compression": "CODEC",
    "data": "PATH",
    "device": "DEVICE",
    "host_link": "RATE",
    "island": "node|N|A,B,...",
    "link": "RATE",
    "merge_weights": "RULE",
    "name": "NAME",
    "optimizer": "NAME",
    "out": "DIR",
    "ranks": "N,N|A..B",
    "replay": "RUN_DIR",
    "resume": "auto|PATH",
    "shares": "equal|A,B,...",
    "slowdown": "F,G,...",
    "speeds": "S,T,...",
    "strategies": "A,B,...",
    "strategy": "NAME",
    "test_data": "FILE",
}
PLACEHOLDERS_BY_TYPE = {int: "N", float: "X", str: "TEXT"}

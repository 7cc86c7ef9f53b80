"""Whole merges and merges in fragments: held-out loss of a small GPT by samples and by time, over a slow link.

    python benchmarks/over_link.py --rate 100mbit -- python benchmarks/fragments.py --methods whole fragments2 fragments4

Every rank trains each method in turn, once for each seed, from the same weights and in the same order of samples. Times are of
training alone, evaluation left out. Rank 0 prints one line of JSON a run, and writes them with --out.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from gpt import GPT, load_text, next_byte_loss

import hvd_adaptive
from hvd_adaptive.comm import connect
from hvd_adaptive.comm.protocols import Transport

METHODS: dict[str, dict[str, Any]] = {
    "whole": {},
    "fragments2": {"merge_fragments": 2},
    "fragments4": {"merge_fragments": 4},
    "fragments2-alpha0": {"merge_fragments": 2, "fragment_alpha": 0.0},
    "fragments4-alpha0": {"merge_fragments": 4, "fragment_alpha": 0.0},
    "fragments4-nodelay": {"merge_fragments": 4, "fragment_delay": 0.0},
    "whole-4bit": {"compression": "maxmin:4"},
    "fragments4-4bit": {"merge_fragments": 4, "compression": "maxmin:4"},
    "sync": {"strategy": "sync"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=["whole", "fragments2", "fragments4"], choices=METHODS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--samples", type=int, default=9600, help="of all ranks, in each run")
    parser.add_argument("--mega-batch", type=int, default=320, help="samples between two merges of everything")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--lr", type=float, default=0.002)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--outer", nargs=2, type=float, metavar=("LR", "MOMENTUM"), help="Nesterov (default: no outer step)")
    parser.add_argument("--slowdown")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    transport = connect(stall_limit_s=120)
    data = load_text(64 * options.samples * 10 // 9 + 64 * 10)
    for seed in options.seeds:
        for name in options.methods:
            result = run(transport, options, name, seed, *data)
            if transport.rank == 0:
                print(json.dumps(result), flush=True)
                if options.out is not None:
                    with options.out.open("a") as file:
                        file.write(json.dumps(result) + "\n")
    transport.close()


def run(
    transport: Transport, options: argparse.Namespace, name: str, seed: int, train_data: Any, test_data: Any
) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = GPT(width=options.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1)
    chosen = {"batch_size": options.batch_size, "mega_batch": options.mega_batch, "seed": seed, **METHODS[name]}
    if options.outer is not None and chosen.get("strategy", "local") == "local":
        chosen |= {"outer_step": "nesterov", "outer_lr": options.outer[0], "outer_momentum": options.outer[1]}
    config = hvd_adaptive.Config(slowdown=options.slowdown, **chosen)
    session = hvd_adaptive.Session(model, optimizer, config, transport=transport)
    losses: list[tuple[int, float, float]] = []
    stood_still, sent = [0.0], [0.0]

    def evaluate() -> float:
        x, y = (tensor[session.rank :: session.world_size] for tensor in test_data.tensors)
        with torch.no_grad():
            loss = next_byte_loss(model, x, y).item()
        return sum(session.gather(loss * len(x))) / len(test_data)

    def record(done: Any) -> None:
        stood_still[0] += float((done.stats["merge_s"] + done.stats["wait_s"]).mean())
        sent[0] += done.payload_bytes
        if session.round % max(1, 2560 // options.mega_batch) == 0:
            losses.append((done.num_samples, round(done.train_s, 2), round(evaluate(), 4)))

    session.records.append(record)
    start = time.perf_counter()
    for batch in session.batches(train_data, num_epochs=1):
        with session.step(batch):
            session.optimizer.zero_grad()
            batch.loss = next_byte_loss(model, batch.x, batch.y)
            batch.loss.backward()
            session.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            session.optimizer.step()
    wall_s = time.perf_counter() - start
    final = evaluate()
    # Not session.close(): the next run needs the ranks.
    session._check_hash()
    return {
        "method": name, "seed": seed, "final": round(final, 4), "train_s": round(session.train_s, 2), "wall_s": round(wall_s, 2),
        "samples": session.num_samples, "merging_and_waiting": round(stood_still[0] / session.train_s, 4),
        "sent_mb": round(sent[0] / 1e6, 1), "losses": losses,
        "options": {k: v for k, v in dataclasses.asdict(config).items() if k in chosen},
    }  # fmt: skip


if __name__ == "__main__":
    main()

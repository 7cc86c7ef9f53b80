"""What the report says of loaders that were shared out, that were not, and that were for a while."""

from __future__ import annotations

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

from hvd_adaptive.wrap.closing_report import Report
from hvd_adaptive.wrap.loaders import Loader
from hvd_adaptive.wrap.reasons import Reason
from hvd_adaptive.wrap.share_rules import Window


def test_that_updates_differ_is_said_only_if_they_may() -> None:
    report, data = Report(), DataLoader(TensorDataset(torch.zeros(8)), batch_size=2)
    loader = Loader(data, 1)
    loader.num_steps, loader.is_traced = 5, True
    report.loaders.append(loader)
    report.condition("BatchNorm")
    said = "  note: updates differ a little from those with equal shares: BatchNorm"
    assert said in report.lines()
    loader.reasons.add(Reason.MIXED)
    lines = report.lines()
    assert said not in lines
    assert any("5 steps with equal shares, because" in line for line in lines), lines
    loader.num_shared = 2
    lines = report.lines()
    assert said in lines
    assert any("3 steps with equal shares and 2 with others, whose updates may differ, because" in line for line in lines), lines


def test_the_wall_clocks_ceiling_leaves_out_what_no_share_changes() -> None:
    """Two ranks at 1:3; of 100 ms a step the slower one computes 90."""
    report, data = Report(), DataLoader(TensorDataset(torch.zeros(8)), batch_size=2)
    loader = Loader(data, 1)
    loader.num_steps, loader.is_traced = 20, True
    report.loaders.append(loader)

    def seen(seconds: tuple[float, float], samples: tuple[int, int], wall_s: float) -> None:
        rows = [
            Window(num_steps=10, timed_steps=10, timed_samples=n, compute_s=s, wall_steps=10, wall_s=wall_s)
            for n, s in zip(samples, seconds, strict=True)
        ]
        report.window(loader, Window.by_name(np.array([row.vector() for row in rows])))

    seen((0.9, 0.3), (40, 40), 1.0)
    text = "by the wall clock, from asking for a batch to its gradients: 100.0 ms a step with equal shares"
    # Speeds of 1:3 allow 2 times, so 90 ms become 45.
    assert f"    {text}; the ceiling, as 10.0 ms are not computing: 1.82x" in report.lines()
    loader.fractions = [0.25, 0.75]
    # The last one with equal shares.
    seen((0.9, 0.3), (40, 40), 1.0)
    seen((0.45, 0.45), (20, 60), 0.6)
    lines = report.lines()
    assert f"    {text}, 60.0 ms now: 1.67x; the ceiling, as 10.0 ms are not computing: 1.82x" in lines, lines

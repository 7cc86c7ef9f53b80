"""What the report says of loaders that were shared out, that were not, and that were for a while."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader, TensorDataset

from hvd_adaptive.wrap.closing_report import Report
from hvd_adaptive.wrap.loaders import Loader
from hvd_adaptive.wrap.reasons import Reason


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

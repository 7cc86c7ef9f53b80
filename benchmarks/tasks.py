"""What accuracy.py and layer_bits.py train: models, data and settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hvd_adaptive.xmc.data import build, open_splits, resolve
from hvd_adaptive.xmc.metrics import top_k_labels
from hvd_adaptive.xmc.sparse_mlp import SparseMLP, multilabel_softmax_loss

TEST_DIGITS = 600


@dataclass(frozen=True)
class Task:
    """A model, its data, and how it is trained.

    Attributes:
        train: what a Session takes.
        make_model: fp32, on the CPU, drawn from torch's generator.
        loss: of a batch.
        score: the model's accuracy on the test data.
        global_batch: samples of a step of all ranks; of strategy local, of each rank's.
        epochs: passes over the training data.
        evaluations: how often the model is scored, about.
        lr: for the global batch.
        momentum: of the optimizer.
        local: options of strategy local.
        local_lr: learning rate of strategy local.
    """

    train: Any
    make_model: Callable[[bool], nn.Module]
    loss: Callable[[Tensor, Any], Tensor]
    score: Callable[[nn.Module], float]
    global_batch: int
    epochs: float
    evaluations: int
    lr: float
    momentum: float
    local: dict[str, Any]
    local_lr: float


class Digits(nn.Sequential):
    """Two convolutions and three dense layers on 8 x 8 images."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 10),
        )  # fmt: skip


class Rows(nn.Module):
    """A transformer that reads an image row by row: four layers of width 64."""

    def __init__(self) -> None:
        super().__init__()
        self.read = nn.Linear(8, 64)
        self.place = nn.Parameter(0.02 * torch.randn(8, 64))
        layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.out = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layers(self.read(x.squeeze(1)) + self.place).mean(1))


def digits(model: type[nn.Module] = Digits, lr: float = 0.05) -> Task:
    from sklearn.datasets import load_digits

    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.images))
    x = torch.tensor(data.images[order] / 16, dtype=torch.float32).unsqueeze(1)
    y = torch.tensor(data.target[order], dtype=torch.int64)
    test_x, test_y = x[-TEST_DIGITS:], y[-TEST_DIGITS:]

    @torch.no_grad()
    def score(trained: nn.Module) -> float:
        return float((trained(test_x).argmax(1) == test_y).float().mean())

    return Task(
        train=torch.utils.data.TensorDataset(x[:-TEST_DIGITS], y[:-TEST_DIGITS]),
        make_model=lambda _: model(),
        loss=nn.functional.cross_entropy,
        score=score,
        global_batch=64,
        epochs=12,
        evaluations=12,
        lr=lr,
        momentum=0.9,
        local={"batch_size": 32, "mega_batch": 256, "outer_step": "nesterov"},
        local_lr=0.1,
    )


def embedded() -> Task:
    source = resolve(None, None)
    build(source, None)
    train, test = open_splits(source, None)

    @torch.no_grad()
    def score(model: nn.Module) -> float:
        hits = 0
        for first in range(0, len(test), 512):
            x, y = test.get_batch(np.arange(first, min(first + 512, len(test))))
            best = top_k_labels(model(x), k=1)[:, 0]
            hits += sum(
                int(label) in y.indices[start:stop].tolist()
                for label, start, stop in zip(best, y.offsets[:-1], y.offsets[1:], strict=True)
            )
        return hits / len(test)

    return Task(
        train=train,
        make_model=lambda sparse: SparseMLP(train.num_features, train.num_labels, 128, sparse_gradients=sparse),
        loss=multilabel_softmax_loss,
        score=score,
        global_batch=128,
        epochs=2,
        evaluations=4,
        lr=4.0,
        momentum=0.0,
        local={"batch_size": 64, "mega_batch": 1600, "outer_step": "nesterov"},
        local_lr=2.0,
    )


def transformer() -> Task:
    return digits(Rows, lr=0.02)


TASKS = {"digits": digits, "transformer": transformer, "embedded": embedded}

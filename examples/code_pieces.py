"""Data and model of own_loop.py and its twin: from which package of Python's standard library is a piece of 128 bytes?

The sources of the standard library are real data that every machine has.
"""

import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

PACKAGES = (
    *("asyncio", "ctypes", "email", "encodings", "html", "http", "importlib"),
    *("json", "logging", "multiprocessing", "unittest", "urllib", "xml"),
)
LENGTH = 128


def load_pieces(most_of_a_package: int) -> tuple[TensorDataset, TensorDataset]:
    """Returns the pieces to learn from, and every tenth one, held out. x: int32, shape (LENGTH,), bytes; y: the package."""
    library = Path(sysconfig.get_paths()["stdlib"])
    xs, ys = [], []
    for label, package in enumerate(PACKAGES):
        text = bytearray(b"".join(path.read_bytes() for path in sorted((library / package).rglob("*.py"))))
        count = min(len(text) // LENGTH, most_of_a_package)
        xs.append(torch.frombuffer(text, dtype=torch.uint8, count=count * LENGTH).view(count, LENGTH).int())
        ys.append(torch.full((count,), label))
    x, y = torch.cat(xs), torch.cat(ys)
    held_out = torch.arange(len(x)) % 10 == 0
    return TensorDataset(x[~held_out], y[~held_out]), TensorDataset(x[held_out], y[held_out])


class PieceClassifier(nn.Module):
    """Bytes (batch, LENGTH) -> logits (batch, packages): a convolution, and its largest values over the piece."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 32)
        self.convolution = nn.Conv1d(32, width, kernel_size=5)
        self.output = nn.Linear(width, len(PACKAGES))

    def forward(self, x: Tensor) -> Tensor:
        """Computes the logits."""
        found = torch.relu(self.convolution(self.embedding(x).transpose(1, 2)))
        return self.output(found.amax(dim=2))

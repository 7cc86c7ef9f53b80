"""Data and model of image_classification.py and its twin: the handwritten digits that come with scikit-learn."""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import Dataset


class Digits(Dataset):
    """Images of 8 x 8 and their digits; for training each image is moved by up to a pixel, at random."""

    def __init__(self, *, train: bool) -> None:
        digits = load_digits()
        chosen = (torch.arange(len(digits.target)) % 4 != 0) == train
        self.images = (torch.tensor(digits.images, dtype=torch.float32) / 16)[chosen].unsqueeze(1)
        self.labels = torch.tensor(digits.target)[chosen]
        self.train = train

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        image = self.images[i]
        if self.train:
            down, right = torch.randint(-1, 2, (2,)).tolist()
            image = nn.functional.pad(image, (1, 1, 1, 1))[:, 1 + down : 9 + down, 1 + right : 9 + right]
        return image, self.labels[i]


class Residual(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(8, width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(8, width),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        """(batch, width, height, width) -> the same."""
        return torch.relu(x + self.layers(x))


def small_resnet(width: int = 32) -> nn.Module:
    """Images (batch, 1, 8, 8) -> logits (batch, 10). GroupNorm: it does not mix the samples of a batch, as BatchNorm does."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), Residual(width), nn.MaxPool2d(2), Residual(width),
        nn.Flatten(), nn.Linear(width * 16, 10),
    )  # fmt: skip

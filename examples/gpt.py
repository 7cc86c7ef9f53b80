"""Text and model of language_model.py and its twin: a GPT over bytes, and the sources of Python's standard library."""

import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

LENGTH = 64


def load_text(most_bytes: int) -> tuple[TensorDataset, TensorDataset]:
    """Returns windows of the text to learn from, and 256 of its last tenth, held out. x and y: int64, shape (LENGTH,)."""
    library = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(library.glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in files))[:most_bytes], dtype=torch.uint8).long()
    count = (len(text) - 1) // LENGTH
    x, y = text[: count * LENGTH].view(count, LENGTH), text[1 : count * LENGTH + 1].view(count, LENGTH)
    split = count * 9 // 10
    return TensorDataset(x[:split], y[:split]), TensorDataset(x[split:][:256], y[split:][:256])


class Block(nn.Module):
    """Attention and a two-layer network, each after a LayerNorm and beside a shortcut."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) -> the same."""
        q, k, v = (part.unflatten(2, (self.num_heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, 2))
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.join(heads.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Bytes (batch, length) -> logits of the next byte (batch, length, 256). 1.03 million parameters by default."""

    def __init__(self, width: int = 128, num_layers: int = 5, num_heads: int = 4) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.Sequential(*(Block(width, num_heads) for _ in range(num_layers)))
        self.norm = nn.LayerNorm(width)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Computes the logits; the table of bytes is the output layer as well."""
        positions = torch.arange(x.shape[1], device=x.device)
        hidden = self.norm(self.blocks(self.bytes(x) + self.positions(positions)))
        return hidden @ self.bytes.weight.t()


def next_byte_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Returns the mean loss of a byte, in nats."""
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())

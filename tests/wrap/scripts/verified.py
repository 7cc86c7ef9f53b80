"""A Horovod script for ``run --verify``: what its argument says makes unequal batches other ones, or only seems to."""

import sys

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, default_collate
from torch.utils.data.distributed import DistributedSampler

mode = sys.argv[1]
hvd.init()
torch.manual_seed(3)


class Noisy(Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(160, 6, 8, generator=generator)
        self.y = self.x[:, 0, :4].argmax(1)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index] + 0.1 * torch.randn(6, 8), self.y[index]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.recurrent = nn.LSTM(8, 16, num_layers=2, dropout=0.3, batch_first=True)
        self.attention = nn.TransformerEncoderLayer(16, 2, 16, dropout=0.2, batch_first=True)
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Sequential(nn.Dropout(0.5), nn.Linear(16, 4))

    def forward(self, x):
        h = self.attention(self.recurrent(x)[0])
        return self.head(self.norm(h.transpose(1, 2)).mean(2))


def collate(samples):
    x, y = default_collate(samples)
    return x + torch.randn_like(x), y


data, model = Noisy(), Model()
sampler = DistributedSampler(data, hvd.size(), hvd.rank())
loader = DataLoader(
    data,
    8,
    sampler=sampler,
    num_workers=mode in ("flooding", "collates"),
    collate_fn=collate if mode == "collates" else None,
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
step = 0
for _ in range(4):
    for x, y in loader:
        if mode == "draws":
            x = x + torch.randn(6, len(x), 8).transpose(0, 1)
        loss = F.cross_entropy(model(x), y)
        if mode == "flooding" and step > 12:
            # The trend of each rank's own losses.
            loss = (loss - 1.35).abs() + 1.35
        optimizer.zero_grad()
        loss.backward()
        if mode == "stops" and step == 14 and len(x) != 8:
            sys.exit(3)
        optimizer.step()
        step += 1

"""Sequences of other lengths, padded by the collate function and packed by the model, in batches of four; by name.

All sequences of the first two batches are as long as a batch.
"""

import sys

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

mode = sys.argv[1]
hvd.init()
torch.manual_seed(3)
torch.set_default_dtype(torch.float64)
BATCH = 4
lengths = [BATCH if n < 2 * BATCH * hvd.size() else 2 + n % 7 for n in range(120)]
data = [(torch.randn(length, 3), length % 4) for length in lengths]
sampler = DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=False)


def collate(samples):
    samples = sorted(samples, key=lambda sample: len(sample[0]), reverse=True)
    rows, labels = zip(*samples, strict=True)
    return pad_sequence(rows), [len(x) for x in rows], torch.tensor(labels)


class Recurrent(nn.GRU):
    def forward(self, packed):
        return super().forward(packed)[1][-1]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.recurrent, self.scores = Recurrent(3, 8), nn.Linear(8, 4)

    def forward(self, x, lengths):
        return self.scores(self.recurrent(pack_padded_sequence(x, lengths)))


loader = DataLoader(data, batch_size=BATCH, sampler=sampler, collate_fn=collate)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
for _ in range(2):
    for x, lengths, y in loader:
        optimizer.zero_grad()
        out = model(x, lengths) if mode == "model" else model.scores(model.recurrent(pack_padded_sequence(x, lengths)))
        F.cross_entropy(out, y).backward()
        optimizer.step()

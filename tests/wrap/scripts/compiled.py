"""A language model trained as public scripts do: a module that returns logits and loss, compiled once it is built."""

import argparse
import time

import horovod.torch as hvd
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--returns", choices=["pair", "dict", "logits", "table"], default="pair")
parser.add_argument("--norm", action="store_true")
parser.add_argument("--centered", action="store_true")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--rows", type=int, default=240)
parser.add_argument("--sleep", type=float, default=0.0)
parser.add_argument("--lists", action="store_true", help="a list of numbers for each sample, within a dictionary")
args = parser.parse_args()
BATCH, LENGTH, VOCABULARY = 8, 12, 20


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.position = nn.Parameter(torch.zeros(LENGTH, 16))
        self.norm = nn.BatchNorm1d(LENGTH) if args.norm else nn.LayerNorm(16)
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, x, y, more=None):
        hidden = self.embedding(x) + self.position
        hidden = hidden + self.mlp(self.norm(hidden)).cumsum(1)
        if args.centered:
            hidden = hidden - hidden.mean(0)
        logits = self.head(hidden)
        if args.returns == "logits":
            return logits
        if args.returns == "table":
            return logits, self.head.weight
        loss = F.cross_entropy(logits.view(-1, VOCABULARY), y.view(-1))
        if more is not None:
            loss = loss * 0.5 + 0.1 * (hidden.mean((1, 2)).sum() * sum(more["scores"]) / len(more["scores"]) / len(x))
        return {"loss": loss, "logits": logits} if args.returns == "dict" else (logits, loss)


num_compilations = 0


def compiler(graph, inputs):
    global num_compilations
    num_compilations += 1
    return graph.forward


hvd.init()
torch.manual_seed(5)
torch.set_num_threads(1)
torch._dynamo.reset()
tokens = torch.randint(VOCABULARY, (args.rows, LENGTH + 1), generator=torch.Generator().manual_seed(7))
data = TensorDataset(tokens[:, :-1], tokens[:, 1:])
sampler = DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank())
loader = DataLoader(data, batch_size=BATCH, sampler=sampler)
model = LanguageModel().double()
optimizer = hvd.DistributedOptimizer(
    torch.optim.AdamW(model.parameters(), lr=0.002, eps=1e-3), named_parameters=model.named_parameters()
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
compiled_model = torch.compile(model, backend=compiler)
sizes = set()
for epoch in range(args.epochs):
    sampler.set_epoch(epoch)
    for x, y in loader:
        sizes.add(len(x))
        optimizer.zero_grad()
        result = compiled_model(x, y, *([{"scores": [float(row[0]) for row in y]}] if args.lists else []))
        if args.returns in ("logits", "table"):
            logits = result if args.returns == "logits" else result[0]
            loss = F.cross_entropy(logits.view(-1, VOCABULARY), y.view(-1))
        else:
            loss = result["loss"] if args.returns == "dict" else result[1]
        loss.backward()
        time.sleep(args.sleep * len(x))
        optimizer.step()
print(f"rank {hvd.rank()}: {num_compilations} compilations, batches of {sorted(sizes)}", flush=True)

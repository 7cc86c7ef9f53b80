"""Loops that use gradients of the rank's own batch by themselves, by name."""

import argparse

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from common import Net, make_data
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("mode")
args = parser.parse_args()
mode = args.mode
hvd.init()
torch.manual_seed(3)
data = make_data(240)
sampler = DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank())
loader = DataLoader(data, batch_size=8, sampler=sampler)
model, head = Net().double(), torch.nn.Linear(10, 10).double()
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.05),
    named_parameters=model.named_parameters(),
    backward_passes_per_step=2 if mode in ("fgm", "two_losses") else 1,
)
head_optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
table = torch.nn.Embedding(10, 10, sparse=True, dtype=torch.float64)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)


def with_head(x, y):
    """A head that no wrapped optimizer trains."""
    out = model(x)
    (F.nll_loss(out, y) + 0.3 * F.cross_entropy(head(out), y)).backward()
    optimizer.step()
    if mode == "unused_head":
        head.zero_grad()
        return
    for parameter in head.parameters():
        if mode == "by_hand":
            parameter.data -= 0.1 * hvd.allreduce(parameter.grad, name="head")
        if mode == "reduced_by_hand":
            parameter.grad = hvd.allreduce(parameter.grad, name="head")
        if mode == "not_reduced_at_all":
            parameter.data -= 0.1 * parameter.grad
    if mode in ("reduced_by_hand", "second_optimizer"):
        head_optimizer.step()
    head.zero_grad()


def with_table(x, y):
    """A table of labels, whose sparse gradient no wrapped optimizer reduces."""
    out = model(x)
    (F.nll_loss(out, y) + 0.1 * F.mse_loss(table(y), out)).backward()
    optimizer.step()
    gradient = hvd.sparse_allreduce_async(table.weight.grad, name="table", op=hvd.Average)()
    with torch.no_grad():
        table.weight.sub_(0.1 * gradient.to_dense())
    table.zero_grad()


def sharpness(x, y):
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(F.nll_loss(model(x), y), iter(parameters))
    norm = torch.sqrt(sum(gradient.pow(2).sum() for gradient in gradients))
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.add_(0.3 * gradient / norm)
    F.nll_loss(model(x), y).backward()
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.sub_(0.3 * gradient / norm)
    optimizer.step()


def fgm(x, y):
    F.nll_loss(model(x), y).backward()
    weight = model.fc1.weight
    move = 0.5 * weight.grad / weight.grad.norm()
    weight.data.add_(move)
    F.nll_loss(model(x), y).backward()
    weight.data.sub_(move)
    optimizer.step()


def functional(x, y):
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(F.nll_loss(model(x), y), parameters, create_graph=True)
    moved = {name: p - 0.1 * g for name, p, g in zip(names, parameters, gradients, strict=True)}
    F.nll_loss(torch.func.functional_call(model, moved, (x,)), y).backward()
    optimizer.step()


def two_losses(x, y):
    F.nll_loss(model(x), y).backward()
    (0.5 * F.nll_loss(model(2 * x), y)).backward()
    optimizer.step()


def normalized(x, y):
    """Weights that are normalized in each step, before the forward or after the step."""
    with torch.no_grad():
        model.fc2.weight.div_(model.fc2.weight.norm(dim=1, keepdim=True))
    F.nll_loss(model(x), y).backward()
    optimizer.step()
    model.fc1.weight.data.clamp_(-0.5, 0.5)


def perturbed(x, y):
    """Adversarial samples by signs, of a leaf for each sample."""
    noise = torch.zeros_like(x, requires_grad=True)
    (gradient,) = torch.autograd.grad(F.nll_loss(model(x + noise), y), noise)
    noise.data.add_(gradient.sign(), alpha=0.01)
    F.nll_loss(model(x + noise), y).backward()
    optimizer.step()


def by_size(x, y):
    """Adversarial samples by gradients of a mean, which are smaller in a larger batch."""
    x.requires_grad_()
    if mode == "x_grad":
        F.nll_loss(model(x), y).backward(inputs=[x])
        gradient = x.grad
    else:
        (gradient,) = torch.autograd.grad(F.nll_loss(model(x), y), x)
    F.nll_loss(model((x + 5 * gradient).detach()), y).backward()
    optimizer.step()


def of_sum(x, y):
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(F.nll_loss(model(x), y, reduction="sum"), x)
    F.nll_loss(model((x + 5 * gradient).detach()), y).backward()
    optimizer.step()


bank, queue, counts = torch.zeros(10, 10).double(), torch.randn(10, 12).double(), torch.zeros(10, 10)


def held(x, y):
    """What a rank's own samples gave before: by number, or the last ones; or only counted."""
    out = model(x)
    loss = F.nll_loss(out, y)
    if mode == "bank":
        loss = loss + F.mse_loss(out, bank[y])
    if mode == "queue":
        loss = loss + 0.1 * (out @ queue.clone().detach()).square().mean()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        if mode == "bank":
            bank[y] = out.detach()
        if mode == "queue":
            queue[:, : len(x)] = out.detach().t()
        if mode == "counted":
            counts[y, out.argmax(1)] += 1


STEPS = {
    "by_gradient": by_size,
    "x_grad": by_size,
    "of_sum": of_sum,
    "bank": held,
    "queue": held,
    "counted": held,
    "sparse_by_hand": with_table,
    "sharpness": sharpness,
    "fgm": fgm,
    "functional": functional,
    "two_losses": two_losses,
    "normalized": normalized,
    "perturbed": perturbed,
}
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        STEPS.get(mode, with_head)(x, y)

"""In the shape of image-to-image GANs: two optimizers on each batch, a gradient penalty, and a synchronize for gradients that
the other network's loss has left."""

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from common import make_data
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

hvd.init()
torch.manual_seed(5)
dataset = make_data(192)
sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
loader = DataLoader(dataset, batch_size=8, sampler=sampler)
width = dataset[0][0].numel()
model = torch.nn.ModuleDict(
    {
        "generator": torch.nn.Sequential(torch.nn.Linear(width, 16), torch.nn.Tanh(), torch.nn.Linear(16, width)),
        "critic": torch.nn.Sequential(torch.nn.Linear(2 * width, 16), torch.nn.Softplus(), torch.nn.Linear(16, 1)),
    }
).double()
generator, critic = model["generator"], model["critic"]
optimizers = {}
for name, network in model.items():
    optimizer = torch.optim.SGD(network.parameters(), lr=0.02, momentum=0.5)
    optimizers[name] = hvd.DistributedOptimizer(optimizer, named_parameters=network.named_parameters(prefix=name))
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
for optimizer in optimizers.values():
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
opt_g, opt_d = optimizers["generator"], optimizers["critic"]


def penalty(real, fake):
    between = (0.3 * real + 0.7 * fake).detach().requires_grad_(True)
    score = critic(between)
    (slope,) = torch.autograd.grad(score, between, torch.ones_like(score), create_graph=True)
    return ((slope.norm(2, dim=1) - 1) ** 2).mean()


for epoch in range(2):
    sampler.set_epoch(epoch)
    for data, _ in loader:
        source = data.reshape(len(data), -1)
        target = source.flip(1)
        made = generator(source)
        real, fake = torch.cat([source, target], 1), torch.cat([source, made], 1)
        loss_d = critic(fake.detach()).mean() - critic(real).mean() + 0.1 * penalty(real, fake)
        opt_d.zero_grad()
        loss_d.backward()
        opt_d.step()
        loss_g = F.l1_loss(made, target) - 0.1 * critic(fake).mean()
        opt_g.zero_grad()
        loss_g.backward()
        opt_g.step()
        # Of the critic's gradients, which no step uses.
        opt_d.synchronize()

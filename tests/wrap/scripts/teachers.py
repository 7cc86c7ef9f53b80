"""Distillation from a frozen teacher, and fine-tuning of a head on a frozen backbone, as people write them; by name.

The batch is as long as the frozen layers are wide.
"""

import sys

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from common import make_data
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

mode = sys.argv[1]
hvd.init()
torch.manual_seed(3)
torch.set_default_dtype(torch.float64)
BATCH = WIDTH = 8
TEMPERATURE = 4.0


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, WIDTH, 3), nn.BatchNorm2d(WIDTH)

    def forward(self, x):
        return F.adaptive_avg_pool2d(F.relu(self.norm(self.conv(x[:, None]))), 2).flatten(1)


def distilled(scores, teachers, y):
    soft = F.kl_div(F.log_softmax(scores / TEMPERATURE, 1), F.softmax(teachers / TEMPERATURE, 1), reduction="batchmean")
    return 0.7 * TEMPERATURE**2 * soft + 0.3 * F.cross_entropy(scores, y)


class Distiller(nn.Module):
    def __init__(self, student, teacher):
        super().__init__()
        self.student, self.teacher = student, teacher

    def forward(self, x, y):
        with torch.no_grad():
            teachers = self.teacher(x)
        return distilled(self.student(x), teachers, y)


data = make_data(240)
sampler = DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank())
loader = DataLoader(data, batch_size=BATCH, sampler=sampler)
frozen = Backbone().requires_grad_(False)
frozen(data.tensors[0])  # Statistics.
teacher = nn.Sequential(frozen, nn.Linear(4 * WIDTH, 10)).requires_grad_(False).eval()
head = nn.Linear(4 * WIDTH, 10)
student = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
whole = Distiller(student, teacher)
model = head if mode.startswith("head") else student
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
for epoch in range(2):
    sampler.set_epoch(epoch)
    frozen.train(mode == "head_with_batchnorm")
    for x, y in loader:
        optimizer.zero_grad()
        if mode == "teacher":
            with torch.no_grad():
                teachers = teacher(x)
            loss = distilled(student(x), teachers, y)
        elif mode == "teacher_within":
            loss = whole(x, y)
        elif mode == "head_without_gradients":
            with torch.no_grad():
                features = frozen(x)
            loss = F.cross_entropy(head(features), y)
        else:
            loss = F.cross_entropy(head(frozen(x)), y)
        loss.backward()
        optimizer.step()

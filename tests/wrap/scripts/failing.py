"""Does what its argument says, after a few steps."""

import os
import pathlib
import sys
import time

import horovod.torch as hvd
import torch

if sys.argv[1] == "never":
    sys.exit(0)
hvd.init()
model = torch.nn.Linear(4, 2)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
)
for step in range(100_000):
    optimizer.zero_grad()
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    if step == 5 and hvd.rank() == 1 and sys.argv[1] == "raise":
        print(f"raising at {time.time()}", flush=True)
        raise KeyError("on purpose")
    if step == 5 and hvd.rank() == 1 and sys.argv[1] == "exit":
        sys.exit(0)
    if step == 5 and hvd.rank() == 1 and sys.argv[1] == "freeze":
        pathlib.Path(sys.argv[2]).write_text(str(os.getpid()))
    time.sleep(0.01)

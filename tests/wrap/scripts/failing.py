"""Does what its argument says, after a few steps."""

import contextlib
import datetime
import os
import pathlib
import sys
import threading
import time

import horovod.torch as hvd
import torch

if sys.argv[1] == "never":
    sys.exit(0)
if sys.argv[1] == "code":
    # The heartbeat's thread is in the store, which is C++, nearly all the time, and would come back while the interpreter ends.
    from hvd_adaptive.comm.heartbeat import Heartbeat

    beat = Heartbeat._beat

    def slow_beat(self, store):
        beat(self, store)
        with contextlib.suppress(torch.distributed.DistStoreError):
            store.wait(["never"], datetime.timedelta(seconds=0.3))

    Heartbeat._beat, Heartbeat._sleep = slow_beat, lambda self: None
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
    if step == 5 and sys.argv[1] == "code":
        sys.exit(3)
    if step == 5 and sys.argv[1] == "one code":
        sys.exit(3 if hvd.rank() == int(sys.argv[2]) else 0)
    if step == 5 and sys.argv[1] == "lonely":
        if hvd.rank() == 0:
            hvd.allreduce(torch.ones(1), name="lonely")
        else:
            threading.Timer(7, hvd.allreduce_async, [torch.ones(1)], {"name": "lonely"}).start()
        hvd.allreduce(torch.ones(1), name="theirs")
        break
    if step == 5 and hvd.rank() == hvd.size() - 1 and sys.argv[1] in ("freeze", "interrupt"):
        pathlib.Path(sys.argv[2]).write_text(str(os.getpid()))
    # Rank 0 then waits within a step.
    time.sleep(1.5 if step >= 5 and hvd.rank() == 1 and sys.argv[1] == "interrupt" else 0.01)

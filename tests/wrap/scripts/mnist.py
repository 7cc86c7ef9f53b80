"""In the shape of Horovod's pytorch_mnist.py: DistributedSampler, per-epoch metrics, validation with its own sampler."""

import argparse

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from common import Net, make_data
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--out")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--num-workers", type=int, default=0)
parser.add_argument("--context")
parser.add_argument("--persistent", action="store_true")
parser.add_argument("--op", default="Average")
parser.add_argument("--fp16-allreduce", action="store_true")
parser.add_argument("--gradient-predivide-factor", type=float, default=1.0)
parser.add_argument("--groups", type=int)
parser.add_argument("--drop-last", action="store_true")
parser.add_argument("--wrap-late", action="store_true")
parser.add_argument("--momentum", type=float, default=0.5)
parser.add_argument("--batch-norm", action="store_true")
parser.add_argument("--width", type=int, default=32)


class Doubled(torch.utils.data.Dataset):
    """A class of the script, which workers must be able to unpickle."""

    def __init__(self, inner):
        self.inner = inner

    def __len__(self):
        return len(self.inner)

    def __getitem__(self, i):
        x, y = self.inner[i]
        return 2 * x, y


def train(epoch):
    model.train()
    train_sampler.set_epoch(epoch)
    for batch_idx, (data, target) in enumerate(train_loader):
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()
        if hvd.rank() == 0 and batch_idx % 10 == 0:
            print(f"Train Epoch: {epoch} [{batch_idx}/{len(train_loader)}] Loss: {loss.item():.6f} Batch: {len(data)}")


def metric_average(val, name):
    return hvd.allreduce(torch.tensor(val), name=name).item()


def test():
    model.eval()
    test_loss = test_accuracy = 0.0
    with torch.no_grad():
        for data, target in test_loader:
            output = model(data)
            test_loss += F.nll_loss(output, target, reduction="sum").item()
            test_accuracy += (output.argmax(1) == target).double().sum().item()
    test_loss = metric_average(test_loss / len(test_sampler), "avg_loss")
    test_accuracy = metric_average(test_accuracy / len(test_sampler), "avg_accuracy")
    if hvd.rank() == 0:
        print(f"Test set: loss {test_loss:.4f}, accuracy {test_accuracy:.3f}")


if __name__ == "__main__":
    args = parser.parse_args()
    hvd.init()
    torch.manual_seed(42)
    torch.set_num_threads(1)
    kwargs = {"num_workers": args.num_workers, "persistent_workers": args.persistent}
    if args.num_workers and args.context:
        kwargs["multiprocessing_context"] = args.context
    train_dataset = Doubled(make_data(403, 0))
    train_sampler = DistributedSampler(train_dataset, num_replicas=hvd.size(), rank=hvd.rank())
    train_loader = DataLoader(
        train_dataset, batch_size=args.batch_size, sampler=train_sampler, drop_last=args.drop_last, **kwargs
    )
    test_dataset = make_data(100, 1)
    test_sampler = DistributedSampler(test_dataset, num_replicas=hvd.size(), rank=hvd.rank())
    test_loader = DataLoader(test_dataset, batch_size=50, sampler=test_sampler)
    model = Net(args.width).double()
    if args.batch_norm:
        model.fc1 = torch.nn.Sequential(model.fc1, torch.nn.BatchNorm1d(args.width).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size(), momentum=args.momentum, weight_decay=1e-3)
    if not args.wrap_late:
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    options = {}
    if args.op == "Average":
        options["gradient_predivide_factor"] = args.gradient_predivide_factor
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        op=getattr(hvd, args.op),
        groups=args.groups,
        **options,
    )
    if args.wrap_late:
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for epoch in range(1, args.epochs + 1):
        train(epoch)
        test()
    if args.out and hvd.rank() == 0:
        torch.save(model.state_dict(), args.out)

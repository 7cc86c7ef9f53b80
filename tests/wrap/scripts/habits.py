"""More loops, forwards and losses as people write them, by name; each works under plain Horovod."""

import argparse
import contextlib
import itertools

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from common import make_data
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("mode")
parser.add_argument("--epochs", type=int, default=2)
args = parser.parse_args()
mode, BATCH = args.mode, 8


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = torch.nn.Linear(64, 32)
        self.fc2 = torch.nn.Linear(32, 10)
        self.extra = None

    def features(self, x):
        return torch.relu(self.fc1(x.reshape(-1, 64)))

    def forward(self, x):
        return self.fc2(self.features(x))


class FixedView(Net):
    def forward(self, x):
        return self.fc2(torch.relu(self.fc1(x.view(BATCH, -1))))


class FixedHidden(Net):
    """As recurrent models whose hidden state is made for a batch of so many."""

    def forward(self, x):
        hidden = torch.zeros(BATCH, 32, dtype=x.dtype)
        for row in x.unbind(1):
            hidden = torch.tanh(hidden + self.fc1(row.repeat(1, 8)))
        return self.fc2(hidden)


class OwnHidden(Net):
    """The same, for a batch of any length; as many steps as samples."""

    def forward(self, x):
        batch, steps, _ = x.shape
        hidden = torch.zeros(batch, 32, dtype=x.dtype)
        order = torch.zeros(steps, steps, dtype=x.dtype)
        for row in x.unbind(1):
            hidden = torch.tanh(hidden + self.fc1(row.repeat(1, 8))) + order.sum()
        return self.fc2(hidden.view(x.size(0), -1))


class Asserts(Net):
    def forward(self, x):
        assert x.size(0) == BATCH
        return super().forward(x)


class Picks(Net):
    """Keeps the activations of a few samples for a log."""

    def forward(self, x):
        hidden = self.features(x)
        self.extra = [hidden[number].detach() for number in range(6)]
        return self.fc2(hidden)


class Gathers(Net):
    """Compares its features with those of all ranks."""

    def forward(self, x):
        hidden = F.normalize(self.features(x), dim=1)
        others = hvd.allgather(hidden.detach(), name="features")
        return self.fc2(hidden) + (hidden @ others.t()).mean(1, keepdim=True)


class Centred(Net):
    def forward(self, x):
        hidden = self.features(x)
        return self.fc2((hidden - hidden.mean(0)) / (hidden.std(dim=0) + 1))


class WithLoss(Net):
    """As models for sequences, which leave out some places of their loss."""

    def forward(self, x, y):
        out = super().forward(x)
        if mode == "loss_inside":
            return {"loss": F.cross_entropy(out, y), "logits": out}
        each = F.cross_entropy(out, y, reduction="none")
        if mode == "rows_inside":
            return {"loss": (each * 2).mean(), "logits": out}
        kept = (y > 2).to(each.dtype)
        return {"loss": (each * kept).sum() / kept.sum().clamp(min=1), "logits": out}


class Balanced(Net):
    """As mixtures of experts: a further loss, of the whole batch, beside the result."""

    def forward(self, x):
        out = super().forward(x)
        self.extra = (out.softmax(1).mean(0) ** 2).sum()
        return out


class Padded(Dataset):
    """Sequences of different lengths."""

    def __init__(self):
        generator = torch.Generator().manual_seed(5)
        self.rows = [torch.randn(int(n), 64, dtype=torch.float64, generator=generator) for n in 2 + torch.arange(240) % 7]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index], len(self.rows[index]) % 10


def pad(samples):
    rows, labels = zip(*samples, strict=True)
    x = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return x, torch.tensor(labels)[:, None].expand(-1, x.shape[1]).contiguous()


class Dictionary(Dataset):
    def __len__(self):
        return len(data)

    def __getitem__(self, index):
        x, y = data[index]
        return {"pixels": x, "labels": y, "name": f"picture {index}"}


MODELS = {
    "fixed_view": FixedView, "fixed_hidden": FixedHidden, "own_hidden": OwnHidden, "assert_inside": Asserts, "pick_inside": Picks,
    "gather_inside": Gathers, "centred": Centred, "loss_inside": WithLoss, "rows_inside": WithLoss, "mask_inside": WithLoss,
    "loss_beside": Balanced,
}  # fmt: skip


class Damaged(Dataset):
    """A few of its samples cannot be read."""

    def __len__(self):
        return len(data)

    def __getitem__(self, number):
        return None if number in (100, 111, 157) else data[number]


def without_damaged(samples):
    samples = [sample for sample in samples if sample is not None]
    return torch.utils.data.default_collate(samples)


class Keep:
    """The same, as cannot be seen from outside."""

    def __call__(self, samples):
        return torch.utils.data.default_collate(self.usable(samples))

    def usable(self, samples):
        return [sample for sample in samples if sample is not None]


hvd.init()
torch.manual_seed(3)
torch.set_num_threads(1)
data = make_data(240)
DATASETS = {"padded": Padded, "dictionary": Dictionary, "damaged": Damaged, "damaged_hidden": Damaged}
COLLATES = {"padded": pad, "damaged": without_damaged, "damaged_hidden": Keep()}
dataset = DATASETS[mode]() if mode in DATASETS else data
sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=not mode.startswith("damaged"))
loader = DataLoader(dataset, batch_size=BATCH, sampler=sampler, collate_fn=COLLATES.get(mode))
other = make_data(96, 2)
other_sampler = DistributedSampler(other, num_replicas=hvd.size(), rank=hvd.rank())
other_loader = DataLoader(other, batch_size=BATCH, sampler=other_sampler)
validation = make_data(40, 1)
model = MODELS.get(mode, Net)().double()


def look(gradient):
    """As for a log."""
    norms.append(float(gradient.norm()))


def clip_in_place(gradient):
    gradient.data.clamp_(-0.01, 0.01)


HOOKS = {
    "hook_looks": lambda p: p.register_hook(look),
    "hook_looks_late": lambda p: p.register_post_accumulate_grad_hook(lambda p: look(p.grad)),
    "hook_clips": lambda p: p.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01)),
    "hook_clips_in_place": lambda p: p.register_hook(clip_in_place),
    "hook_clips_late": lambda p: p.register_post_accumulate_grad_hook(lambda p: clip_in_place(p.grad)),
}
norms = []
for parameter in model.parameters():
    HOOKS.get(mode, lambda p: None)(parameter)
if mode == "hook_of_module":
    model.fc2.register_full_backward_hook(lambda module, given, _: tuple(gradient.clamp(-0.01, 0.01) for gradient in given))
parts = [model.fc1, model.fc2] if mode in ("two_optimizers", "late_optimizers") else [model]


def make_optimizer(number, part):
    return hvd.DistributedOptimizer(
        torch.optim.SGD(part.parameters(), lr=0.05),
        named_parameters=[(f"{number}.{name}", p) for name, p in part.named_parameters()],
        # With 2, and one backward a step, Horovod begins to reduce in step().
        backward_passes_per_step=4 if mode.startswith("accumulate") else 2 if mode in ("clip_early", "scale_early") else 1,
        op=hvd.Sum if mode.startswith("global_") else hvd.Average,
    )


# As libraries do that make one for each parameter when they first see it.
optimizers = [] if mode == "late_optimizers" else [make_optimizer(number, part) for number, part in enumerate(parts)]
optimizer = next(iter(optimizers), None)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
BASE = 0.05 / hvd.size() if mode.startswith("global_") else 0.05
num_steps = num_seen = num_seen_by_len = 0


def progress(batches):
    """As tqdm: hands on what it gets, and counts."""
    for count, batch in enumerate(batches):
        yield batch
        if count % 10 == 0:
            print(f"{count} of {len(batches)}")


def adversarial(x, y):
    """Trains on changed inputs as well."""
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(F.cross_entropy(model(x), y, reduction="sum"), x)
    return x.detach() + 0.01 * gradient.sign()


def loss_of(x, y):
    if mode in ("loss_inside", "rows_inside", "mask_inside"):
        return model(x, y)["loss"]
    if mode == "adversarial":
        x = adversarial(x, y)
    if mode == "padded":
        return F.cross_entropy(model(x).view(x.shape[0], -1, 10).transpose(1, 2), y)
    out = model(x)
    if mode == "loss_beside":
        return F.cross_entropy(out, y) + 5 * model.extra
    if mode == "pos_weight":
        return F.binary_cross_entropy_with_logits(out, F.one_hot(y, 10).double(), pos_weight=torch.linspace(1, 3, 10).double())
    if mode == "own_pos_weight":
        positive = F.one_hot(y, 10).double()
        return F.binary_cross_entropy_with_logits(out, positive, pos_weight=(positive.numel() - positive.sum()) / positive.sum())
    if mode == "label_smoothing":
        return torch.nn.CrossEntropyLoss(label_smoothing=0.2)(out, y)
    if mode == "global_constant":
        return F.cross_entropy(out, y, reduction="sum") / (BATCH * hvd.size())
    if mode == "global_sum":
        # As of a VAE.
        rest = -0.5 * torch.sum(1 + out - out.pow(2) - out.exp())
        return 0.1 * (F.mse_loss(out, F.one_hot(y, 10).double(), reduction="sum") + 0.5 * rest)
    if mode == "global_ignored":
        return F.cross_entropy(out, y, ignore_index=3, weight=torch.linspace(0.05, 0.1, 10).double(), reduction="sum")
    if mode == "global_length":
        return F.cross_entropy(out, y, reduction="sum") / y.size(0)
    if mode == "global_total":
        total = hvd.allreduce(torch.tensor(float(len(y))), op=hvd.Sum, name="total")
        return F.cross_entropy(out, y, reduction="sum") / total
    if mode == "penalty":
        return F.cross_entropy(out, y) + 1e-2 * sum(p.pow(2).sum() for p in model.parameters())
    return F.cross_entropy(out, y)


def validate():
    x, y = validation.tensors
    model.eval()
    with torch.no_grad():
        hvd.allreduce(F.cross_entropy(model.fc2(model.features(x)), y), name="validation")
    model.train()


def evaluate_on_training_data():
    """The accuracy on training data, from the loader that trains."""
    counts = torch.zeros(3, dtype=torch.float64)
    for x, y in loader:
        model.eval()
        with torch.no_grad():
            counts += torch.tensor([1.0, len(x), (model(x).argmax(1) == y).sum()], dtype=torch.float64)
    model.train()
    assert counts[0] == len(loader), counts
    counts = hvd.allreduce(counts, op=hvd.Sum, name="counts")
    assert counts[1] == len(data), counts


def set_rate(number):
    """Sets the learning rate by the samples seen so far, which is the same on equal ranks."""
    for group in optimizer.param_groups:
        group["lr"] = BASE * (1 - 0.5 * number / len(data))


def step(x, y):
    global num_steps, num_seen, num_seen_by_len
    if mode == "closure":

        def closure():
            optimizer.zero_grad()
            loss = loss_of(x, y)
            loss.backward()
            return loss

        optimizer.step(closure)
        return
    if mode == "dictionary":
        x, y = x.to("cpu"), y.to("cpu")
    for one in optimizers:
        one.zero_grad()
    loss_of(x, y).backward()
    if not optimizers:
        optimizers.extend(make_optimizer(number, part) for number, part in enumerate(parts))
    if mode == "clip_early":
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    if mode == "scale_early":
        for parameter in model.parameters():
            parameter.grad *= 0.5
        print("norm", sum(parameter.grad.norm().item() for parameter in model.parameters()))
    if mode == "synchronize":
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    with optimizer.skip_synchronize() if mode == "synchronize" else contextlib.nullcontext():
        for one in optimizers:
            one.step()
    num_steps += 1
    if mode == "rate_by_size":
        num_seen += x.size(0)
        set_rate(num_seen)
    if mode == "rate_by_words":
        num_seen += (y >= 0).sum()
        set_rate(num_seen.item())
    if mode == "rate_by_len":
        num_seen_by_len += len(x)
        for group in optimizer.param_groups:
            group["lr"] = BASE * (1 - 0.5 * num_seen_by_len / len(data))
    if mode == "validate_often" and num_steps % 4 == 0:
        validate()


def train():
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for batch in progress(loader):
            step(*([batch["pixels"], batch["labels"]] if mode == "dictionary" else batch))
        validate()
        if mode == "evaluate_on_it":
            evaluate_on_training_data()


def train_in_cycles():
    """Batches are kept by itertools.cycle and come again."""
    for x, y in itertools.islice(itertools.cycle(loader), 40 * args.epochs):
        step(x, y)


def train_in_late_cycles():
    """The same, when 13 batches of another loader are through."""
    for x, y in itertools.islice(itertools.chain(*[other_loader] * 3), 13):
        step(x, y)
    train_in_cycles()


def train_in_probed_cycles():
    """The same, when one batch was looked at."""
    next(iter(loader))
    train_in_cycles()


def train_from_kept():
    """The second epoch takes the batches of the first."""
    kept = []
    for x, y in loader:
        kept.append((x, y))
        step(x, y)
    for x, y in kept:
        step(x, y)


def train_on_two():
    """Labelled batches, and others that come again when they are through."""
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for (x, y), (z, _) in zip(loader, itertools.cycle(other_loader)):
            optimizer.zero_grad()
            out = model(z)
            (F.cross_entropy(model(x), y) + 0.1 * out.pow(2).mean()).backward()
            optimizer.step()


def train_in_turns():
    """A batch of one loader, then one of the other."""
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        others = iter(other_loader)
        for x, y in loader:
            step(x, y)
            try:
                x, y = next(others)
            except StopIteration:
                others = iter(other_loader)
                x, y = next(others)
            step(x, y)


def train_accumulating():
    """Four batches a step, and what is left at the end of an epoch."""
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        optimizer.zero_grad()
        for number, (x, y) in enumerate(loader):
            (loss_of(x, y) / 4).backward()
            if (number + 1) % 4 == 0 or number + 1 == len(loader):
                optimizer.step()
                optimizer.zero_grad()


loops = {
    "cycle": train_in_cycles,
    "late_cycle": train_in_late_cycles,
    "probed_cycle": train_in_probed_cycles,
    "kept": train_from_kept,
    "two_loaders": train_on_two,
    "turns": train_in_turns,
    "accumulate": train_accumulating,
}
loops.get(mode, train)()

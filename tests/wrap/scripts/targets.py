"""Losses that are means over targets, by class weights or without some targets; by name."""

import argparse

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, default_collate
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("mode")
parser.add_argument("--leave-out", type=int, default=-1, help="the last rank's step without a backward")
args = parser.parse_args()
mode, WORDS, LENGTH = args.mode, 10, 6

hvd.init()
torch.manual_seed(3)
torch.set_num_threads(1)
generator = torch.Generator().manual_seed(5)
words = torch.randint(WORDS, (236, LENGTH), generator=generator)
lengths = torch.randint(2, LENGTH + 1, (236,), generator=generator)
labels = torch.where(torch.arange(LENGTH) < lengths[:, None], (3 * words + 1) % WORDS, -100)
is_few = mode in ("few", "guarded", "nothing_to_lose", "no_backward", "no_backward_later")
if is_few:
    # Only at places of a rank's own batch that its smaller share has not.
    labels[torch.arange(236) // hvd.size() % 8 < 5] = -100
data = TensorDataset(words, labels)
sampler = DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=not is_few)


def by_length(samples):
    return default_collate(sorted(samples, key=lambda sample: int((sample[1] != -100).sum()), reverse=True))


def by_first_word(samples):
    x, y = default_collate(samples)
    first = x[:, 0].topk(len(x)).indices
    return x[first], y[first]


collate = {"sorted": by_length, "topped": by_first_word, "sorted_words": by_length}.get(mode)
loader = DataLoader(data, batch_size=8, sampler=sampler, collate_fn=collate)
weight = torch.linspace(0.2, 2.0, WORDS, dtype=torch.float64)


class Tagger(nn.Module):
    """Scores each word; with labels it returns the loss of each word's successor, as language models do."""

    def __init__(self):
        super().__init__()
        self.embed, self.mix, self.scores = nn.Embedding(WORDS, 16), nn.Linear(16, 16), nn.Linear(16, WORDS)

    def forward(self, x, labels=None):
        out = self.scores(self.mix(self.embed(x)).tanh())
        if labels is None:
            return out
        if mode == "mask_inside":
            mask = (labels != -100).double()
            return ((out.softmax(2) - F.one_hot(x, WORDS)).pow(2).mean(2) * mask).sum() / mask.sum()
        following = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
        return F.cross_entropy(out.view(-1, WORDS), following.view(-1), ignore_index=-100)


model = Tagger().double()
if mode == "learned":
    model.register_parameter("factor", nn.Parameter(torch.zeros(())))
passes = 2 if mode in ("passes", "two_losses", "twice") else 1
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5),
    named_parameters=model.named_parameters(),
    backward_passes_per_step=passes,
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)


def losses_of(x, y):
    if mode in ("inside", "mask_inside"):
        return [model(x, y)]
    out = model(x)
    if mode == "sorted_words":
        return [F.cross_entropy(out[:, 0], (3 * x[:, 0] + 1) % WORDS)]
    if mode == "classes":
        return [F.cross_entropy(out[:, 0], (3 * x[:, 0] + 1) % WORDS, weight=weight)]
    if mode == "pixels":
        # As pictures: places along the last dimensions, one number for those without a class, and a loss beside the main one.
        picture, y = out.transpose(1, 2).unsqueeze(3), y.clamp(min=-1).unsqueeze(2)
        beside = F.nll_loss((0.5 * picture).log_softmax(1), y, weight, ignore_index=-1)
        return [F.cross_entropy(picture, y, ignore_index=-1) + 0.4 * beside]
    if mode == "learned":
        # As where tasks are weighted by what a model is uncertain of.
        return [F.cross_entropy(out[:, 0], (3 * x[:, 0] + 1) % WORDS, weight) * model.factor.neg().exp() + model.factor]
    if mode == "constant":
        y = y if epoch else torch.zeros_like(y)
        return [F.cross_entropy(out.transpose(0, 1).reshape(-1, WORDS), y.t().reshape(-1), weight)]
    if mode == "logged":
        F.cross_entropy(out[:, 0], y[:, 0], weight).item()
    if mode == "nothing_to_lose" and not (y != -100).any():
        return [out.sum() * 0]
    if mode in ("smooth", "few"):
        return [F.cross_entropy(out.flatten(0, 1), y.flatten(), label_smoothing=0.1)]
    if mode == "beside":
        loss = F.cross_entropy(out.flatten(0, 1), y.flatten())
        return [loss + 0.1 * out.pow(2).mean() + 1e-3 * model.mix.weight.pow(2).sum()]
    if mode == "twice":
        # Once more, and beside it a loss for nothing: as many as are met, if each is counted.
        F.cross_entropy(out[:, 0], y[:, 0], weight)
        return [F.cross_entropy(out.flatten(0, 1), y.flatten())] * 2
    if mode in ("two_losses", "listed", "after_step"):
        return [F.cross_entropy(model(x).transpose(1, 2), y), 0.5 * F.cross_entropy(out[:, 0], y[:, 0], weight)]
    if mode == "mask":
        # As Megatron's loss.
        mask, each = (y != -100).double().view(-1), F.cross_entropy(out.flatten(0, 1), y.clamp(min=0).flatten(), reduction="none")
        return [torch.sum(each.view(-1) * mask) / mask.sum().clamp(min=1)]
    if mode == "guarded":
        # A plain mean, which every rank has, and one over chosen places.
        loss, is_there = F.cross_entropy(out[:, 0], (3 * x[:, 0] + 1) % WORDS), y != -100
        return [loss + out[is_there].pow(2).mean() if is_there.any() else loss]
    if mode.startswith("chosen"):
        is_there = y != -100
        if mode == "chosen":
            # Beside a loss of all, as the box and the class of a detector.
            return [F.cross_entropy(out[is_there], y[is_there], weight) + 0.1 * out.pow(2).mean()]
        if mode == "chosen_flat":
            flat = is_there.view(-1)
            return [F.nll_loss(out.view(-1, WORDS)[flat].log_softmax(1), y.view(-1)[flat])]
        each = F.cross_entropy(out.transpose(1, 2), y, reduction="none")
        if mode == "chosen_mean":
            hard = each[each > 2].mean()
            return [each[is_there].mean() + 0.5 * hard]
        if mode == "chosen_sum":
            return [each[is_there].sum() / is_there.sum() + torch.masked_select(out[..., 0], is_there).square().mean()]
        other = F.one_hot(x, WORDS).double()
        return [F.smooth_l1_loss(out[is_there], other[is_there]) + (out[is_there].exp() - out[is_there]).abs().mean()]
    if mode == "by_count":
        each = F.cross_entropy(out.transpose(1, 2), y, weight, reduction="none")
        sums = F.cross_entropy(out.flatten(0, 1), y.flatten(), reduction="sum") / (y != -100).sum().item()
        return [each.sum() / weight[y[y != -100]].sum() + 0.5 * sums]
    if mode == "by_places":
        # All first places come before the second ones.
        return [F.cross_entropy(out.transpose(0, 1).reshape(-1, WORDS), y.t().reshape(-1))]
    if mode == "smooth_beside_sharp":
        smooth = F.cross_entropy(out[:, 0], y[:, 0], label_smoothing=0.1)
        return [smooth + F.cross_entropy(out[:, 1], y[:, 1], weight)]
    return [F.cross_entropy(out.flatten(0, 1), y.flatten())]


num_steps = num_batches = 0
for epoch in range(4 if mode == "passes" else 2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        losses = losses_of(x, y)
        num_batches += 1
        has_loss = num_steps != args.leave_out or hvd.rank() != hvd.size() - 1
        # "later": from the first batch of the second pass on.
        has_loss &= (mode != "no_backward" and (mode != "no_backward_later" or not epoch)) or bool((y != -100).any())
        if mode == "listed":
            torch.autograd.backward(losses)
        for number, loss in enumerate(losses if has_loss and mode != "listed" else ()):
            if mode == "after_step" and number:
                optimizer.step()
                loss = losses_of(x, y)[number]
            loss.backward(retain_graph=mode == "twice")
        if is_few:
            hvd.allreduce(losses[0].detach().nan_to_num(), name="log")
        if mode != "passes" or num_batches % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
            num_steps += 1

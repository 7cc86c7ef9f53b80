"""What local steps of AdamW lose beside synchronous training, by period, outer step, and what becomes of the moments at a merge.

    python benchmarks/period_simulated.py --ranks 1:1 --period 10 --moments average --lr 0.0018 --seed 2
    python benchmarks/period_simulated.py --ranks 1:1 --synchronous --lr 0.0018 --seed 2

One process plays all ranks: no clock and no exchange, so that losses are of the rules alone. Task, warm-up, falling rate and
clipping are those of peers.py. Prints one line of JSON: the held-out loss on the way, and at the end over all held-out samples.
"""

from __future__ import annotations

import argparse
import copy
import json

import numpy as np
import torch
from peers_task import BATCH, TASKS
from torch import Tensor, nn

from hvd_adaptive.algorithm.outer_step import OuterStep
from hvd_adaptive.compress.codec import ValueCodec, of_values
from hvd_adaptive.compress.parse import parse_codec

BETA1, EPS = 0.9, 1e-8
AVERAGED = {"average": ("exp_avg",), "second": ("exp_avg_sq",), "all": ("exp_avg", "exp_avg_sq")}
MOMENTS = ("keep", *AVERAGED, "zero", "follow", "direction")
MOMENTS_HELP = (
    "average: the ranks' first ones, second: their second ones, all: both; follow: the first ones move by what the merged change "
    "says of the others' gradients, without an exchange; direction: what they are of an update, without the learning rate"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt-1m", choices=TASKS)
    parser.add_argument("--ranks", default="1:1", help="speeds: each makes its part of a round's steps")
    parser.add_argument(
        "--synchronous", action="store_true", help="steps of all ranks' batches together; an outer step after --period of them"
    )
    parser.add_argument("--period", type=int, default=50, help="batches of all ranks between two merges")
    parser.add_argument("--delay", type=int, default=0, help="batches of all ranks from a merge to taking it in")
    parser.add_argument("--fragments", type=int, default=1, help="parts of the model, merged one after the other in each period")
    parser.add_argument("--delay-from", type=int, default=0, help="samples of all ranks before which merges are taken in at once")
    parser.add_argument("--moments", default="keep", choices=MOMENTS, help=MOMENTS_HELP)
    parser.add_argument("--moments-every", type=int, default=1, help="merges from one to the next average of moments")
    parser.add_argument("--outer-step", default="none", choices=("none", "momentum", "nesterov", "cautious"))
    parser.add_argument("--outer-lr", type=float, help="(default: by the momentum)")
    parser.add_argument("--outer-momentum", type=float, help="(default: it looks back over the last fifth of the run)")
    parser.add_argument("--outer-from", type=int, default=0, help="samples of all ranks before the outer step begins")
    parser.add_argument("--ratio", type=float, default=1.0, help="Adam's denominator is as of so many batches")
    parser.add_argument("--compression", default="none", help="of changes and moments on the way; as hvd-adaptive's option")
    parser.add_argument("--moments-compression", help="of moments on the way (default: as --compression)")
    parser.add_argument("--lr", type=float, default=0.0018)
    parser.add_argument("--beta2", type=float, default=0.95)
    parser.add_argument("--clip", type=float, default=1.0, help="norm of a step's gradient")
    parser.add_argument("--samples", type=int, default=4800)
    parser.add_argument("--warmup", type=int, default=800)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if options.delay and (options.moments not in ("keep", "follow") or options.delay >= options.period):
        parser.error("--delay needs --moments keep or follow, and fewer batches than --period")
    if options.fragments > 1 and (options.moments != "keep" or options.synchronous):
        parser.error("--fragments needs --moments keep, and no --synchronous")
    if options.outer_step == "none" and (options.outer_lr, options.outer_momentum) != (None, None):
        parser.error("--outer-lr and --outer-momentum need --outer-step momentum, nesterov or cautious")
    torch.set_num_threads(1)
    curve, final = Simulation(options).run()
    print(json.dumps(vars(options) | {"curve": curve, "final": round(final, 4)}), flush=True)


def _codec(spec: str) -> ValueCodec | None:
    return None if spec == "none" else of_values(parse_codec(spec))


class Simulation:
    """All ranks of a run, in turns."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options, self._task = options, TASKS[options.model]
        torch.manual_seed(options.seed)
        first = self._task.model()
        (self._x, self._y), self._test = self._task.samples()
        self._order = np.random.default_rng(options.seed).permutation(len(self._x))
        self._num_samples = 0
        speeds = [float(speed) for speed in options.ranks.split(":")]
        num_replicas = 1 if options.synchronous else len(speeds)
        self._batch = BATCH * (len(speeds) // num_replicas)
        self._models = [copy.deepcopy(first) for _ in range(num_replicas)]
        betas = BETA1, options.beta2
        self._optimizers = [
            torch.optim.AdamW(model.parameters(), lr=options.lr, betas=betas, weight_decay=0.1) for model in self._models
        ]
        parts = [1.0] if options.synchronous else [speed / sum(speeds) for speed in speeds]
        self._steps = [max(1, round(options.period * part)) for part in parts]
        self._weights = [steps / sum(self._steps) for steps in self._steps]
        self._global = [p.detach().clone() for p in first.parameters()]
        self._codec = _codec(options.compression)
        self._moments_codec = _codec(options.moments_compression or options.compression)
        lr = options.outer_lr if options.outer_step != "none" else 1.0
        # It counts samples where the product counts updates.
        self._outer = OuterStep(
            options.outer_step, lr=lr, momentum=options.outer_momentum, start=options.outer_from, num_fragments=options.fragments
        )
        self._velocity = [torch.zeros_like(base) for base in self._global]
        # Sum of each rank's rates since the last merge.
        self._rates = [0.0] * num_replicas
        self._lost: dict[tuple[str, int, int], Tensor] = {}
        # By the middle of each parameter.
        sizes = np.array([base.numel() for base in self._global])
        self._fragment_of = ((sizes.cumsum() - sizes / 2) * options.fragments / sizes.sum()).astype(int)
        # Of merges that are still to be taken in, by fragment: after how many batches, and each replica's parameters as they went
        # into it.
        self._sent: dict[int, tuple[int, list[list[Tensor]]]] = {}
        self._num_batches = self._num_merges = 0

    def run(self) -> tuple[list[tuple[int, float]], float]:
        """Returns samples and loss on the way, and the last loss."""
        options, curve = self._options, []
        every, period = options.samples // 3, sum(self._steps)
        merges = len(self._models) > 1 or options.outer_step != "none"
        ends = [round(period * (number + 1) / options.fragments) for number in range(options.fragments if merges else 0)]
        while self._num_samples < options.samples:
            done = [0] * len(self._models)
            # Whoever is least far within the round is next, as its progress is that of the clock.
            for _ in range(period):
                rank = min(range(len(done)), key=lambda r: (done[r] + 1) / self._steps[r])
                self._step(rank)
                done[rank] += 1
                self._num_batches += 1
                for fragment in [number for number, (due, _) in self._sent.items() if due == self._num_batches]:
                    self._take_in(fragment)
                for fragment, end in enumerate(ends):
                    if sum(done) == end:
                        self._merge(fragment)
            self._merge_buffers()
            self._rates = [0.0] * len(self._models)
            if self._num_samples >= every * (len(curve) + 1):
                curve.append((self._num_samples, round(self._score(256), 4)))
        return curve, self._score(len(self._test[0]))

    def _step(self, rank: int) -> None:
        options, seen = self._options, self._num_samples
        rows = self._order[(np.arange(self._batch) + seen) % len(self._order)]
        self._num_samples += self._batch
        optimizer, model = self._optimizers[rank], self._models[rank]
        rate = options.lr * max(0.0, 1 - seen / options.samples) * min(1.0, (seen + 1) / options.warmup)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        self._task.loss(model, self._x[rows], self._y[rows]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), options.clip)
        optimizer.step()
        self._rates[rank] += rate
        if options.ratio != 1:
            self._lengthen(optimizer, rate)

    @torch.no_grad()
    def _lengthen(self, optimizer: torch.optim.Optimizer, rate: float) -> None:
        """Makes up for the noise of a small batch in the denominator, which a larger batch has less of."""
        ratio = self._options.ratio
        for p, state in optimizer.state.items():
            first, second = self._moments(state)
            larger = second / ratio + (1 - 1 / ratio) * first**2
            p.sub_(rate * first * (1 / (larger.sqrt() + 1e-8) - 1 / (second.sqrt() + 1e-8)))

    @torch.no_grad()
    def _take_in(self, fragment: int) -> None:
        _, sent = self._sent.pop(fragment)
        for model, before in zip(self._models, sent, strict=True):
            for place, replica in enumerate(model.parameters()):
                if self._fragment_of[place] == fragment:
                    replica.add_(self._global[place] - before[place])

    @torch.no_grad()
    def _merge(self, fragment: int) -> None:
        self._outer.count(self._batch * sum(self._steps), fragment)
        self._outer.begin(fragment)
        self._num_merges += 1
        moves = self._outer.begun and self._outer.kind != "none"
        parameters = [list(model.parameters()) for model in self._models]
        is_late = self._options.delay > 0 and self._num_samples >= self._options.delay_from
        if is_late:
            sent = [[p.detach().clone() for p in replicas] for replicas in parameters]
            self._sent[fragment] = self._num_batches + self._options.delay, sent
        for place, (base, *replicas) in enumerate(zip(self._global, *parameters, strict=True)):
            if self._fragment_of[place] != fragment:
                continue
            own = [replica - base for replica in replicas]
            change = self._mean("change", place, own, self._codec)
            if self._options.moments == "follow":
                for optimizer, replica, its, rates in zip(self._optimizers, replicas, own, self._rates, strict=True):
                    state = optimizer.state[replica]
                    bias = 1 - BETA1 ** float(state["step"])
                    state["exp_avg"].sub_((change - its) * self._moments(state)[1].sqrt() * (bias / rates))
            self._outer.move_(base, change, self._velocity[place] if moves else None)
            if is_late:
                continue
            for replica in replicas:
                replica.copy_(base)
            states = [o.state[p] for o, p in zip(self._optimizers, replicas, strict=True)]
            is_due = self._num_merges % self._options.moments_every == 0
            for name in AVERAGED.get(self._options.moments, ()) if is_due else ():
                mean = self._mean(name, place, [state[name] for state in states], self._moments_codec)
                for state in states:
                    state[name].copy_(mean)
            if self._options.moments == "direction" and is_due:
                moments = [self._moments(state) for state in states]
                mean = self._mean("direction", place, [m / (v.sqrt() + EPS) for m, v in moments], self._moments_codec)
                for state, (_, v) in zip(states, moments, strict=True):
                    state["exp_avg"].copy_(mean * (v.sqrt() + EPS) * (1 - BETA1 ** float(state["step"])))
            if self._options.moments == "zero":
                for state in states:
                    state["exp_avg"].zero_()

    @torch.no_grad()
    def _merge_buffers(self) -> None:
        for values in zip(*(model.buffers() for model in self._models), strict=True):
            if values[0].is_floating_point():
                mean = sum(w * value for w, value in zip(self._weights, values, strict=True))
                for value in values:
                    value.copy_(mean)

    def _mean(self, name: str, place: int, values: list[Tensor], codec: ValueCodec | None) -> Tensor:
        """Returns the weighted mean, coded by each rank and again as their sum, what codes lose being sent in the next round."""
        weighted = (w * value for w, value in zip(self._weights, values, strict=True))
        total = sum(self._coded(value, (name, place, rank), codec) for rank, value in enumerate(weighted))
        return self._coded(total, (name, place, -1), codec)

    def _coded(self, value: Tensor, key: tuple[str, int, int], codec: ValueCodec | None) -> Tensor:
        if codec is None or value.dim() < 2:
            return value
        if key not in self._lost:
            self._lost[key] = torch.zeros(value.numel())
        payload, coded = torch.empty(codec.payload_bytes(value.numel()), dtype=torch.uint8), torch.empty_like(value)
        # What is lost stays in the residual.
        codec.encode_(value, payload, key=self._num_samples * 1009 + key[1] * 7 + key[2], residual=self._lost[key])
        codec.decode_(payload, coded)
        return coded

    def _moments(self, state: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Returns Adam's moments without their bias."""
        step = float(state["step"])
        return state["exp_avg"] / (1 - BETA1**step), state["exp_avg_sq"] / (1 - self._options.beta2**step)

    @torch.no_grad()
    def _score(self, most: int) -> float:
        x, y = (part[:: max(1, len(part) // most)] for part in self._test)
        model = copy.deepcopy(self._models[0]).eval()
        # Where sums are still to be taken in, a replica is not the global model.
        for p, base in zip(model.parameters(), self._global if len(self._models) > 1 else (), strict=False):
            p.copy_(base)
        losses = [self._task.loss(model, a, b).item() * len(a) for a, b in zip(x.split(256), y.split(256), strict=True)]
        return sum(losses) / len(x)


if __name__ == "__main__":
    main()

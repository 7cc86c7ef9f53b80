"""What peers.py trains, alike for all methods: a small GPT over bytes or a CNN, the clock, and the looks at the loss."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from digits import Digits, small_resnet
from gpt import GPT, load_text, next_byte_loss
from letters import letters, letters_resnet

BATCH = 8
# Samples over all ranks between two looks at the held-out loss, and between two merges where a method has equal periods: 50
# batches, the default of `local`.
PERIOD = 50 * BATCH
# Held-out samples of a look, and of the last look of a run of stage "equal".
TEST_SAMPLES, ALL_TEST_SAMPLES = 256, 2048
_SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")

Samples = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is trained.

    Attributes:
        text: it in words, for the record.
        model: makes it.
        loss: of a model, inputs and what they should give, in nats: the mean.
        samples: gives those to train on and those held out.
    """

    text: str
    model: Callable[[], nn.Module]
    loss: Callable[[Callable[[Tensor], Tensor], Tensor, Tensor], Tensor]
    samples: Callable[[], tuple[Samples, Samples]]


def windows() -> tuple[Samples, Samples]:
    """Returns bytes and next bytes, int64, shape (n, 64): all windows to train on, and some from all over the last tenth."""
    x, y = load_text(1 << 40)[0].tensors  # nine tenths; the rest is not needed
    held_out = len(x) // 10
    rows = torch.arange(ALL_TEST_SAMPLES) * held_out // ALL_TEST_SAMPLES + len(x) - held_out
    return (x[:-held_out], y[:-held_out]), (x[rows], y[rows])


def digits() -> tuple[Samples, Samples]:
    """Returns the handwritten digits that come with scikit-learn, those to train on also moved by a pixel, to all nine places."""
    train, test = Digits(train=True), Digits(train=False)
    padded = F.pad(train.images, (1, 1, 1, 1))
    moved = [padded[:, :, 1 + down : 9 + down, 1 + right : 9 + right] for down in (-1, 0, 1) for right in (-1, 0, 1)]
    return (torch.cat(moved), train.labels.repeat(9)), (test.images, test.labels)


def image_loss(model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
    """Returns the mean loss of an image, in nats."""
    return F.cross_entropy(model(x), y)


def _gpt(millions: str, width: int, num_layers: int) -> Task:
    text = f"a GPT of {millions} million parameters (width {width}, {num_layers} layers)"
    return Task(text=text, model=lambda: GPT(width, num_layers, width // 32), loss=next_byte_loss, samples=windows)


def _letters(norm: str) -> Task:
    return Task(
        text=f"a ResNet of 0.21 million parameters (width 64, 5 convolutions, {norm}) over letters in 14 fonts",
        model=lambda: letters_resnet(batch_norm=norm == "BatchNorm"), loss=image_loss,
        samples=lambda: (letters(6000, seed=1), letters(ALL_TEST_SAMPLES, seed=2)),
    )  # fmt: skip


TASKS = {
    "gpt-1m": _gpt("1.03", 128, 5),
    "gpt-4m": _gpt("4.03", 256, 5),
    "gpt-10m": _gpt("10.8", 384, 6),
    "resnet": Task(
        text="a ResNet of 0.61 million parameters (width 128, 5 convolutions)", model=lambda: small_resnet(128),
        loss=image_loss, samples=digits,
    ),
    "letters": _letters("GroupNorm"),
    "letters-batch-norm": _letters("BatchNorm"),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run.

    Attributes:
        stage: "tune", "run" or "equal".
        method: a name of peers_methods.METHODS.
        link: "loopback", or the rate as tc writes it.
        speeds: of the ranks, such as "1:2"; the slowest is 1.
        lr: AdamW's.
        seed: of weights and order.
        samples: of all ranks, at which losses are compared.
        most_samples: the run ends here, or at ``samples`` with the target reached.
        target: loss; None: run to ``most_samples``.
        model: a name of TASKS.
        decay: the learning rate falls to 0 in a straight line, at ``most_samples``.
        warmup: samples of all ranks in which the learning rate rises, in a straight line.
        device: "cpu", or "cuda": all ranks share the first GPU.
        period: batches of all ranks between two merges, where a method has equal periods.
        batch: samples of a rank's batch.
    """

    stage: str
    method: str
    link: str
    speeds: str
    lr: float
    seed: int
    samples: int
    most_samples: int
    target: float | None = None
    model: str = "gpt-1m"
    decay: bool = False
    warmup: int = 0
    device: str = "cpu"
    period: int = PERIOD // BATCH
    batch: int = BATCH

    @property
    def parts(self) -> list[float]:
        """Each rank's part of all speeds."""
        speeds = [float(speed) for speed in self.speeds.split(":")]
        return [speed / sum(speeds) for speed in speeds]

    @property
    def factors(self) -> list[float]:
        """How many times as long each rank's forward and backward pass takes; with more ranks than two, so that two cores are
        enough for all."""
        speeds = [float(speed) for speed in self.speeds.split(":")]
        return [max(1.0, len(speeds) / 2) * max(speeds) / speed for speed in speeds]


class Training:
    """One rank's part in a run.

    Args:
        case: the run.
        rank: this rank.
        address: at which rank 0 is found.
        port: where ranks meet for looks; the next one is free for the method.
    """

    def __init__(self, case: Case, *, rank: int, address: str, port: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(case.seed)
        self.case, self.rank, self.world_size = case, rank, len(case.parts)
        self.address, self.port = address, port
        task = TASKS[case.model]
        self.device = torch.device(case.device)
        self.model, self.loss = task.model().to(self.device), task.loss
        (self.train_x, self.train_y), self._test = task.samples()
        self._order = np.random.default_rng(case.seed).permutation(len(self.train_x))[rank :: self.world_size]
        self._optimizers: list[torch.optim.Optimizer] = []
        # This rank's part of all samples so far.
        self._part = 1 / self.world_size
        # Seconds of the last pass of so many samples, a CPU's or the GPU's: a smaller batch takes more of them a sample.
        self._factor, self._pass_s = case.factors[rank], dict[int, float]()
        self.num_steps = self.num_samples = 0
        self.train_s, self._since = 0.0, None
        self.curve: list[tuple[int, float, float]] = []
        self.final_loss: float | None = None
        self._store = torch.distributed.TCPStore(
            address, port, self.world_size, rank == 0, timeout=timedelta(seconds=120), wait_for_workers=True
        )
        self._meetings = 0
        self._sent_before = self._sent()

    def optimizer(self, parameters: Iterable[nn.Parameter] | None = None) -> torch.optim.AdamW:
        """Returns the AdamW that every method steps with."""
        parameters = self.model.parameters() if parameters is None else parameters
        self._optimizers.append(torch.optim.AdamW(parameters, lr=self.case.lr, betas=(0.9, 0.95), weight_decay=0.1))
        return self._optimizers[-1]

    def batch(self) -> tuple[Tensor, Tensor]:
        """Returns this rank's next samples of its part of the data."""
        size = self.case.batch
        rows = self._order[(np.arange(size) + self.num_steps * size) % len(self._order)]
        return self.train_x[rows].to(self.device), self.train_y[rows].to(self.device)

    def backward(
        self, forward: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, *, num_samples_before: int | None = None
    ) -> Tensor:
        """Computes the gradients of a batch. A slower rank sleeps first: a multiple of the time that its last pass of as many
        samples took.

        Args:
            forward: the model.
            x: the batch's inputs.
            y: what they should give.
            num_samples_before: of all ranks, as far as the method knows; None: from this rank's own and its part so far.
        """
        self._set_rate(self.num_samples / self._part if num_samples_before is None else num_samples_before)
        if self._factor > 1:
            time.sleep((self._factor - 1) * self._pass_s.get(len(x), max(self._pass_s.values(), default=0.0)))
        begin = self._pass_clock()
        loss = self.loss(forward, x, y)
        loss.backward()
        self._pass_s[len(x)] = self._pass_clock() - begin
        self.num_steps += 1
        self.num_samples += len(x)
        return loss

    def _pass_clock(self) -> float:
        if self.device.type == "cpu":
            return time.thread_time()
        if self._factor > 1:
            torch.cuda.synchronize()
        return time.perf_counter()

    def _set_rate(self, num_samples_before: float) -> None:
        case = self.case
        rate = case.lr * (max(0.0, 1 - num_samples_before / case.most_samples) if case.decay else 1.0)
        if case.warmup:
            rate *= min(1.0, (num_samples_before + 1) / case.warmup)
        for group in (group for optimizer in self._optimizers for group in optimizer.param_groups):
            group["lr"] = rate

    def clip(self) -> None:
        """Clips the gradients of the model at norm 1."""
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)

    def start(self) -> None:
        """Starts the clock once all ranks are here. COLLECTIVE."""
        self.gather(None)
        self._since = time.perf_counter()

    def gather(self, value: Any) -> list[Any]:
        """Returns every rank's value, in rank order. COLLECTIVE."""
        self._meetings += 1
        self._store.set(f"{self._meetings}.{self.rank}", json.dumps(value))
        return [json.loads(self._store.get(f"{self._meetings}.{rank}")) for rank in range(self.world_size)]

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Stops the clock within the block, after which all ranks go on together. COLLECTIVE."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        if self._since is not None:
            self.train_s += time.perf_counter() - self._since
        self._since = None
        yield
        self.start()

    def test_samples(self, *, all_of_them: bool = False) -> Samples:
        """Returns the held-out samples of a look."""
        x, y = self._test
        every = 1 if all_of_them else max(1, len(x) // TEST_SAMPLES)
        return x[::every].to(self.device), y[::every].to(self.device)

    def score(self, model: nn.Module, *, all_of_them: bool = False) -> float:
        """Returns the held-out loss of a model that all ranks hold, of which each scores a part of the samples. COLLECTIVE."""
        x, y = self.test_samples(all_of_them=all_of_them)
        own_x, own_y = x[self.rank :: self.world_size], y[self.rank :: self.world_size]
        # In training mode BatchNorm would take the held-out samples into its statistics.
        model.eval()
        with torch.no_grad():
            own = self.loss(model, own_x, own_y).item() * len(own_x)
        model.train()
        return float(sum(self.gather(own)) / len(x))

    def look(self, model: nn.Module | None = None) -> bool:
        """Writes down samples, seconds and loss, at a place where all ranks hold the same model. COLLECTIVE.

        Returns:
            Whether the run is to end.
        """
        with self.pause():
            found = self.gather([self.num_samples, self.train_s])
            num_samples, seconds = sum(n for n, _ in found), max(s for _, s in found)
            self._part = max(self.num_samples, 1) / num_samples
            self.curve.append((num_samples, seconds, self.score(model or self.model)))
            is_over = self.is_over(num_samples)
            if is_over and self.case.stage == "equal":
                self.final_loss = self.score(model or self.model, all_of_them=True)
        return is_over

    def is_over(self, num_samples: int) -> bool:
        """Tells whether the run is to end after so many samples."""
        case = self.case
        reached = case.target is not None and self.curve and self.curve[-1][2] <= case.target
        return num_samples >= case.most_samples or (bool(reached) and num_samples >= case.samples)

    def finish(self, path: Path, **more: Any) -> None:
        """Writes what was found, on rank 0. COLLECTIVE."""
        sent = self.gather(self._sent() - self._sent_before)
        samples = self.gather(self.num_samples)
        # Of the rank that began the last step.
        rates = (group["lr"] for optimizer in self._optimizers for group in optimizer.param_groups)
        last_lr = min(self.gather(max(rates, default=0.0)))
        if self.rank == 0:
            result = {
                "case": dataclasses.asdict(self.case),
                "curve": [(n, round(s, 3), round(loss, 5)) for n, s, loss in self.curve],
                "rank_samples": samples,
                "sent_mb": [round(num_bytes / 1e6, 2) for num_bytes in sent],
                "load": os.getloadavg()[0],
                "last_lr": last_lr,
                **({} if self.final_loss is None else {"final_loss": round(self.final_loss, 5)}),
                **more,
            }
            path.write_text(json.dumps(result))
        self.gather(None)

    def _sent(self) -> int:
        return int(_SENT.read_text()) if self.case.link != "loopback" else 0


"""From sample rows to a batch on the device, fetched while the one before computes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from numbers import Number
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torch.utils.data._utils.collate import collate_tensor_fn, default_collate_fn_map

from hvd_adaptive.algorithm.micro_batches import micro_batches, stand_in
from hvd_adaptive.engine.device_clock import Moment
from hvd_adaptive.engine.device_copies import CopyStream, to_device
from hvd_adaptive.engine.device_times import DeviceTimes
from hvd_adaptive.engine.records import RoundStats
from hvd_adaptive.engine.samples import Collate, SampleReader, is_pair

Rows = NDArray[np.int64]


class InMicroBatches:
    """Stands where a batch has its samples in micro-batches: whoever uses it is told so."""

    @classmethod
    def _refuse(cls, *_: Any, **__: Any) -> Any:
        raise RuntimeError(
            "with micro_batch_size a batch has no x and y of its own: write `for micro in batch.micro_batches():` inside of "
            "session.step(batch), use micro.x and micro.y there, and call optimizer.step() once, after that loop"
        )

    __getattr__ = __len__ = __iter__ = __getitem__ = __torch_function__ = _refuse


@dataclass(slots=True)
class Batch:
    """What a rank trains on next.

    Attributes:
        x: the samples' inputs, on the session's device.
        y: the samples' targets; None for a data set whose samples are not pairs.
        rows: the samples' positions in the data set, a NumPy array of int64, shape (num_samples,).
        work: cost of the samples, in the unit that the cursor counts.
        loss: set it to this batch's mean loss, a 0-dim tensor or a number, to have it in the round's record. Of micro-batches,
            set each one's.
        num_targets: set it, before backward, to what a loss that is a mean over targets is divided by: their number, or the sum
            of their weights. For ``loss_reduction="targets"``; the record's loss is then the mean over targets, too. Of
            micro-batches, set each one's. A 0-dim tensor or a number >= 0; to read a GPU's tensor waits for that GPU, so count
            before the forward pass.
        number: of this rank's batches, from 1; 0 for one that no session gave.
        num_samples_before: samples that all ranks together were given before this step, since the training's first epoch began.
            Let learning-rate schedules follow it: ranks make different numbers of steps.
        weight: of a micro-batch: what its mean counts in its batch's; below 0 where it takes off again what another one has
            more than once, 0 where the rank has no samples.
    """

    x: Any
    y: Any
    rows: Rows
    work: int
    loss: Any = None
    number: int = 0
    num_samples_before: int = 0
    weight: float = 1.0
    # What each of its samples counts: 1; less where rows repeat, below 0 where they are taken off again, 0 if they are others'.
    _sample_weight: float = 1.0
    # ``num_samples_before`` of this round alone, from the strategy.
    _place: int = 0
    _parts: list[Batch] | None = None
    _weigh: Callable[[Batch], None] | None = None
    _num_handed: int = 0
    _is_open: bool = False
    _is_over: bool = False
    _num_targets: float | None = None
    # The step that has counted its targets, and how many.
    _counted: tuple[object, float] = (None, 0.0)

    @property
    def num_targets(self) -> float | None:
        """What a loss that is a mean over targets is divided by; None: not set."""
        return self._num_targets

    @num_targets.setter
    def num_targets(self, number: Any) -> None:
        is_number = not number.dim() if isinstance(number, torch.Tensor) else isinstance(number, (Number, np.generic))
        try:
            count = float(number) if is_number else math.nan
        except (TypeError, OverflowError, RuntimeError):
            count = math.nan
        if not 0 <= count < math.inf:
            raise ValueError(f"batch.num_targets must be a number >= 0, or a 0-dim tensor, got {number!r}")
        self._num_targets = count

    @property
    def num_samples(self) -> int:
        """Samples in the batch."""
        return len(self.rows)

    @property
    def num_micro_batches(self) -> int:
        """Backward passes of the step."""
        return 1 if self._parts is None else len(self._parts)

    def __iter__(self) -> NoReturn:
        raise TypeError("a Batch is no pair: write `for batch in session.batches(dataset):`, and use batch.x and batch.y")

    def micro_batches(self) -> Iterator[Batch]:
        """Yields the batch in micro-batches of ``Config.micro_batch_size`` samples each; without that, itself.

        Call ``backward`` for the mean loss of each, undivided, and the optimizer's ``step`` once after all of them: each gradient
        is weighted as it is computed, so that together they are the gradient of the step's samples.
        """
        if self._parts is None:
            yield self
            return
        for number, part in enumerate(self._parts, start=1):
            self._num_handed = max(self._num_handed, number)
            if self._weigh is not None:
                self._weigh(part)
            yield part

    def finish(self) -> None:
        """Takes the batch's loss from its micro-batches, at the end of its step.

        Raises:
            RuntimeError: if the step did without some of them.
        """
        self._is_over = True
        if self._parts is None:
            if self._num_targets is not None:
                self._num_targets *= self._sample_weight
            return
        if self._num_handed < len(self._parts):
            raise RuntimeError(
                f"a step ended after {self._num_handed} of its {len(self._parts)} micro-batches: go through all of "
                "batch.micro_batches() inside of session.step(batch), as its samples count as used"
            )
        weights = [part.weight for part in self._parts]
        counts = [part.num_targets for part in self._parts]
        if None not in counts:
            # What each one's targets count in the batch.
            weights = [part._sample_weight * (part.num_targets or 0.0) for part in self._parts]
            self._num_targets = math.fsum(weights)
            weights = [weight / (self._num_targets or 1.0) for weight in weights]
        if self.loss is None and all(part.loss is not None for part in self._parts):
            losses = [part.loss.detach() if hasattr(part.loss, "detach") else part.loss for part in self._parts]
            # A mean over no targets is no number.
            self.loss = sum(weight * loss for weight, loss in zip(weights, losses, strict=True) if weight)


class BatchSource:
    """Makes batches from rows of a map-style data set.

    Args:
        dataset: has ``__len__`` and one of: ``get_batch(rows) -> (x, y)``, torch's ``__getitems__(list)``, ``__getitem__(row)``.
        device: where x and y go.
        collate: makes a batch from a list of samples; torch's ``default_collate`` by default. Not used with ``get_batch``.
            What it returns is (x, y) if it is a tuple of two, and otherwise x alone. ``default_collate`` makes lists of tuples;
            there the samples decide, which are (x, y) if they are tuples of two.
        times: of the steps that compute the batches; by default those of a device that is this process.
        micro_batch_size: samples of each micro-batch; None: batches are whole.

    Attributes:
        times: as given.
        reader: reads the samples.
        num_prefetched: batches after the one in work that may be on their way.
        following: what comes after the round in the epoch: the rows, and their work, None where it is their number.
        description: what the rows are of, as text.

    Raises:
        TypeError: for a data set that has no length or cannot be indexed, such as an IterableDataset.
    """

    num_prefetched = 1

    def __init__(
        self,
        dataset: Any,
        device: torch.device,
        collate: Callable[[list[Any]], Any] | None = None,
        times: DeviceTimes | None = None,
        *,
        micro_batch_size: int | None = None,
    ) -> None:
        _refuse_stream(dataset)
        if len(dataset) == 0:
            raise ValueError("dataset must have at least one sample, got none")
        self._dataset = dataset
        self._length = len(dataset)
        self.description = f"{len(dataset)} samples, fingerprint {getattr(dataset, 'fingerprint', 'unknown')}"
        self._device = device
        self._stream = CopyStream(device)
        self.reader = SampleReader(dataset, collate := Collate(collate))
        # A GPU's tensors would wait for the rows.
        self._takes_rows = (
            type(dataset) is TensorDataset and collate.is_default
            and default_collate_fn_map.get(torch.Tensor) is collate_tensor_fn
            and all(type(t) is torch.Tensor and t.device.type == "cpu" and _is_plain(t) for t in dataset.tensors)
        )  # fmt: skip
        self._micro_batch_size = micro_batch_size
        self.times = times or DeviceTimes()
        self.following: tuple[Rows, NDArray[np.int64] | None] = (np.empty(0, dtype=np.int64), None)

    def begin_pass(self) -> None:
        """Begins a loop over the data, within which their number must stay the same."""
        self._length = len(self._dataset)

    def __len__(self) -> int:
        if (length := len(self._dataset)) != self._length:
            raise RuntimeError(
                f"the data set has {length:,} samples now and had {self._length:,} when the loop over its batches began: change "
                "it between two loops, as in one loop for each epoch (num_epochs=epoch + 1)"
            )
        return length

    def load(self, rows: Rows, work: int, *, stands_in: bool = False) -> Batch:
        """Returns the batch of these rows, read here and now, for the present stream.

        Args:
            rows: the samples.
            work: their cost.
            stands_in: the samples are other ranks': the batch has none of its own, and counts nothing.
        """
        batch, reads = self._outline(rows, work, stands_in=stands_in)
        for part, part_rows in reads:
            self._fill(part, self._read(part_rows))
        return batch

    def request(self, rows: Rows, work: int, *, stands_in: bool = False) -> Batch:
        """Returns the batch that :meth:`prefetched` yields then; see :meth:`load`. It may be read later."""
        return self.load(rows, work, stands_in=stands_in)

    def prefetched(self, fetch: Callable[[int], Batch | None], stats: RoundStats) -> Iterator[Batch]:
        """Yields ``fetch(pending_work)`` until it returns None with nothing pending, calling it in a thread while the device
        computes.

        A batch is fetched when the step but one before it is over on the device. On a GPU, ``fetch`` runs on a stream of its own.
        Where it returns None while a batch is computed, it is asked again after that one: others may take what is left.

        Args:
            fetch: gets the work that this rank holds and has not computed yet; returns what :meth:`request` gave it.
            stats: gets the seconds spent waiting for batches.
        """
        times = self.times

        def fetch_after(step: Moment | None, pending_work: int) -> Batch | None:
            times.wait(step)
            with self._stream.copying():
                return fetch(pending_work)

        self._stream.begin()
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="hvd_adaptive-fetch") as executor:
            pending_work = 0
            future = executor.submit(fetch_after, None, pending_work)
            while True:
                with times.waiting(stats):
                    batch = future.result()
                if batch is None and not pending_work:
                    return
                pending_work = batch.work if batch is not None else 0
                future = executor.submit(fetch_after, times.last_step, pending_work)
                if batch is not None:
                    for part in batch._parts or [batch]:
                        self._stream.hand_over(part.x, part.y)
                    yield batch

    def expect(self, batches: Sequence[Rows]) -> None:
        """Says which rows this rank's first batches of the next round will have; they may be read by then.

        Args:
            batches: the rows of each.
        """

    def end_pass(self) -> None:
        """Takes note that a loop over its batches is over."""

    def _outline(self, rows: Rows, work: int, *, stands_in: bool) -> tuple[Batch, list[tuple[Batch, Rows]]]:
        """Returns a batch without its samples, and what to fill with which rows."""
        own = rows[:0] if stands_in else rows
        size = self._micro_batch_size
        if size is None:
            batch = Batch(None, None, own, work, _sample_weight=float(not stands_in))
            return batch, [(batch, rows)]
        counts = stand_in(rows, size) if stands_in else micro_batches(rows, size)
        parts = [Batch(None, None, part, 0, weight=n / max(1, len(own)), _sample_weight=n / size) for part, n in counts]
        whole = InMicroBatches()
        return Batch(whole, whole, own, work, _parts=parts), [(part, part.rows) for part in parts]

    def _read(self, rows: Rows) -> Any:
        if self._takes_rows:
            # What collating its samples gives, without a Python object for each.
            found = tuple(tensor.index_select(0, torch.from_numpy(rows)) for tensor in self._dataset.tensors)
            return found if len(found) == 2 else list(found)
        return self.reader.__getitems__(rows.tolist())

    def _fill(self, batch: Batch, data: Any) -> None:
        x, y = data if is_pair(data) else (data, None)
        batch.x, batch.y = to_device(x, self._device), to_device(y, self._device)


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested and tensor.is_contiguous()


def _refuse_stream(dataset: Any) -> None:
    """Raises TypeError for a data set without rows, and says what to do."""
    indexable = any(hasattr(dataset, name) for name in ("get_batch", "__getitems__", "__getitem__"))
    is_stream = isinstance(dataset, IterableDataset)
    if is_stream or not hasattr(dataset, "__len__") or not indexable:
        if isinstance(dataset, DataLoader):
            raise TypeError(
                "dataset must be a data set, got a DataLoader: pass its `dataset`, as each rank chooses its own batches; for "
                "worker processes use session.loader(dataset, num_workers=...)"
            )
        named = f"{'the IterableDataset ' if is_stream else ''}{type(dataset).__name__}"
        raise TypeError(
            f"dataset must be map-style (__len__ and __getitem__), got {named}: ranks claim samples by their number, so that "
            "each is used once, at any number of ranks and after a resume; a stream has no numbers. Give its records numbers "
            "(an index of files and offsets), or train with `hvd-adaptive run` and the script's own DataLoader, where each rank "
            "reads its own shard, with equal shares"
        )

"""Batches that worker processes of torch's DataLoader read: its batch sampler hands out what this rank has claimed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

from hvd_adaptive.engine.batches import Batch, BatchSource, Rows
from hvd_adaptive.engine.device_times import DeviceTimes
from hvd_adaptive.engine.records import RoundStats


class WorkerSource(BatchSource):
    """Makes batches in worker processes, each of one batch or micro-batch at a time.

    A batch is claimed when the loader asks for what its workers shall read next, and never for a round that has not begun. So
    what is claimed and not computed is at most ``num_workers x prefetch_factor`` batches of this round, beside the one in work.

    Args:
        dataset: see :class:`BatchSource`; workers get a copy of it, as with torch's DataLoader.
        device: where x and y go.
        collate: see :class:`BatchSource`; workers call it.
        times: see :class:`BatchSource`.
        micro_batch_size: samples of each micro-batch; None: batches are whole.
        num_workers: worker processes, >= 1.
        pin_memory: read batches are copied to page-locked memory, from which a GPU takes them beside its work.
        prefetch_factor: batches that are on their way for each worker, >= 1.
        persistent_workers: workers outlive a loop.
        seed: of the workers' random generators, beside the rank and the epoch.

    Raises:
        TypeError: for an IterableDataset.
        ValueError: for numbers of workers or batches that are out of range.
    """

    def __init__(
        self,
        dataset: Any,
        device: torch.device,
        collate: Callable[[list[Any]], Any] | None = None,
        *,
        times: DeviceTimes | None = None,
        micro_batch_size: int | None = None,
        num_workers: int,
        pin_memory: bool = False,
        prefetch_factor: int = 2,
        persistent_workers: bool = False,
        seed: tuple[int, ...] = (0,),
    ) -> None:
        refuse_stream(dataset)
        super().__init__(dataset, device, collate, times, micro_batch_size=micro_batch_size)
        for name, value in (("num_workers", num_workers), ("prefetch_factor", prefetch_factor)):
            if value < 1:
                raise ValueError(f"{name} must be >= 1, got {value}")
        self.num_prefetched = num_workers * prefetch_factor
        self._persistent_workers = persistent_workers
        self._requested: dict[int, list[tuple[Batch, Rows]]] = {}
        self._claims = _Claims(self._requested)
        self._generator = torch.Generator()
        self._seed, self._num_starts = seed, 0
        self._options: dict[str, Any] = {
            "dataset": _ByBatch(dataset) if hasattr(dataset, "get_batch") else dataset,
            "batch_sampler": self._claims,
            "collate_fn": _whole if hasattr(dataset, "get_batch") else self._collate,
            "num_workers": num_workers,
            "pin_memory": pin_memory,
            "prefetch_factor": prefetch_factor,
            # Over the rounds of an epoch, each of which is a pass of the loader.
            "persistent_workers": True,
            "generator": self._generator,
        }
        self._loader: DataLoader[Any] | None = None

    def request(self, rows: Rows, work: int, *, stands_in: bool = False) -> Batch:
        """Returns a batch without its samples, which :meth:`prefetched` fills in."""
        batch, reads = self._outline(rows, work, stands_in=stands_in)
        self._requested[id(batch)] = reads
        return batch

    def prefetched(self, fetch: Callable[[int], Batch | None], stats: RoundStats) -> Iterator[Batch]:
        """Yields ``fetch(pending_work)`` until it returns None with nothing pending, read by the workers.

        Where it returns None while batches are on their way, others may take what is left of the round; it is asked again when
        these are computed.

        Args:
            fetch: see :meth:`BatchSource.prefetched`.
            stats: gets the seconds spent waiting for batches.

        Raises:
            RuntimeError: if a worker has died. What a worker raises, is raised here.
        """
        while True:
            with self.times.waiting(stats):
                first = fetch(0)
                if first is None:
                    return
                self._claims.begin(first, fetch)
                if self._loader is None:
                    self._loader = self._start()
                # Workers begin to read here.
                passing = iter(self._loader)
            is_over = False
            before = None
            try:
                while self._claims.on_their_way:
                    # A GPU may be behind: claims follow the step but one before, as with a thread.
                    self.times.wait(before)
                    batch = self._claims.on_their_way[0]
                    with self.times.waiting(stats):
                        for part, _ in self._requested[id(batch)]:
                            self._fill(part, next(passing))
                    before = self.times.last_step
                    yield batch
                    self._claims.computed()
                assert next(passing, None) is None
                is_over = True
            finally:
                if not is_over:
                    # Left in the middle: what is on its way would come in the next pass.
                    self._stop()

    def end_pass(self) -> None:
        """Ends the workers, unless they stay."""
        if not self._persistent_workers:
            self._stop()

    def _start(self) -> DataLoader[Any]:
        state = np.random.SeedSequence([*self._seed, self._num_starts]).generate_state(1, np.uint64)
        self._generator.manual_seed(int(state[0] >> np.uint64(1)))
        self._num_starts += 1
        return DataLoader(**self._options)

    def _stop(self) -> None:
        self._claims.forget()
        if (iterator := getattr(self._loader, "_iterator", None)) is not None:
            # Python would collect it in the midst of some later step, and then wait up to 5 s for each worker.
            iterator._shutdown_workers()
        self._loader = None


def refuse_stream(dataset: Any) -> None:
    """Raises TypeError for a data set without rows, and says what to do."""
    if isinstance(dataset, IterableDataset):
        raise TypeError(
            f"dataset must be map-style (__len__ and __getitem__), got the IterableDataset {type(dataset).__name__}: ranks claim "
            "samples by their number, so that each is used once, at any number of ranks and after a resume; a stream has no "
            "numbers. Give its records numbers (an index of files and offsets), or train with `hvd-adaptive run` and the "
            "script's own DataLoader, where each rank reads its own shard, with equal shares"
        )


class _Claims(Sampler[list[int]]):
    """The batch sampler: claims when it is asked for the next rows.

    Attributes:
        on_their_way: batches that are claimed and not yet computed, in order.
    """

    def __init__(self, reads: dict[int, list[tuple[Batch, Rows]]]) -> None:
        self._reads = reads
        self.on_their_way: deque[Batch] = deque()
        self._pending_work = 0

    def begin(self, first: Batch, fetch: Callable[[int], Batch | None]) -> None:
        """Begins a pass with a batch."""
        self._first: Batch | None = first
        self._fetch = fetch

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            batch, self._first = self._first or self._fetch(self._pending_work), None
            if batch is None:
                return
            self.on_their_way.append(batch)
            self._pending_work += batch.work
            for _, rows in self._reads[id(batch)]:
                yield rows.tolist()

    def computed(self) -> None:
        """Takes note that the first of the batches on their way is computed."""
        batch = self.on_their_way.popleft()
        self._pending_work -= batch.work
        del self._reads[id(batch)]

    def forget(self) -> None:
        """Forgets what is on its way."""
        self.on_their_way.clear()
        self._reads.clear()
        self._pending_work = 0


class _ByBatch:
    """A data set whose samples are read at once, as torch's loader reads those that have ``__getitems__``.

    Args:
        dataset: has ``get_batch``.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, row: int) -> Any:
        return self.__getitems__([row])

    def __getitems__(self, rows: list[int]) -> Any:
        return self._dataset.get_batch(np.array(rows, dtype=np.int64))


def _whole(data: Any) -> Any:
    # Read as a batch.
    return data

"""Batches that worker processes of torch's DataLoader read: its batch sampler hands out what this rank has claimed."""

from __future__ import annotations

import functools
import signal
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler, get_worker_info

from hvd_adaptive.engine.batches import Batch, BatchSource, Rows
from hvd_adaptive.engine.device_times import DeviceTimes
from hvd_adaptive.engine.records import RoundStats

_WORKER_END_S = 0.5


class WorkerSource(BatchSource):
    """Makes batches in worker processes, each of one batch or micro-batch at a time.

    A batch is claimed when the loader asks for what its workers shall read next, and never for a round that has not begun. So
    what is claimed and not computed is at most ``num_workers x prefetch_factor`` batches of this round, beside the one in work.
    Once this rank has claimed all that it gets of a round, they read what it is expected to begin the next one with.

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
        seed: returns what the workers' random generators follow, when they start.
        worker_init_fn: called in each worker, with its number, before it reads.
        options: further ones of torch's DataLoader.

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
        seed: Callable[[], Sequence[int]],
        worker_init_fn: Callable[[int], Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(dataset, device, collate, times, micro_batch_size=micro_batch_size)
        for name, value in (("num_workers", num_workers), ("prefetch_factor", prefetch_factor)):
            if value < 1:
                raise ValueError(f"{name} must be >= 1, got {value}")
        self.num_prefetched = num_workers * prefetch_factor
        self._persistent_workers = persistent_workers
        self._reads = _Reads(self._outline)
        self._generator = torch.Generator()
        self._seed = seed
        self._options: dict[str, Any] = {
            "dataset": self.reader,
            "batch_sampler": self._reads,
            "collate_fn": _whole,
            "num_workers": num_workers,
            "pin_memory": pin_memory,
            "prefetch_factor": prefetch_factor,
            # A loader without them ends where there is nothing to read for a moment.
            "persistent_workers": True,
            "generator": self._generator,
            "worker_init_fn": functools.partial(_start_worker, worker_init_fn),
            **options,
        }
        self._passing: Any = None

    def request(self, rows: Rows, work: int, *, stands_in: bool = False) -> Batch:
        """Returns a batch without its samples, which :meth:`prefetched` fills in."""
        return self._reads.request(rows, work, stands_in=stands_in)

    def expect(self, batches: Sequence[Rows]) -> None:
        """Lets workers read these batches once this round needs no more of them; see :meth:`BatchSource.expect`."""
        self._reads.expected = deque(batches)

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
        reads, before = self._reads, None
        reads.begin(fetch)
        is_over = False
        try:
            while True:
                # A GPU may be behind: claims follow the step but one before, as with a thread.
                self.times.wait(before)
                with self.times.waiting(stats):
                    has_batch = bool(reads.claimed) or reads.claim()
                    if has_batch or self._passing is not None:
                        self._let_workers_read()
                    if not has_batch:
                        break
                    batch = reads.claimed[0]
                    while not reads.is_read(batch):
                        reads.take(_next_read(self._passing), self._fill)
                before = self.times.last_step
                yield batch
                reads.computed()
            is_over = True
        finally:
            if not is_over:
                # Left in the middle: what is on its way would come in the next loop.
                self.stop()

    def end_pass(self) -> None:
        """Ends the workers, unless they stay."""
        if not self._persistent_workers:
            self.stop()

    def _let_workers_read(self) -> None:
        if self._passing is None:
            state = np.random.SeedSequence(self._seed()).generate_state(1, np.uint64)
            self._generator.manual_seed(int(state[0] >> np.uint64(1)))
            self._passing = iter(DataLoader(**self._options))
        reads = self._reads
        # The loader asks once for each batch that it gives; here for those that it did not get then.
        num_asked = -1
        while num_asked < reads.num_asked < self.num_prefetched + reads.num_given:
            num_asked = reads.num_asked
            self._passing._try_put_index()

    def stop(self) -> None:
        """Ends the workers, and forgets what is on its way; a later loop starts others."""
        self._reads.forget()
        if self._passing is not None:
            # Python would collect it in the midst of some later step, and then wait up to 5 s for each worker.
            self._passing._shutdown_workers()
        self._passing = None


def _next_read(passing: Iterator[Any]) -> Any:
    """Returns what a worker has read, or raises RuntimeError where one has died and torch only sees what comes of it."""
    try:
        return next(passing)
    except (OSError, EOFError) as error:
        workers = {worker.sentinel: worker for worker in passing._workers}  # type: ignore[attr-defined]
        # A process that ends closes its connections first, then its sentinel, and then has an exit code.
        for ended in connection.wait(list(workers), _WORKER_END_S):
            worker = workers[ended]
            worker.join()
            if (code := worker.exitcode) is not None and code < 0:
                reason = signal.strsignal(-code)
                raise RuntimeError(f"DataLoader worker (pid {worker.pid}) was killed by signal: {reason}") from error
        raise


class _Reads(Sampler[list[int]]):
    """The batch sampler: claims when it is asked for the next rows, and may have some again after it had none.

    Args:
        outline: returns a batch without its samples, and what to fill with which rows.

    Attributes:
        claimed: batches that are claimed and not yet computed, in order.
        expected: the rows of batches that are expected to be claimed in the next round, in order.
        num_asked: how often workers were given rows.
        num_given: how often they have given back what they read.
    """

    def __init__(self, outline: Callable[..., tuple[Batch, list[tuple[Batch, Rows]]]]) -> None:
        self._outline = outline
        self._fetch: Callable[[int], Batch | None] = lambda _: None
        self._is_beginning = False
        self.forget()

    def forget(self) -> None:
        """Forgets what is on its way."""
        self.claimed: deque[Batch] = deque()
        self.expected: deque[Rows] = deque()
        self.num_asked = self.num_given = 0
        self._pending_work = 0
        # Nothing was to be claimed, until what is claimed is computed.
        self._left = False
        # Read before they are claimed, in order.
        self._early: deque[Batch] = deque()
        # Parts that no worker was given, and those that are on their way; of each batch, how many are not read.
        self._waiting: deque[tuple[Batch, Rows]] = deque()
        self._on_their_way: deque[Batch] = deque()
        self._batch_of: dict[int, Batch] = {}
        self._unread: dict[int, int] = {}

    def begin(self, fetch: Callable[[int], Batch | None]) -> None:
        """Begins a round, and claims what was read for it."""
        self._fetch = fetch
        self._left = False
        self._is_beginning = True
        num_early = -1
        while num_early != len(self._early) > 0:
            num_early = len(self._early)
            if not self.claim():
                break
        self._is_beginning = False
        # What was expected and did not come: its data are thrown away when they are there.
        for batch in self._early:
            del self._unread[id(batch)]
        self._early.clear()

    def request(self, rows: Rows, work: int, *, stands_in: bool) -> Batch:
        """Returns a batch that is on its way: one that was expected, if it has these rows."""
        if self._is_beginning and not stands_in and np.array_equal(self._early[0].rows, rows):
            batch = self._early.popleft()
            batch.work = work
            return batch
        return self._send(rows, work, stands_in=stands_in)

    def claim(self) -> bool:
        """Claims a batch, and puts what is to be read for it in line; returns False if there is none for now."""
        batch = None if self._left else self._fetch(self._pending_work)
        if batch is None:
            self._left = True
            return False
        self.claimed.append(batch)
        self._pending_work += batch.work
        return True

    def __iter__(self) -> _Reads:
        return self

    def __next__(self) -> list[int]:
        while not self._waiting:
            if not self.claim():
                if not self.expected:
                    raise StopIteration
                self._early.append(self._send(self.expected.popleft(), 0))
        part, rows = self._waiting.popleft()
        self._on_their_way.append(part)
        self.num_asked += 1
        return rows.tolist()

    def is_read(self, batch: Batch) -> bool:
        """Returns whether all of a claimed batch is there."""
        return not self._unread[id(batch)]

    def take(self, data: Any, fill: Callable[[Batch, Any], None]) -> None:
        """Puts into its place what a worker has read: they give it back in the order in which they were given rows."""
        part = self._on_their_way.popleft()
        self.num_given += 1
        batch = self._batch_of.pop(id(part))
        if id(batch) in self._unread:
            self._unread[id(batch)] -= 1
            fill(part, data)

    def computed(self) -> None:
        """Takes note that the first of the claimed batches is computed."""
        batch = self.claimed.popleft()
        self._pending_work -= batch.work
        del self._unread[id(batch)]
        self._left = self._left and bool(self.claimed)

    def _send(self, rows: Rows, work: int, *, stands_in: bool = False) -> Batch:
        batch, reads = self._outline(rows, work, stands_in=stands_in)
        self._waiting.extend(reads)
        self._unread[id(batch)] = len(reads)
        self._batch_of.update((id(part), batch) for part, _ in reads)
        return batch


def _start_worker(worker_init_fn: Callable[[int], Any] | None, number: int) -> None:
    info: Any = get_worker_info()
    # The user's: what is set there must reach it. The info refuses to be changed.
    object.__setattr__(info, "dataset", info.dataset.dataset)
    if worker_init_fn is not None:
        worker_init_fn(number)


def _whole(data: Any) -> Any:
    # Read as a batch.
    return data

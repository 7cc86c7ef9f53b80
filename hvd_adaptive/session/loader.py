"""What ``Session.loader`` returns: a DataLoader's face, and claims behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from hvd_adaptive.comm.protocols import agree_equal
from hvd_adaptive.engine.batches import Batch, BatchSource
from hvd_adaptive.engine.worker_batches import WorkerSource

if TYPE_CHECKING:
    from hvd_adaptive.session.session import Session

# Options of torch's DataLoader, and what has their place here.
_INSTEAD = {
    "batch_size": "it is Config's batch_size, as hvd_adaptive.Config(batch_size=64)",
    **dict.fromkeys(
        ("shuffle", "sampler", "batch_sampler"), "the session shuffles each epoch anew, by Config's seed, and ranks claim samples"
    ),
    "num_epochs": "loop over it once for each epoch",
    "drop_last": "each sample of an epoch is used",
    "generator": "the workers' random numbers follow from Config's seed",
}


class Loader:
    """One rank's batches of an epoch, over and over; made by :meth:`hvd_adaptive.Session.loader`.

    Args:
        session: whose batches.
        source: reads them.
    """

    def __init__(self, session: Session, source: BatchSource) -> None:
        self._session = session
        self._source = source

    def __iter__(self) -> Iterator[Batch]:
        """Yields what is left of the epoch, see :meth:`hvd_adaptive.Session.batches`. COLLECTIVE."""
        return self._session._batches_from(self._source, num_epochs=self._session.ledger.epoch + 1)

    def __len__(self) -> int:
        """Raises TypeError: nobody knows a rank's number of batches before."""
        raise TypeError(
            "session.loader has no length: how many batches a rank computes follows from its speed. Count all ranks' samples, "
            "round by round: bar = tqdm(total=len(dataset) * num_epochs), and before the loop "
            "session.records.append(lambda record: bar.update(record.num_samples - bar.n))"
        )


def loader(
    self: Session,
    dataset: Any,
    *,
    num_workers: int = 0,
    pin_memory: bool = False,
    prefetch_factor: int | None = None,
    persistent_workers: bool = False,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    worker_init_fn: Callable[[int], Any] | None = None,
    timeout: float = 0,
    multiprocessing_context: Any = None,
    **others: Any,
) -> Loader:
    """Returns this rank's batches of an epoch, read by the workers of torch's DataLoader. COLLECTIVE, and so is each loop.

    A loop gives what is left of the epoch (``session.ledger.epoch``): all of it, or after a resume what no completed merge has
    consumed, without reading the rest again. A batch is claimed when a worker is free to read it, never for a round that has not
    begun, so that a slow rank leaves to the others what it does not come to. What the data set or ``collate_fn`` raises comes
    with the numbers of the samples.

    Args:
        dataset: the same map-style data set on every rank; workers get a copy, as with torch's DataLoader.
        num_workers: worker processes of this rank, the same on every rank; 0: a thread reads, as with ``batches``.
        pin_memory: read batches are copied to page-locked memory, from which a GPU takes them beside its work.
        prefetch_factor: batches on their way for each worker (default: 2).
        persistent_workers: workers stay from one loop to the next, until the session is closed. Within a loop they always do,
            over all of its rounds.
        collate_fn: makes a batch of a list of samples; what it returns is (x, y) if it is a tuple of two, else x alone.
        worker_init_fn: called in each worker, with its number on this rank, before it reads.
        timeout: seconds after which a batch that does not come is an error; 0: never.
        multiprocessing_context: how workers start, such as "forkserver", or a context of torch.multiprocessing.
        others: none, an error says what to use.

    Raises:
        AgreedError: on all ranks, if their workers differ in number.
        TypeError: for an IterableDataset, which has no rows to claim, or for other options of torch's DataLoader.
        ValueError: for options that do not go together.
        RuntimeError: if the session is closed.
    """
    self._handed_out.check_open()
    for name in others:
        raise TypeError(f"session.loader takes no {name}: {_INSTEAD.get(name, 'there is no such option')}")
    agree_equal(
        self.transport,
        {"num_workers": num_workers, "prefetch_factor": prefetch_factor},
        "Give every rank the same loader: what is on its way counts in the ranks' shares.",
    )
    if num_workers < 0:
        raise ValueError(f"num_workers must be >= 0, got {num_workers}")
    if num_workers and self.config.logical_ranks is not None:
        raise ValueError(
            f"num_workers {num_workers} needs no logical_ranks, got {self.config.logical_ranks}: what a data set draws "
            "at random must come from the logical rank's own generators, so it is read between its steps"
        )
    size = self.config.micro_batch_size
    of_workers = {
        "prefetch_factor": prefetch_factor, "persistent_workers": persistent_workers, "worker_init_fn": worker_init_fn,
        "timeout": timeout, "multiprocessing_context": multiprocessing_context,
    }  # fmt: skip
    if num_workers == 0:
        for name, value in of_workers.items():
            if value is not None and (value or name == "prefetch_factor"):
                raise ValueError(f"{name} {value} needs num_workers >= 1, got 0: there is no worker")
        return Loader(self, BatchSource(dataset, self.device, collate_fn, self._times, micro_batch_size=size))
    of_workers["prefetch_factor"] = 2 if prefetch_factor is None else prefetch_factor
    source = WorkerSource(
        dataset,
        self.device,
        collate_fn,
        times=self._times,
        micro_batch_size=size,
        num_workers=num_workers,
        pin_memory=pin_memory,
        seed=lambda: (self.config.seed, self.rank, self.round),
        **of_workers,
    )
    self._handed_out.sources.add(source)
    return Loader(self, source)

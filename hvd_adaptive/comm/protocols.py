"""The seam between the engine and what carries its bytes: three protocols, and errors that all ranks raise together."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # what a launcher says wrong is refused before torch is loaded
    from torch import Tensor, nn
    from torch.optim import Optimizer

Result = TypeVar("Result")


class Pending(Protocol):
    """A collective under way."""

    def done(self) -> bool:
        """Returns whether `wait` is known to return at once."""

    def wait(self) -> Tensor:
        """Returns its result once it is there. To be called once; every rank must get here in the end.

        Raises:
            RuntimeError: if the ranks' parts are not of the sizes that this rank was told.
        """


class InOrder:
    """A :class:`Pending` that is over where ranks wait for it, and nowhere else: they start what follows on it in one order.

    Args:
        finish: waits for the result and returns it.
    """

    def __init__(self, finish: Callable[[], Tensor]) -> None:
        self.wait = finish

    def done(self) -> bool:
        """Returns False, wherever the result may be."""
        return False


class Group(Protocol):
    """Sums and bytes between the ranks of the world, or of a part of it: what the exchange of compressed tensors needs.

    Methods marked COLLECTIVE must be called by every rank of the group in the same order, from the main thread. Names
    are equal on all ranks and differ between collectives that are under way together. All ranks also start collectives
    whose method ends in ``async`` in the same order, perhaps from the thread of a backward pass. Only where ``Pending.done``
    ever says True, as over Horovod, may what follows on it come in different orders.

    Attributes:
        rank: this rank, in [0, world_size).
        world_size: number of ranks in the world or group.
    """

    rank: int
    world_size: int

    def allreduce_sum_(self, tensor: Tensor, name: str) -> None:
        """Replaces a contiguous tensor by its sum over ranks, in place, with the same bits on every rank. COLLECTIVE."""

    def allreduce_sum_async_(self, tensor: Tensor, name: str) -> Pending:
        """Starts `allreduce_sum_`; leave the tensor alone until ``wait()`` has returned it. COLLECTIVE."""

    def alltoall_bytes_async(
        self, tensor: Tensor, *, send_bytes: Sequence[int], receive_bytes: Sequence[int], name: str
    ) -> Pending:
        """Starts sending one part to each rank; ``wait()`` returns the parts for this rank, in rank order. COLLECTIVE.

        Args:
            tensor: uint8, contiguous, shape (sum(send_bytes),), not empty; leave it alone until the wait is over.
            send_bytes: size of the part for each rank.
            receive_bytes: size of the part from each rank.
            name: of the collective.
        """

    def allgather_bytes_async(self, tensor: Tensor, *, receive_bytes: Sequence[int] | None, name: str) -> Pending:
        """Starts gathering a part from every rank; ``wait()`` returns them in rank order. COLLECTIVE.

        Args:
            tensor: uint8, contiguous, one dimension, may be empty; leave it alone until the wait is over.
            receive_bytes: size of the part from each rank; their sum is not 0. None: not known, and not checked.
            name: of the collective.
        """


def has_equal_hosts(hosts: Sequence[str]) -> bool:
    """Returns whether there are several hosts of several ranks each, equally many: by them sums may go in two steps.

    Args:
        hosts: of each rank, its name.
    """
    counts = set(Counter(hosts).values())
    return len(counts) == 1 and 1 < counts.pop() < len(hosts)


def is_one_host(world: Collectives) -> bool:
    """Returns whether all ranks, or islands, are on one host. COLLECTIVE."""
    return len(set(world.allgather_object(world.host))) == 1


class Collectives(Group, Protocol):
    """What all ranks do together.

    Methods marked COLLECTIVE must be called by every rank in the same order, from the main thread.

    Attributes:
        local_rank: this rank among those of its host.
        local_size: ranks on its host.
        host: name of this rank's host.
        groups: whether `split` may be called.
        speaks: whether this rank says what concerns all: one in the job does, also where each island of ranks stands for one.
    """

    local_rank: int
    local_size: int
    host: str
    groups: bool
    speaks: bool

    def allgather_stats(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Gathers a small vector, shape (k,), from every rank: shape (world_size, k), float64. COLLECTIVE."""

    def allgather_array(self, values: NDArray[Any]) -> NDArray[Any]:
        """Gathers an array of one shape and dtype from every rank: shape (world_size, *shape). COLLECTIVE."""

    def allgather_object(self, value: Any) -> list[Any]:
        """Gathers a small Python object from every rank, in rank order. COLLECTIVE."""

    def split(self, color: int) -> Group:
        """Returns the group of the ranks that give the same color, in rank order. COLLECTIVE over the whole world.

        Raises:
            RuntimeError: if the transport was not asked for groups when it was made.
        """

    def allreduce_or_(self, bits: NDArray[np.uint8]) -> None:
        """Replaces bytes by their bitwise OR over ranks, in place; equally many on every rank. COLLECTIVE."""

    def allreduce_max_async_(self, tensor: Tensor, name: str) -> Pending:
        """Starts to replace a contiguous integer tensor by its maximum over ranks; leave it alone until ``wait()`` has returned
        it. COLLECTIVE."""

    def broadcast_(self, tensors: Sequence[Tensor]) -> None:
        """Replaces tensors by rank 0's, in place. COLLECTIVE."""

    def rendezvous(self, name: str) -> float:
        """Waits, without using a core, until every rank has arrived; returns the seconds waited. COLLECTIVE."""


class Store(Protocol):
    """What the ranks share beside the collectives: claims. Any rank, any thread, any time."""

    def add(self, key: str, amount: int) -> int:
        """Adds to a shared counter that starts at 0 and returns its new value."""

    def compare_set(self, key: str, expected: str, desired: str) -> str:
        """Sets a shared value to ``desired`` if it is ``expected`` ("" where it was never set), in one atomic step, and
        returns what it is then. The caller makes ``desired`` unique to know who won."""

    def forget(self, key: str) -> None:
        """Deletes a shared counter or value that no rank will use again."""


class HostStore(Store, Protocol):
    """What the ranks of one host share, each key by itself; where there are too many ranks for one store.

    Attributes:
        ranks: those of this host, ascending.
        num_hosts: of the world.
    """

    ranks: Sequence[int]
    num_hosts: int


class Heartbeat(Protocol):
    """Signs of life, and the end of the whole job.

    Attributes:
        last_words: says what the job leaves behind, for the message of its end; called from any thread.
    """

    last_words: Callable[[], str]

    def waiting(self, what: str = "") -> AbstractContextManager[None]:
        """Marks this rank as waiting for others, for the heartbeats; ``what`` appears in their messages."""

    def progress(self, what: str = "") -> None:
        """Tells the heartbeats that this rank gets on."""

    def abort(self, text: str, code: int) -> None:
        """Ends the job on all ranks at once. Any rank, any thread. Does not return.

        Args:
            text: why, for standard error.
            code: this rank's exit code, and the launcher's where it passes one on.
        """


class Transport(Collectives, Store, Heartbeat, Protocol):
    """A world of ranks: all three together, and what a session needs at its beginning and its end.

    Attributes:
        backend: "horovod", "torch", or "none" for a world inside one process.
        host_store: what the ranks of this host share; None where all ranks ask the world's store.
    """

    backend: str
    host_store: HostStore | None

    def describe(self) -> dict[str, Any]:
        """Returns, for people, what the world says of itself: ``carrier``, in words what carries its tensors, "" for one process;
        and more, by backend."""

    def distributed_optimizer(
        self, optimizer: Optimizer, model: nn.Module, *, average: bool = True, may_sleep: bool = False
    ) -> Optimizer:
        """Wraps the optimizer in Horovod's own DistributedOptimizer, or returns it as it is where there is no other rank and no
        Horovod. COLLECTIVE in every step.

        Args:
            optimizer: over the model's parameters.
            model: names the parameters.
            average: whether gradients meet as their mean; else as their sum.
            may_sleep: ``synchronize`` waits asleep where a host has more ranks than cores; else as Horovod does it, which
                uses a core.

        Raises:
            AgreedError: on all ranks, where there are others and Horovod does not carry the tensors.
        """

    def exchange_through_host(self) -> bool:
        """Has CUDA tensors cross the wire by way of host memory from now on, Horovod's own exchanges among them, as two ranks on
        one GPU need it. Every rank does it. Returns False where they did before, or there are no other processes."""

    def close(self) -> None:
        """Leaves the world in good order. COLLECTIVE."""


def take_turns(transport: Transport, name: str, action: Callable[[], Result]) -> Result:
    """Runs ``action`` on the ranks of each host one after the other, its other ranks asleep. COLLECTIVE.

    Hosts do not disturb each other: it takes as many turns as the fullest host has ranks.

    Args:
        transport: the world.
        name: where the ranks meet; equal on all ranks.
        action: returns this rank's result.

    Raises:
        AgreedError: on all ranks, if it failed on one.
    """
    result: Result
    error = None
    for turn in range(int(transport.allgather_stats(np.array([float(transport.local_size)])).max())):
        if turn == transport.local_rank:
            try:
                with long_task(transport, name):
                    result = action()
            except RuntimeError as failure:
                # The others wait for their turns.
                error = str(failure)
        transport.rendezvous(f"{name}.{turn}")
    agree(transport, error)
    return result


@contextmanager
def long_task(heartbeat: Heartbeat, what: str) -> Iterator[None]:
    """Tells the heartbeats every second that this rank gets on, for a task that has no steps to report.

    Args:
        heartbeat: of this rank.
        what: the task, for the heartbeats' messages.
    """
    done = threading.Event()

    def tick() -> None:
        while not done.wait(1.0):
            heartbeat.progress(what)

    thread = threading.Thread(target=tick, name="hvd_adaptive-long-task", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


class AgreedError(RuntimeError):
    """An error that every rank raises at once, so that one message is enough."""


def agree(world: Collectives, error: str | None) -> None:
    """Raises on every rank if any rank has an error. COLLECTIVE.

    Args:
        world: all ranks.
        error: this rank's message, None if all is well.

    Raises:
        AgreedError: with the distinct messages and the ranks that have them.
    """
    # A byte of each rank; the messages only where there are any.
    if not world.allgather_array(np.array([error is not None], dtype=np.uint8)).any():
        return
    ranks_by_error: dict[str, list[str]] = {}
    for rank, text in enumerate(world.allgather_object(error)):
        if text is not None:
            ranks_by_error.setdefault(text, []).append(str(rank))
    lines = []
    for text, ranks in ranks_by_error.items():
        everyone = len(ranks) == world.world_size
        lines.append(text if everyone else f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}: {text}")
    raise AgreedError("\n".join(lines))


def attempt(world: Collectives, action: Callable[[], Result]) -> Result:
    """Runs an action that may find bad input on some ranks only; all ranks raise if one does. COLLECTIVE.

    Raises:
        AgreedError: on all ranks, with the messages.
    """
    result, error = None, None
    try:
        result = action()
    except (ValueError, RuntimeError, OSError) as failure:
        error = str(failure)
    agree(world, error)
    return result  # type: ignore[return-value]


def from_rank_0(world: Collectives, action: Callable[[], Result]) -> Result:
    """Has rank 0 alone do something, and returns its result, a small one, on all ranks; if it fails, all raise. COLLECTIVE.

    Raises:
        AgreedError: on all ranks, with the message.
    """
    answer, error = None, None
    if world.rank == 0:
        try:
            answer = action()
        except (ValueError, RuntimeError, OSError) as failure:
            error = str(failure)
    answer, error = world.allgather_object((answer, error))[0]
    if error is not None:
        raise AgreedError(error)
    return answer


def gather_digests(world: Collectives, content: bytes) -> list[bytes]:
    """Returns the SHA-256 of every rank's content, in rank order. COLLECTIVE."""
    own = np.frombuffer(hashlib.sha256(content).digest(), dtype=np.uint8)
    return [row.tobytes() for row in world.allgather_array(own)]


def agree_equal(world: Collectives, values: dict[str, Any], remedy: str) -> None:
    """Raises on every rank if the ranks' values differ. COLLECTIVE.

    The ranks compare 32 bytes each. Only where these differ does every rank get the others' values, which take kilobytes a rank.

    Args:
        world: all ranks.
        values: names and small comparable values that must be equal on all ranks; those with one ``repr`` are equal.
        remedy: what to do about a difference.

    Raises:
        AgreedError: naming the first few values that differ, and which rank has what.
    """
    if len(set(gather_digests(world, repr(sorted(values.items())).encode()))) == 1:
        return
    gathered = world.allgather_object(values)
    differing = []
    for name in sorted(set().union(*gathered)):
        seen = [other.get(name) for other in gathered]
        rank = next((r for r, value in enumerate(seen) if value != seen[0]), 0)
        if rank:
            differing.append(f"{name} is {seen[0]!r} on rank 0 and {seen[rank]!r} on rank {rank}")
    if differing:
        raise AgreedError(f"the ranks do not agree: {'; '.join(differing[:5])}. {remedy}")

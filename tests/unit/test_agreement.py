"""Ranks compare digests first, and tell each other details only where these differ."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hvd_adaptive.comm.protocols import AgreedError, agree, agree_equal, from_rank_0, take_turns
from hvd_adaptive.comm.size_check import balance, check_sizes, fingerprint, is_balanced
from hvd_adaptive.comm.threads import LocalTransport, LocalWorld


class Frugal(LocalTransport):
    """A rank that sends no objects, only arrays."""

    def allgather_object(self, value: Any) -> list[Any]:
        assert isinstance(value, np.ndarray), "details crossed the wire"
        return super().allgather_object(value)


def test_equal_values_cross_the_wire_as_digests() -> None:
    def compare(transport: LocalTransport) -> None:
        frugal = Frugal(transport._world, transport.rank)
        agree_equal(frugal, {"shape": (3, 4), "rate": 0.1, "name": None, "no number": float("nan")}, "")
        agree(frugal, None)

    LocalWorld(4).run(compare)


def test_differing_values_are_named_by_field_and_rank() -> None:
    def compare(transport: LocalTransport) -> str:
        values = {"batch_size": 64, "seed": 7, "kind": "sgd"}
        if transport.rank == 2:
            values["batch_size"] = 32
        with pytest.raises(AgreedError) as caught:
            agree_equal(transport, values, "Start all alike.")
        return str(caught.value)

    messages = LocalWorld(4).run(compare)
    assert set(messages) == {"the ranks do not agree: batch_size is 64 on rank 0 and 32 on rank 2. Start all alike."}


def test_what_is_equal_and_written_differently_agrees() -> None:
    LocalWorld(2).run(lambda t: agree_equal(t, {"rate": [1, 1.0][t.rank], "map": [{1: 2, 3: 4}, {3: 4, 1: 2}][t.rank]}, ""))


def test_an_error_of_one_rank_is_raised_on_all() -> None:
    def fail(transport: LocalTransport) -> None:
        with pytest.raises(AgreedError, match=r"^rank 1: no memory$"):
            agree(transport, "no memory" if transport.rank == 1 else None)

    LocalWorld(3).run(fail)


def test_rank_0_alone_answers_and_all_hear_of_its_error() -> None:
    asked: list[int] = []

    def ask(transport: LocalTransport) -> int:
        def fail() -> None:
            raise OSError("no disk")

        with pytest.raises(AgreedError, match=r"^no disk$"):
            from_rank_0(transport, fail)
        return from_rank_0(transport, lambda: asked.append(transport.rank) or 7)  # type: ignore[func-returns-value]

    assert LocalWorld(3).run(ask) == [7, 7, 7] and asked == [0]


def test_hosts_take_turns_beside_each_other() -> None:
    world = LocalWorld(6, num_hosts=2)
    order: list[tuple[str, int]] = []
    turns: list[str] = []

    def measure(transport: LocalTransport) -> int:
        meet = transport.rendezvous
        transport.rendezvous = lambda name: (turns.append(name), meet(name))[1]  # type: ignore[method-assign]
        return take_turns(transport, "m", lambda: order.append((transport.host, transport.local_rank)) or transport.rank)  # type: ignore[func-returns-value]

    assert world.run(measure) == list(range(6))
    assert [place for _, place in order] == [0, 0, 1, 1, 2, 2] and len(turns) == 3 * 6


def test_a_turn_that_fails_is_an_error_of_all_ranks_after_the_last_one() -> None:
    def measure(transport: LocalTransport) -> list[int]:
        took: list[int] = []

        def fail() -> None:
            took.append(transport.rank)
            if transport.rank == 0:
                raise RuntimeError("no memory")

        with pytest.raises(AgreedError, match=r"^rank 0: no memory$"):
            take_turns(transport, "m", fail)
        return took

    assert LocalWorld(2).run(measure) == [[0], [1]]


sizes = st.integers(2, 6).flatmap(lambda n: st.lists(st.lists(st.integers(0, 9), min_size=n, max_size=n), min_size=n, max_size=n))


@given(sent=sizes, wrong=st.booleans(), data=st.data())
def test_a_number_of_each_rank_tells_whether_all_sizes_fit(sent: list[list[int]], wrong: bool, data: Any) -> None:
    count = len(sent)
    expected = [[sent[source][receiver] for source in range(count)] for receiver in range(count)]
    if wrong:
        receiver, source = (data.draw(st.integers(0, count - 1)) for _ in range(2))
        expected[receiver][source] += data.draw(st.integers(1, 5))
    balances = [balance(rank, sent=sent[rank], expected=expected[rank]) for rank in range(count)]
    assert is_balanced(torch.tensor(balances)) is not wrong
    assert (fingerprint(expected[0]) == fingerprint([row[0] for row in sent])) is (expected[0] == [row[0] for row in sent])
    table, wanted = torch.tensor(sent).T, torch.tensor(expected)
    for rank in range(count):
        if wrong:
            with pytest.raises(RuntimeError, match="bytes, but"):
                check_sizes("x", table, wanted, rank)
        else:
            check_sizes("x", table, wanted, rank)

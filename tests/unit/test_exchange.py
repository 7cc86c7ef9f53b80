"""The exchange's front over simulated ranks: layers by policy, agreement, residuals over a restart."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from hvd_adaptive.comm.island_world import IslandWorld, ShardWorld
from hvd_adaptive.comm.protocols import AgreedError
from hvd_adaptive.comm.threads import LocalTransport, LocalWorld
from hvd_adaptive.compress.policy import TensorInfo, parse_policy
from hvd_adaptive.exchange.codec_choice import fastest
from hvd_adaptive.exchange.exchange import Exchange

MODEL = [
    TensorInfo("a.weight", (100, 64)),
    TensorInfo("a.bias", (100,)),
    TensorInfo("b.weight", (50, 100)),
    TensorInfo("b.bias", (50,)),
    TensorInfo("c.weight", (70, 50)),
    TensorInfo("empty", (0, 5)),
]
NUM = sum(tensor.size for tensor in MODEL)


def values(rank: int, step: int = 0) -> torch.Tensor:
    return torch.randn(NUM, generator=torch.Generator().manual_seed(100 * step + rank))


def parts(flat: torch.Tensor) -> dict[str, torch.Tensor]:
    return dict(zip([t.name for t in MODEL], flat.split([t.size for t in MODEL]), strict=True))


def summed(transport: LocalTransport, text: str, flat: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
    exchange = Exchange(transport, parse_policy(text), chunk_elements=2048, **options)
    flat = values(transport.rank) if flat is None else flat
    exchange.sum_(flat, "parameters", step=3, tensors=MODEL)
    return flat


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize(("text", "reducer"), [
    ("none", "sra"), ("fp16", "allreduce"), ("maxmin:4; b.weight=none", "sra"), ("maxmin:4; c*=normal:1", "hierarchical"),
])  # fmt: skip
def test_each_layer_is_summed_by_its_codec(text: str, reducer: str, world_size: int) -> None:
    world = LocalWorld(world_size, num_hosts=2 if world_size == 4 else 1)
    results = world.run(lambda t: summed(t, text, reducer=reducer))
    exact = parts(sum(values(rank) for rank in range(world_size)))
    for result in results:
        assert torch.equal(result, results[0])
        for name, value in parts(result).items():
            lossless = parse_policy(text).codec(next(t for t in MODEL if t.name == name)).exact
            if lossless or world_size == 1:
                assert torch.allclose(value, exact[name], atol=1e-6)
            else:
                assert float((value - exact[name]).norm() / exact[name].norm()) < 1.5
    if world_size == 4 and text != "none":
        assert not torch.allclose(results[0], torch.cat(list(exact.values())), atol=1e-6)


def test_tensors_of_one_codec_travel_together_wherever_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights and biases in turns: as many collectives as if all weights came first, and the same sums."""
    calls: list[str] = []
    for method in ("alltoall_bytes_async", "allgather_bytes_async", "allreduce_sum_async_"):
        real = getattr(LocalTransport, method)

        def watched(self: LocalTransport, *args: Any, real: Any = real, **options: Any) -> Any:
            calls.append(options.get("name", args[-1]))
            return real(self, *args, **options)

        monkeypatch.setattr(LocalTransport, method, watched)
    model = [t for i in range(6) for t in (TensorInfo(f"{i}.w", (40, 50)), TensorInfo(f"{i}.b", (40,)))]
    num = sum(tensor.size for tensor in model)

    def body(transport: LocalTransport) -> tuple[torch.Tensor, torch.Tensor]:
        exchange = Exchange(transport, parse_policy("maxmin:4; 5.w=powersgd:2"), error_feedback=True)
        flat = torch.arange(num, dtype=torch.float64) * (transport.rank + 1)
        exchange.sum_(flat, "x", step=0, tensors=model)
        return flat, torch.cat(list(exchange.state_dict()["residuals"].values()))

    (ours, residual), (theirs, _) = LocalWorld(2).run(body)
    assert len(calls) == 2 * (1 + 1 + 3) and residual.numel() == 5 * 2000 + 2000
    exact = 3 * torch.arange(num, dtype=torch.float64)
    assert torch.equal(ours, theirs) and float((ours - exact).norm() / exact.norm()) < 0.01
    biases = torch.cat([torch.full((t.size,), len(t.shape) < 2) for t in model])
    assert torch.equal(ours[biases], exact[biases])


def test_hosts_of_different_sizes_are_refused_on_all_ranks() -> None:
    with pytest.raises(AgreedError, match=r"same number of ranks on every host, got \[1, 2\]; use 'sra'"):
        LocalWorld(3, num_hosts=2).run(lambda t: summed(t, "maxmin:2", reducer="hierarchical"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda rank: ("maxmin:4" if rank else "maxmin:5", {}), "policy is 'maxmin:5.* on rank 0 and 'maxmin:4.* on rank 1"),
        (lambda rank: ("maxmin:4", {"seed": rank}), "seed is 0 on rank 0 and 1 on rank 1"),
        (lambda rank: ("maxmin:4", {"reducer": "sra" if rank else "hierarchical"}), "reducer is 'hierarchical' on rank 0"),
        (lambda rank: ("maxmin:4", {"reducer": "allreduce"}), r"a\.weight|c\.weight: codec maxmin:4.* is not linear"),
    ],
)
def test_ranks_that_do_not_fit_together_all_fail(arguments: Any, message: str) -> None:
    def body(transport: LocalTransport) -> str:
        text, options = arguments(transport.rank)
        with pytest.raises(AgreedError) as caught:
            summed(transport, text, **options)
        return str(caught.value)

    errors = LocalWorld(2).run(body)
    assert errors[0] == errors[1]
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(errors[0])


def test_shapes_that_do_not_fill_the_tensor_are_refused() -> None:
    with pytest.raises(AgreedError, match=rf"have {NUM} elements, but the flat tensor has 7"):
        LocalWorld(2).run(lambda t: summed(t, "maxmin:4", flat=torch.zeros(7)))
    with pytest.raises(ValueError, match="reducer must be one of allreduce, by-host, sra, hierarchical, got 'ring'"):
        Exchange(LocalTransport(), parse_policy("none"), reducer="ring")


def train(transport: LocalTransport, *, restart: bool, steps: int = 6) -> torch.Tensor:
    make = lambda: Exchange(transport, parse_policy("maxmin:2; c*=normal:1"), error_feedback=True)  # noqa: E731
    exchange, received = make(), torch.zeros(NUM)
    for step in range(steps):
        if restart and step == 3:
            state = exchange.state_dict()
            exchange = make()
            exchange.load_state_dict(state)
        flat = values(transport.rank, step)
        exchange.sum_(flat, "parameters", step=step, tensors=MODEL)
        received += flat
    return received


def test_a_restart_changes_nothing_and_residuals_help() -> None:
    through = LocalWorld(2).run(lambda t: train(t, restart=False))
    assert torch.equal(LocalWorld(2).run(lambda t: train(t, restart=True))[0], through[0])
    inputs = sum(values(rank, step) for rank in range(2) for step in range(6))
    without = torch.zeros(NUM)
    for step in range(6):
        without += LocalWorld(2).run(lambda t: summed(t, "maxmin:2; c*=normal:1", values(t.rank, step)))[0]  # noqa: B023
    assert float((through[0] - inputs).norm()) < 0.7 * float((without - inputs).norm())


def test_a_new_policy_takes_effect_and_forgets_residuals() -> None:
    def body(transport: LocalTransport) -> list[Any]:
        exchange = Exchange(transport, parse_policy("maxmin:2"), error_feedback=True)
        sizes = []
        for text in ("maxmin:2", "maxmin:8"):
            exchange.set_policy(parse_policy(text))
            assert exchange.state_dict()["residuals"] == {}
            exchange.sum_(values(transport.rank), "x", step=0, tensors=MODEL)
            assert exchange.state_dict()["residuals"]
            sizes.append(exchange.payload_bytes("x"))
        return sizes

    small, large = LocalWorld(2).run(body)[0]
    assert small < 0.35 * large < 0.35 * 4 * NUM


def test_residuals_of_another_world_are_dropped_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    exchange = Exchange(LocalTransport(), parse_policy("maxmin:2"), error_feedback=True)
    state = {"policy": exchange.policy.spec, "world_size": 2, "residuals": {"x.0.worker": torch.ones(3)}, "factors": {}}
    exchange.load_state_dict(state)
    assert exchange.state_dict()["residuals"] == {} and "starts anew" in caplog.text


@pytest.mark.parametrize("winner", ["none", "codes"])
def test_the_fastest_way_is_that_of_the_slowest_rank(winner: str) -> None:
    def body(transport: LocalTransport) -> tuple[str, dict[str, float]]:
        def way(name: str) -> Callable[[torch.Tensor], None]:
            def run(flat: torch.Tensor) -> None:
                # Only the last rank finds the other one slow.
                if transport.rank == 2 and name != winner:
                    time.sleep(0.25)
                flat.add_(1)

            return run

        flat = values(transport.rank)
        found = fastest(transport, {name: way(name) for name in ("none", "codes")}, flat)
        assert torch.equal(flat, values(transport.rank))
        return found

    results = LocalWorld(3).run(body)
    assert all(found == results[0] for found in results) and results[0][0] == winner


@pytest.mark.parametrize("of_shards", [False, True])
def test_one_rank_says_what_a_trial_between_islands_has_found(of_shards: bool, caplog: pytest.LogCaptureFixture) -> None:
    def body(transport: LocalTransport) -> bool:
        islands: Any = IslandWorld(transport, np.array([0, 0, 1, 1]))
        world = ShardWorld(islands) if of_shards else islands
        fastest(world, {"none": lambda flat: world.allreduce_sum_(flat, "trial")}, torch.ones(4))
        return bool(world.speaks)

    with caplog.at_level(logging.INFO):
        assert LocalWorld(4).run(body) == [True, False, False, False]
    assert caplog.text.count("none is the fastest") == 1


@pytest.mark.parametrize(
    ("num_ranks", "num_hosts", "expected"),
    [(4, 2, "hierarchical"), (6, 3, "hierarchical"), (4, 1, "sra"), (2, 2, "sra"), (3, 2, "sra")],
)
def test_by_host_sums_in_two_steps_where_hosts_are_alike(num_ranks: int, num_hosts: int, expected: str) -> None:
    def body(transport: LocalTransport) -> tuple[list[str], list[torch.Tensor]]:
        chosen, sums = [], []
        # Asked for by name, hierarchical needs equally many ranks a host.
        for reducer in (expected, "by-host", *(["hierarchical"] if num_ranks % num_hosts == 0 else [])):
            exchange = Exchange(transport, parse_policy("maxmin:4"), reducer=reducer)
            sums.append(values(transport.rank))
            exchange.sum_(sums[-1], "parameters", step=3, tensors=MODEL)
            chosen.append(exchange.reducer)
        return chosen, sums

    for chosen, sums in LocalWorld(num_ranks, num_hosts=num_hosts).run(body):
        assert set(chosen) == {expected} and all(torch.equal(sums[0], other) for other in sums)


def test_what_codes_lost_is_forgotten_on_other_hosts(caplog: pytest.LogCaptureFixture) -> None:
    """The same ranks on one host, and then on two: others sum which part."""

    def body(transport: LocalTransport, states: Any = None) -> Any:
        exchange = Exchange(transport, parse_policy("maxmin:4"), reducer="by-host", error_feedback=True)
        if states is not None:
            exchange.load_state_dict(states[transport.rank])
        exchange.sum_(flat := values(transport.rank), "parameters", step=3, tensors=MODEL)
        return flat, exchange.state_dict()

    states = [state for _, state in LocalWorld(4).run(body)]
    moved = LocalWorld(4, num_hosts=2).run(lambda transport: body(transport, states))
    anew = LocalWorld(4, num_hosts=2).run(body)
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(moved, anew, strict=True)) and "starts anew" in caplog.text
    stayed = LocalWorld(4).run(lambda transport: body(transport, states))
    assert not torch.equal(stayed[0][0], LocalWorld(4).run(body)[0][0])


def test_a_rank_that_has_moved_among_hosts_forgets_what_it_lost(caplog: pytest.LogCaptureFixture) -> None:
    """Two hosts of two ranks, placed in blocks and then in turns: ranks 1 and 2 sum other parts than before."""

    def body(transport: LocalTransport, states: Any = None, *, in_turns: bool) -> Any:
        if in_turns:
            transport.host, transport.local_rank = f"host{transport.rank % 2}", transport.rank // 2
        policy = parse_policy("maxmin:4; b.weight=powersgd:2")
        exchange = Exchange(transport, policy, reducer="by-host", error_feedback=True)
        if states is not None:
            exchange.load_state_dict(states[transport.rank])
        loaded = exchange.state_dict()
        exchange.sum_(flat := values(transport.rank), "parameters", step=3, tensors=MODEL)
        return flat, loaded, exchange.state_dict()

    states = [state for *_, state in LocalWorld(4, num_hosts=2).run(lambda t: body(t, in_turns=False))]
    for in_turns in (False, True):
        moved = LocalWorld(4, num_hosts=2).run(lambda t: body(t, states, in_turns=in_turns))  # noqa: B023
        assert all(torch.equal(flat, moved[0][0]) for flat, *_ in moved)
        kept = [bool(loaded["residuals"]) for _, loaded, _ in moved]
        assert kept == [True, not in_turns, not in_turns, True] and ("starts anew" in caplog.text) == in_turns
        # What a sum goes on from must be the same everywhere.
        assert all(loaded["factors"].keys() == states[0]["factors"].keys() != set() for _, loaded, _ in moved)


@pytest.mark.parametrize("world_size", [1, 4])
@pytest.mark.parametrize(("text", "reducer"), [
    ("none", "sra"), ("fp16", "allreduce"), ("maxmin:4; c*=normal:1", "sra"), ("maxmin:4", "hierarchical"), ("powersgd:2", "sra"),
])  # fmt: skip
def test_a_weight_on_the_way_is_a_weight_before(text: str, reducer: str, world_size: int) -> None:
    def both(transport: LocalTransport) -> list[torch.Tensor]:
        weight = 0.1 * (transport.rank + 1)
        results = []
        for late in (True, False):
            exchange = Exchange(transport, parse_policy(text), chunk_elements=2048, reducer=reducer, error_feedback=True)
            flat = values(transport.rank)
            if not late:
                flat.mul_(weight)
            exchange.sum_(flat, "x", step=0, tensors=MODEL, weight=weight if late else 1.0)
            results.append(flat)
        return results

    for late, early in LocalWorld(world_size, num_hosts=2 if world_size == 4 else 1).run(both):
        assert torch.equal(late, early)

"""PowerSGD's exchange over simulated ranks."""

from __future__ import annotations

import pytest
import torch

from hvd_adaptive.comm.threads import LocalTransport, LocalWorld
from hvd_adaptive.compress import encode, parse_codec
from hvd_adaptive.compress.policy import TensorInfo, parse_policy
from hvd_adaptive.exchange.exchange import Exchange

MODEL = [TensorInfo("a", (60, 40)), TensorInfo("conv", (16, 8, 3, 3)), TensorInfo("b", (30, 70)), TensorInfo("bias", (30,))]
NUM = sum(tensor.size for tensor in MODEL)
POLICY = "powersgd:3"


def values(rank: int, step: int = 0, *, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(NUM, generator=torch.Generator().manual_seed(100 * step + rank)).to(dtype)


def test_matrices_of_low_rank_are_summed_exactly_after_a_few_steps() -> None:
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(60, 3, generator=generator), torch.randn(40, 3, generator=generator)
    low = left @ right.T

    def body(transport: LocalTransport) -> torch.Tensor:
        exchange = Exchange(transport, parse_policy(POLICY))
        flat = (low * (transport.rank + 1)).reshape(-1).clone()
        exchange.sum_(flat, "x", step=0, tensors=[MODEL[0]])
        return flat.view(60, 40)

    for world_size in (2, 3):
        results = LocalWorld(world_size).run(body)
        assert all(torch.equal(result, results[0]) for result in results)
        assert torch.allclose(results[0], low * (world_size * (world_size + 1) / 2), atol=1e-4)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_equal_bits_low_rank_and_exact_biases(world_size: int, dtype: torch.dtype) -> None:
    def body(transport: LocalTransport) -> torch.Tensor:
        flat = values(transport.rank, dtype=dtype)
        Exchange(transport, parse_policy(POLICY)).sum_(flat, "x", step=0, tensors=MODEL)
        return flat

    results = LocalWorld(world_size).run(body)
    assert all(torch.equal(result, results[0]) for result in results)
    exact = sum(values(rank, dtype=dtype).double() for rank in range(world_size))
    assert torch.allclose(results[0][-30:].double(), exact[-30:], atol=2e-2 if dtype == torch.float16 else 1e-5)
    if dtype == torch.float32:
        assert int(torch.linalg.matrix_rank(results[0][:2400].view(60, 40), rtol=1e-4)) == 3
    # A projection never makes things longer, and random matrices keep little in three columns.
    lost = float((results[0][:-30].double() - exact[:-30]).norm() / exact[:-30].norm())
    assert 0.5 < lost < 1.0


def test_residuals_add_up_to_what_the_sums_have_lost_and_survive_a_restart() -> None:
    steps = 12

    def body(transport: LocalTransport, restart: bool) -> tuple[torch.Tensor, torch.Tensor]:
        make = lambda: Exchange(transport, parse_policy(POLICY), error_feedback=True)  # noqa: E731
        exchange, received = make(), torch.zeros(NUM)
        for step in range(steps):
            if restart and step == 5:
                state = exchange.state_dict()
                exchange = make()
                exchange.load_state_dict(state)
            flat = values(transport.rank, step)
            exchange.sum_(flat, "x", step=step, tensors=MODEL)
            received += flat
        return received, exchange.state_dict()["residuals"]["x.0.worker"]

    results = LocalWorld(2).run(lambda t: body(t, False))
    again = LocalWorld(2).run(lambda t: body(t, True))
    assert torch.equal(results[0][0], again[0][0])
    inputs = sum(values(rank, step) for rank in range(2) for step in range(steps))
    missing = sum(residual for _, residual in results)
    assert torch.allclose(results[0][0][:-30] + missing, inputs[:-30], atol=1e-3)


def test_a_value_that_is_not_finite_reaches_all_ranks_and_passes() -> None:
    def body(transport: LocalTransport) -> list[torch.Tensor]:
        exchange = Exchange(transport, parse_policy(POLICY), error_feedback=True)
        results = []
        for step in range(2):
            flat = values(transport.rank, step)
            if step == 0 and transport.rank == 1:
                flat[7] = float("inf")
            exchange.sum_(flat, "x", step=step, tensors=MODEL)
            results.append(flat)
        return results

    for first, second in LocalWorld(2).run(body):
        assert torch.isnan(first[:-30]).all() and torch.isfinite(second).all()


def test_it_codes_no_single_values() -> None:
    with pytest.raises(ValueError, match="codes matrices in two sums"):
        encode(parse_codec("powersgd:2"), torch.zeros(8))
    for text, message in (("powersgd", "takes one option"), ("powersgd:0", "rank must be >= 1, got 0")):
        with pytest.raises(ValueError, match=message):
            parse_codec(text)

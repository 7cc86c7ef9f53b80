"""Merges in fragments: all progress enters one sum, ranks end with equal bits, and one rank is plain training."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from hvd_adaptive.algorithm.fragments import cut_layers, phases, phases_beside_steps
from hvd_adaptive.algorithm.ledger import epoch_order
from hvd_adaptive.comm.protocols import AgreedError, InOrder, Transport
from hvd_adaptive.comm.threads import LocalWorld
from hvd_adaptive.config import Config
from hvd_adaptive.engine import model_fragments
from hvd_adaptive.engine.flat_model import model_hash
from hvd_adaptive.engine.records import RoundStats
from hvd_adaptive.session.session import Session
from hvd_adaptive.strategies.local import LocalStrategy

_generator = torch.Generator().manual_seed(0)
X = torch.randn(360, 6, dtype=torch.float64, generator=_generator)
Y = (X.sum(dim=1) > 0).long()
DATA = TensorDataset(X, Y)
FRAGMENTS: list[dict[str, Any]] = [
    {"merge_fragments": 2},
    {"merge_fragments": 2, "fragment_delay": 0.0, "fragment_alpha": 0.0},
    {"merge_fragments": 3, "fragment_delay": 0.5, "fragment_alpha": 0.0},
    {"merge_fragments": 3, "fragment_delay": 1.0, "fragment_alpha": 0.7},
    {"merges_per_round": 3},
]


def make_model() -> nn.Sequential:
    # Simulated ranks are threads of one process, whose random generator they share.
    layers = [nn.Linear(6, 48), nn.Linear(48, 48), nn.Linear(48, 48), nn.Linear(48, 2)]
    model = nn.Sequential(*(module for layer in layers for module in (layer, nn.Tanh()))).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def cut_of(model: nn.Module) -> list[range]:
    """Which of its parameters are in each of two fragments."""
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    return cut_layers(list(sizes), list(sizes.values()), 2)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).clone()


@given(st.integers(1, 7), st.floats(0, 1))
def test_each_fragment_is_sent_and_taken_in_once_a_round(num_fragments: int, delay: float) -> None:
    found = phases(num_fragments, delay)
    assert [p.position for p in found] == sorted(p.position for p in found) and found[-1].position <= 1 < 1 + found[0].position
    for fragment in range(num_fragments):
        sent, arrived = (next(p for p in found if p.fragment == fragment and p.arrives is kind) for kind in (False, True))
        assert sent.position == pytest.approx((fragment + 1) / num_fragments, abs=1e-8)
        later = arrived.position - sent.position
        assert min(abs(later - delay), abs(later + 1 - delay)) < 1e-5
        # It arrives before it is sent again, and without a delay at once.
        order = found.index(sent) < found.index(arrived)
        assert order == (delay < 5e-7 or arrived.position > sent.position)


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 50)), min_size=1, max_size=12), st.integers(1, 12))
@settings(max_examples=200)
def test_fragments_are_runs_of_whole_layers(layers: list[tuple[int, int]], num_fragments: int) -> None:
    names = [f"blocks.{i}.part{j}.weight" for i, (count, _) in enumerate(layers) for j in range(count)]
    sizes = [size for count, size in layers for _ in range(count)]
    if num_fragments > len(layers):
        with pytest.raises(ValueError, match=f"merge_fragments must be <= .*, got {num_fragments} > {len(layers)}"):
            cut_layers(names, sizes, num_fragments)
        return
    runs = cut_layers(names, sizes, num_fragments)
    assert [i for run in runs for i in run] == list(range(len(names))) and all(len(run) for run in runs)
    edges = [run.start for run in runs[1:]]
    assert all(names[edge].split(".")[1] != names[edge - 1].split(".")[1] for edge in edges)


@given(st.integers(1, 9), st.integers(1, 5))
def test_the_whole_model_is_sent_so_often_beside_steps(num_merges: int, num_fragments: int) -> None:
    found = phases_beside_steps(num_merges, num_fragments)
    assert [phase.position for phase in found] == sorted(phase.position for phase in found)
    for fragment in range(num_fragments):
        mine = [phase for phase in found if phase.fragment == fragment]
        # A sum is taken in before the next one is sent, and nothing is left on the way.
        assert [phase.arrives for phase in mine] == [True, False] * num_merges + [True]
        sent = [phase.position for phase in mine if not phase.arrives]
        early = [(number + (fragment + 1) / num_fragments) / num_merges for number in range(num_merges - 1)]
        assert sent == pytest.approx([*early, 1.0], abs=1e-8) and all(a < b for a, b in zip(sent[:-1], early, strict=True))


def test_fragments_of_a_transformer_are_equally_large() -> None:
    blocks = [f"blocks.{i}.{part}.weight" for i in range(4) for part in ("n", "qkv", "o", "f.0", "f.2")]
    names = ["emb.weight", "pos.w", *blocks, "norm.weight", "head.weight"]
    sizes = [256 * 160, 64 * 160, *[160, 3 * 160**2, 160**2, 4 * 160**2, 4 * 160**2] * 4, 160, 256 * 160]
    for num_fragments in (2, 4):
        totals = [sum(sizes[i] for i in run) for run in cut_layers(names, sizes, num_fragments)]
        assert max(totals) < 1.2 * sum(sizes) / num_fragments


def progress_of(rank: int, number: int, size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(50 * number + rank), dtype=torch.float64)


def drift(
    transport: Transport,
    *,
    rounds: int = 4,
    steps: int = 6,
    poison: int | None = None,
    alternates: bool = False,
    closed_at: int | None = None,
    between: Callable[[nn.Module], object] = lambda model: None,
    **options: Any,
) -> dict[str, Any]:
    """Rounds in which rank i adds known numbers to its model in each step; its steps count as 1 + i updates.

    Args:
        transport: the world.
        rounds: so many.
        steps: of a round.
        poison: the step that makes rank 1 not finite.
        alternates: every second round has one merge.
        closed_at: the step of the last round before which that is closed.
        between: is called with the model after each round.
        options: of the configuration.
    """
    model = make_model()
    config = Config(merge_weights="updates", **options)
    strategy = LocalStrategy(model, torch.optim.SGD(model.parameters(), lr=0.1), config, transport)
    size = len(flat(model))
    work, globals_, after = 1.0 + transport.rank, [], []
    for number in range(rounds):
        merges = 1 if alternates and number % 2 else config.merges_per_round or 1
        strategy.merge.begin_round(merges)
        overlap = strategy.merge.overlap
        assert (overlap is None) == (alternates and merges == 1)
        if overlap is not None:
            overlap.start_round_(work=steps * sum(range(1, transport.world_size + 1)), merges=merges)
        done = steps if closed_at is None or number < rounds - 1 else closed_at
        for step in range(done):
            if overlap is not None:
                overlap.reach_(step / steps, step * work, step * work)
            after.append(flat(model))
            parts = progress_of(transport.rank, number * steps + step, size).split([p.numel() for p in model.parameters()])
            with torch.no_grad():
                for p, part in zip(model.parameters(), parts, strict=True):
                    p += part.view(p.shape)
            if poison == number * steps + step and transport.rank == 1:
                with torch.no_grad():
                    model[0].weight[0, 0] = float("inf")
        if overlap is not None:
            overlap.reach_(done / steps, done * work, done * work)
        strategy.end_round(RoundStats(batch_size=1, num_updates=done * work, num_samples=1))
        globals_.append(flat(model))
        between(model)
    strategy.drain()
    compressed = strategy.merge.flat_model.compressed
    lost = {} if compressed is None else compressed.state_dict()["exchange"]["residuals"]
    total = sum(float(residual.double().sum()) for residual in lost.values())
    return {"globals": globals_, "after": after, "final": flat(model), "lost": total}


@pytest.mark.parametrize("options", FRAGMENTS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_all_progress_is_merged_once_by_the_ranks_work(world_size: int, options: dict[str, Any]) -> None:
    results = LocalWorld(world_size).run(lambda t: drift(t, outer_step="none", **options))
    weight = np.arange(1, world_size + 1) / np.arange(1, world_size + 1).sum()
    start = flat(make_model())
    moved = sum(w * progress_of(rank, n, len(start)) for rank, w in enumerate(weight) for n in range(4 * 6))
    for result in results:
        assert torch.allclose(result["final"], start + moved, rtol=1e-10, atol=1e-10)
        assert torch.equal(result["final"], results[0]["final"])
        assert all(torch.equal(a, b) for a, b in zip(result["globals"], results[0]["globals"], strict=True))
    assert len({tuple(g.tolist()) for g in results[0]["globals"]}) == 4


@pytest.mark.parametrize("options", [{"merges_per_round": 3}, {"merges_per_round": 3, "alternates": True}])
def test_writes_between_rounds_that_torch_does_not_count_are_steps(options: dict[str, Any]) -> None:
    def write(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.data.add_(1.0)

    plain, written = (LocalWorld(2).run(lambda t, f=f: drift(t, between=f, outer_step="none", **options)) for f in (len, write))
    # Behind the first three of four rounds.
    assert torch.allclose(written[0]["globals"][-1], plain[0]["globals"][-1] + 3.0, rtol=1e-10, atol=1e-10)


def in_fragments(monkeypatch: pytest.MonkeyPatch, num_fragments: int) -> None:
    """Has small models merged beside steps in fragments."""
    monkeypatch.setattr(model_fragments, "_MOST_BESIDE_STEPS", num_fragments)
    monkeypatch.setattr(model_fragments, "_LEAST_BESIDE_STEPS", 1)


@pytest.mark.parametrize("closed_at", [None, 0, 1, 2, 5, 11])
@pytest.mark.parametrize("codec", ["maxmin:2", "topk:0.3"])
def test_what_codecs_lose_beside_steps_comes_in_the_next_merge_as_it_was(
    codec: str, closed_at: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fragments are sent after unequal parts of a round, and at the end of one that is closed early."""
    in_fragments(monkeypatch, 4)
    check_what_codecs_lose(4 * 12 if closed_at is None else 3 * 12 + closed_at, codec, closed_at=closed_at, merges_per_round=3)


@pytest.mark.parametrize("options", [*FRAGMENTS[:2], {"merge_fragments": 4}, {"merge_fragments": 4, "fragment_delay": 1.0}])
@pytest.mark.parametrize("codec", ["maxmin:2", "topk:0.3"])
def test_what_codecs_lose_in_fragments_comes_in_the_next_merge_as_it_was(codec: str, options: dict[str, Any]) -> None:
    """The first merges of a run, and the last ones, have a part of a round's steps."""
    check_what_codecs_lose(4 * 12, codec, **options)


def check_what_codecs_lose(num_steps: int, codec: str, **options: Any) -> None:
    results = LocalWorld(2).run(lambda t: drift(t, steps=12, outer_step="none", compression=codec, **options))
    start = flat(make_model())
    moved = sum((1 + r) / 3 * progress_of(r, n, len(start)) for r in range(2) for n in range(num_steps))
    missing = float((start + moved - results[0]["final"]).sum())
    assert abs(missing) > 0.1
    assert missing == pytest.approx(sum(result["lost"] for result in results), abs=1e-3)


def test_memory_that_is_replaced_between_rounds_is_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    def replace(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()

    in_fragments(monkeypatch, 2)
    options: dict[str, Any] = {"merges_per_round": 3, "outer_step": "none", "dispatch": "equal"}
    plain, replaced = (LocalWorld(2).run(lambda t, f=f: drift(t, between=f, **options)) for f in (lambda model: None, replace))
    for a, b in zip(plain, replaced, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a["after"], b["after"], strict=True))


def test_one_rank_takes_sums_in_at_their_places_however_soon_they_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InOrder, "done", lambda self: True)
    in_fragments(monkeypatch, 2)
    options: dict[str, Any] = {"merges_per_round": 3, "outer_step": "momentum"}
    at_once, at_places = (LocalWorld(1).run(lambda t, d=d: drift(t, dispatch=d, **options))[0] for d in ("dynamic", "equal"))
    assert all(torch.equal(a, b) for a, b in zip(at_once["after"], at_places["after"], strict=True))


@pytest.mark.parametrize("outer_step", ["none", "momentum"])
def test_rounds_with_one_merge_and_with_several_follow_each_other(outer_step: str) -> None:
    options: dict[str, Any] = {"merges_per_round": 3, "outer_step": outer_step, "outlier_limit": 50.0}
    results = LocalWorld(2).run(lambda t: drift(t, alternates=True, **options))
    start, size = flat(make_model()), len(flat(make_model()))
    w, v = start.clone(), torch.zeros(size, dtype=torch.float64)
    # Two steps a merge, or all six of a round.
    for first, stop in [*((n, n + 2) for n in (0, 2, 4)), (6, 12), *((n, n + 2) for n in (12, 14, 16)), (18, 24)]:
        v = (0.9 * v if outer_step == "momentum" else 0.0) + sum(
            (1 + rank) / 3 * progress_of(rank, n, size) for rank in range(2) for n in range(first, stop)
        )
        w = w + v
    for result in results:
        assert torch.allclose(result["final"], w, rtol=1e-9, atol=1e-9)
        assert torch.equal(result["final"], results[0]["final"])


def test_the_outer_step_has_a_velocity_for_each_fragment() -> None:
    """Without a delay, against the formula: the first fragment has seen half of the round when it is merged."""
    options = {"merge_fragments": 2, "fragment_delay": 0.0, "fragment_alpha": 0.0}
    momentum = {"outer_step": "nesterov", "outer_lr": 0.7, "outer_momentum": 0.5}
    results = LocalWorld(2).run(lambda t: drift(t, **options, **momentum))
    size = len(results[0]["final"])
    cut = sum(p.numel() for p in list(make_model().parameters())[: cut_of(make_model())[0].stop])
    expected = []
    for part, sends in ((slice(0, cut), [3, 9, 15, 21, 24]), (slice(cut, size), [6, 12, 18, 24])):
        w, v, last = flat(make_model())[part], torch.zeros(1, dtype=torch.float64), 0
        for stop in sends:
            delta = sum((1 + r) / 3 * progress_of(r, n, size)[part] for r in range(2) for n in range(last, stop))
            v, last = 0.5 * v + delta, stop
            w = w + 0.7 * (delta + 0.5 * v)
        expected.append(w)
    assert torch.allclose(results[0]["final"], torch.cat(expected), rtol=1e-10, atol=1e-10)
    # Right after the first phase, half through the round, all ranks have one first fragment and their own second one.
    a, b = (result["after"][3] for result in results)
    assert torch.allclose(a[:cut], b[:cut], rtol=1e-12) and not torch.allclose(a[cut:], b[cut:], rtol=1e-2)


def test_beside_steps_each_fragment_counts_its_own_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the formula of momentum that looks back over the last fifth of the run. Sums of simulated ranks are there when the
    next phase comes."""
    in_fragments(monkeypatch, 2)
    results = LocalWorld(2).run(lambda t: drift(t, merges_per_round=3, outer_step="cautious", dispatch="equal"))
    size = len(results[0]["final"])
    sizes = [p.numel() for p in make_model().parameters()]
    cut = sum(sizes[: cut_layers(list(map(str, range(len(sizes)))), sizes, 2)[0].stop])
    expected = []
    for part, sends in ((slice(0, cut), (1, 3, 6)), (slice(cut, size), (2, 4, 6))):
        w, v, last = flat(make_model())[part], torch.zeros(1, dtype=torch.float64), 0
        for stop in (6 * number + end for number in range(4) for end in sends):
            delta = sum((1 + r) / 3 * progress_of(r, n, size)[part] for r in range(2) for n in range(last, stop))
            # Of the fastest rank: two in each step.
            gamma = min(0.95, max(0.0, 1 - (stop - last) / stop / 0.2))
            v, last = gamma * v + delta, stop
            w = w + torch.where((v * delta > 0) & (v != delta), (1 - gamma) ** 0.5 * (delta + gamma * v), delta)
        expected.append(w)
    for result in results:
        assert torch.allclose(result["final"], torch.cat(expected), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("options", FRAGMENTS)
@pytest.mark.parametrize("step", [1, 5, 9])
def test_a_rank_that_is_not_finite_gives_up_what_it_has_not_sent(
    step: int, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    results = LocalWorld(2).run(lambda t: drift(t, poison=step, outer_step="none", **options))
    plain = LocalWorld(2).run(lambda t: drift(t, outer_step="none", **options))
    assert torch.equal(results[0]["final"], results[1]["final"]) and torch.isfinite(results[0]["final"]).all()
    assert not torch.equal(results[0]["final"], plain[0]["final"])
    assert caplog.text.count("ranks [1] had NaN or Inf") == 1


def train(
    transport: Transport,
    *,
    state: Any = None,
    stop_at: int = 0,
    back_at: int = 0,
    on_batch: Callable[[Session, Any], None] = lambda session, batch: None,
    num_epochs: float = 2,
    **options: Any,
) -> dict[str, Any]:
    """The state is that after round ``stop_at``, with fragments on the way, or the last. Once ``back_at`` rounds are over, the
    session goes back to where it was after two of them."""
    model = make_model()
    options = {"batch_size": 10, "mega_batch": 120, "hash_interval": 1, "dispatch": "equal", **options}
    session = Session(model, torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5), Config(**options), transport=transport)
    if state is not None:
        session.load_state_dict(state[transport.rank])
    records: list[Any] = []
    kept: list[Any] = []
    taken: list[tuple[int, Any]] = []
    earlier: list[Any] = []

    def keep(record: Any) -> None:
        records.append(record)
        if session.round == 2 and back_at and not earlier:
            earlier.append(copy.deepcopy(session.state_dict()))
        elif len(records) == back_at:
            session.load_state_dict(earlier[0])
        if session.round == stop_at:
            kept.append(copy.deepcopy(session.state_dict()))
            session.stop(agreed=True)

    session.records.append(keep)
    for batch in session.batches(DATA, num_epochs=num_epochs):
        on_batch(session, batch)
        taken.append((session.round, batch.rows))
        with session.step(batch):
            session.optimizer.zero_grad()
            batch.loss = nn.functional.cross_entropy(model(batch.x), batch.y)
            batch.loss.backward()
            session.optimizer.step()
    saved = kept[0] if kept else session.state_dict()
    session.close()
    return {"model": model, "hash": model_hash(model), "records": records, "state": saved, "taken": taken}


@pytest.mark.parametrize("dispatch", ["equal", "dynamic"])
@pytest.mark.parametrize("options", FRAGMENTS)
def test_one_rank_without_outer_step_is_plain_training(options: dict[str, Any], dispatch: str) -> None:
    ours = LocalWorld(1).run(lambda t: train(t, outer_step="none", dispatch=dispatch, seed=5, **options))[0]["model"]
    model = make_model()
    sgd = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)
    for epoch in range(2):
        for rows in np.split(epoch_order(360, seed=5, epoch=epoch), 36):
            sgd.zero_grad()
            nn.functional.cross_entropy(model(X[rows]), Y[rows]).backward()
            sgd.step()
    assert torch.allclose(flat(ours), flat(model), rtol=1e-9)


def test_without_delay_it_is_the_whole_merge_a_fragment_at_a_time() -> None:
    """Two ranks against two models in one process, whose halves are averaged where the phases are."""
    options = {"merge_fragments": 2, "fragment_delay": 0.0, "fragment_alpha": 0.0, "merge_weights": "uniform"}
    results = LocalWorld(2).run(lambda t: train(t, outer_step="none", **options))
    models = [make_model(), make_model()]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.2, momentum=0.5) for m in models]
    runs = cut_of(models[0])

    def average(run: range) -> None:
        with torch.no_grad():
            for a, b in itertools.islice(zip(*(m.parameters() for m in models), strict=True), run.start, run.stop):
                a.copy_((a + b) / 2)
                b.copy_(a)

    for number in range(6):
        parts = [[rows for r, rows in result["taken"] if r == number] for result in results]
        done = [0, 0]
        for half, run in enumerate(runs, start=1):
            for rank, rows in enumerate(parts):
                total = sum(map(len, rows))
                while done[rank] < len(rows) and sum(map(len, rows[: done[rank]])) < total * half / 2:
                    batch = rows[done[rank]]
                    optimizers[rank].zero_grad()
                    nn.functional.cross_entropy(models[rank](X[batch]), Y[batch]).backward()
                    optimizers[rank].step()
                    done[rank] += 1
            average(run)
    average(range(runs[-1].stop))
    assert torch.allclose(flat(results[0]["model"]), flat(models[0]), rtol=1e-9)
    assert results[0]["hash"] == results[1]["hash"]


MORE: list[dict[str, Any]] = [{"compression": "maxmin:4"}, {"merge_weights": "samples", "outer_step": "none"}]


@pytest.mark.parametrize(
    # Each way to send with nothing more and with one of these.
    ("options", "more"),
    [(o, more) for place, o in enumerate(FRAGMENTS) for more in ({}, MORE[place % 2])],
)
def test_a_resume_with_fragments_on_the_way_goes_on_with_the_same_bits(options: dict[str, Any], more: dict[str, Any]) -> None:
    # The order of claims and all seconds are out of play: parts are fixed, and no rule looks at speeds.
    whole = LocalWorld(2).run(lambda t: train(t, stop_at=6, **options, **more))
    first = LocalWorld(2).run(lambda t: train(t, stop_at=3, **options, **more))
    states = [result["state"] for result in first]
    second = LocalWorld(2).run(lambda t: train(t, stop_at=6, state=states, **options, **more))
    assert second[0]["hash"] == second[1]["hash"] == whole[0]["hash"]
    assert whole[0]["hash"] != first[0]["hash"]


@pytest.mark.parametrize("compression", ["none", "maxmin:8"])
@pytest.mark.parametrize("options", FRAGMENTS)
def test_a_run_that_goes_back_ends_with_the_bits_of_one_that_never_did(options: dict[str, Any], compression: str) -> None:
    straight = LocalWorld(2).run(lambda t: train(t, compression=compression, **options))
    back = LocalWorld(2).run(lambda t: train(t, compression=compression, back_at=4, **options))
    assert [len(result["records"]) for result in back] == [8, 8]
    assert back[0]["hash"] == back[1]["hash"] == straight[0]["hash"]


def test_a_rank_whose_own_part_is_empty_comes_to_each_merge() -> None:
    # Two samples for three ranks.
    results = LocalWorld(3).run(lambda t: train(t, num_epochs=0.02, mega_batch=2, merge_fragments=2, fragment_delay=0.0))
    assert results[0]["records"][0].stats["num_samples"].tolist() == [1, 0, 1]
    assert len({result["hash"] for result in results}) == 1


def test_another_number_of_ranks_goes_on_from_the_merged_model(caplog: pytest.LogCaptureFixture) -> None:
    first = LocalWorld(2).run(lambda t: train(t, stop_at=3, merge_fragments=2))
    states = [*(result["state"] for result in first), first[0]["state"]]
    second = LocalWorld(3).run(lambda t: train(t, state=states, merge_fragments=2))
    assert len({result["hash"] for result in second}) == 1
    assert "the number of ranks has changed: what they had learned" in caplog.text


@pytest.fixture(scope="module")
def plain() -> list[dict[str, Any]]:
    return LocalWorld(3).run(lambda t: train(t, merge_fragments=2, num_epochs=4))


@pytest.mark.parametrize("compression", ["fp16", "maxmin:4", "powersgd:2"])
def test_encoded_fragments_end_with_equal_bits_and_learn(compression: str, plain: list[dict[str, Any]]) -> None:
    ours = LocalWorld(3).run(lambda t: train(t, merge_fragments=2, num_epochs=4, compression=compression))
    assert len({result["hash"] for result in ours}) == 1 and ours[0]["hash"] != plain[0]["hash"]
    assert ours[0]["records"][1].payload_bytes < 0.6 * plain[0]["records"][1].payload_bytes
    assert ours[0]["records"][-1].loss < plain[0]["records"][-1].loss + 0.2 < ours[0]["records"][0].loss


def test_a_step_that_makes_nan_resets_the_rank_and_its_optimizer(caplog: pytest.LogCaptureFixture) -> None:
    def poison(session: Session, batch: Any) -> None:
        if session.rank == 1 and session.round == 1 and not caplog.text.count("NaN"):
            batch.x[0, 0] = float("nan")

    results = LocalWorld(2).run(lambda t: train(t, on_batch=poison, merge_fragments=3, outer_step="none"))
    assert "ranks [1] had NaN or Inf" in caplog.text
    assert results[0]["hash"] == results[1]["hash"] and torch.isfinite(flat(results[0]["model"])).all()
    # The momentum as well: else the last rounds would be lost again.
    assert results[0]["records"][-1].stats["finite"].tolist() == [1, 1]


def test_all_ranks_end_together_where_none_is_finite() -> None:
    def poison(session: Session, batch: Any) -> None:
        if session.round == 1:
            batch.x[0, 0] = float("nan")

    with pytest.raises(AgreedError, match="the parameters of ALL ranks hold NaN or Inf"):
        LocalWorld(2).run(lambda t: train(t, on_batch=poison, merge_fragments=3))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"merge_fragments": 0}, "merge_fragments must be > 0, got 0"),
        ({"merge_fragments": 2, "fragment_delay": 1.5}, r"fragment_delay must be in \[0, 1\], got 1.5"),
        ({"merge_fragments": 2, "fragment_alpha": 1.0}, r"fragment_alpha must be in \[0, 1\), got 1.0"),
        ({"fragment_delay": 0.5}, "fragment_delay 0.5 needs merge_fragments of 2 or more, got 1"),
        ({"fragment_alpha": 0.25}, "fragment_alpha 0.25 needs merge_fragments of 2 or more, got 1"),
        ({"merge_fragments": 2, "strategy": "sync"}, "merge_fragments 2 needs strategy local, got 'sync'"),
        ({"merge_fragments": 2, "merge_weights": "paper"}, "merge_fragments 2 needs merge_weights uniform or .*, got 'paper'"),
        ({"merge_fragments": 2, "merge_weights": "fisher-rows"}, "merge_fragments 2 needs merge_weights uniform or"),
        ({"merge_fragments": 2, "sparse_merge": "always"}, "merge_fragments 2 needs sparse_merge auto or never, got 'always'"),
        ({"merge_fragments": 2, "auto_bits": 4, "compression": "maxmin:4"}, "merge_fragments 2 needs auto_bits 0, got 4"),
        ({"merge_fragments": 2, "outer_state": "host"}, "outer_state 'host' needs merge_fragments 1, got 2"),
        ({"merge_fragments": 2, "logical_ranks": 2}, "logical_ranks needs merge_fragments 1, got 2"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Config(**options)


@pytest.mark.parametrize("number", [5, 10**15])
def test_a_model_of_fewer_layers_is_refused_on_all_ranks(number: int) -> None:
    with pytest.raises(AgreedError, match=f"merge_fragments must be <= the model's number of layers, got {number} > 4"):
        LocalWorld(2).run(lambda t: train(t, merge_fragments=number))

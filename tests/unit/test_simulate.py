"""Strategies in virtual time: what can be computed by hand, what always holds, and the command."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn, optim, zeros
from torch.utils.data import TensorDataset

from hvd_adaptive.algorithm.ledger import ClaimRule
from hvd_adaptive.algorithm.slowdown import Slowdown
from hvd_adaptive.calibrate.file import read_table, to_toml
from hvd_adaptive.cli.main import main
from hvd_adaptive.comm.host_store import district, has_host_stores
from hvd_adaptive.comm.protocols import has_equal_hosts
from hvd_adaptive.comm.threads import LocalTransport
from hvd_adaptive.compress.parse import parse_codec
from hvd_adaptive.config import Config
from hvd_adaptive.session.session import Session
from hvd_adaptive.simulate.cluster import described_cluster
from hvd_adaptive.simulate.links import Links
from hvd_adaptive.simulate.measured_cluster import measured_cluster, without_effect
from hvd_adaptive.simulate.scenario_options import STRATEGIES, ClusterConfig, SweepConfig
from hvd_adaptive.simulate.step_times import StepTimes
from hvd_adaptive.simulate.sweep import Outcome, outcome, strategy_config, sweep
from hvd_adaptive.simulate.units import parse_ranks, parse_rate, parse_seconds
from hvd_adaptive.simulate.virtual_claims import Cursor, play_claims
from hvd_adaptive.simulate.virtual_run import simulate

# Nothing costs anything but computing: 1 ms a sample at speed 1.
FREE = ClusterConfig(
    samples_per_s=1000, step_overhead="0ms", jitter=0.0, link="1e9gbit", latency="0us", host_link="1e9GB/s", host_latency="0us",
    exchange_overhead="0ms", merge_gbs=1e12, overlap=0.0, store_operation="0us",
)  # fmt: skip
NAMES = tuple(STRATEGIES)


def play(name: str, cluster: ClusterConfig, *, ranks: int = 4, rounds: int = 24, settle: int = 12, **options: Any) -> Outcome:
    config = strategy_config(name, options)
    return outcome(name, simulate(config, described_cluster(cluster, ranks), num_rounds=rounds), settle=settle)


def but(config: ClusterConfig, **changes: Any) -> ClusterConfig:
    return dataclasses.replace(config, **changes)


# By hand


@pytest.mark.parametrize("name", NAMES)
def test_equal_ranks_whose_exchange_is_free_are_fully_used(name: str) -> None:
    found = play(name, but(FREE, speeds="1"), mega_batch=4096)
    # The last claims of a round are whole samples, and at least a sixteenth of a batch.
    slack = 0.003 if name in ("local", "local-sizes") else 1e-6
    assert found.utilisation == pytest.approx(1, abs=slack) and found.wait_share + found.communication_share <= slack
    assert found.samples_per_s == pytest.approx(4000, rel=slack)


@pytest.mark.parametrize(
    ("name", "free", "expensive"),
    [
        ("horovod", 0.50, 0.20),
        ("sync", 1.00, 0.24),
        ("static", 1.00, 0.24),
        ("local-sgd", 0.50, 0.46),
        ("local", 1.00, 0.84),
        ("local-parts", 1.00, 0.84),
    ],
)
def test_what_each_part_buys_at_speeds_1_1_2_4(name: str, free: float, expensive: float) -> None:
    # Batches of 64 ms at speed 1, 16 of them a rank between merges, exchanges of nothing or of 100 ms.
    options = {"batch_size": 64, "mega_batch": 4 * 16 * 64}
    slack = 0.008 if name == "local" else 0.001
    assert play(name, FREE, **options).utilisation == pytest.approx(free, abs=slack)
    costly = play(name, but(FREE, exchange_overhead="100ms"), **options)
    assert costly.utilisation == pytest.approx(expensive, abs=0.005 + slack)
    assert costly.rounds_per_s == pytest.approx(costly.samples_per_s / 4096)


def test_equal_synchronous_shares_wait_for_the_slowest_rank() -> None:
    found = play("horovod", FREE, mega_batch=4096)
    # The ranks compute 64, 64, 32 and 16 of 64 ms.
    assert found.wait_share == pytest.approx((0 + 0 + 0.5 + 0.75) / 4)
    assert found.steps_per_s == pytest.approx(1000 / 64)


def test_the_cost_of_a_step_is_recovered_by_larger_batches_of_fast_ranks() -> None:
    costly = but(FREE, step_overhead="30ms")
    fixed, moved = (play(name, costly, rounds=40, settle=30, mega_batch=4096) for name in ("local", "local-sizes"))
    assert moved.samples_per_s > 1.03 * fixed.samples_per_s


def test_a_cursor_serves_no_more_claims_than_its_thread_can() -> None:
    # 64 ranks of 1 ms a step could compute 64,000 batches a second; the thread answers 5,000.
    quick = but(FREE, speeds="1", samples_per_s=64_000, store_operation="100us", jitter=0.05)
    found = play("local", quick, ranks=64, rounds=4, settle=1, mega_batch=64 * 64 * 20)
    assert 4000 < found.samples_per_s / 64 < 5001 and found.claim_share > 0.8
    alone = play("local-sgd", quick, ranks=64, rounds=4, settle=1, mega_batch=64 * 64 * 20)
    assert alone.claim_share == 0 and alone.samples_per_s > 5 * found.samples_per_s


@pytest.mark.parametrize("per_host", [1, 8])
def test_claims_of_several_batches_let_a_round_end_together(per_host: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # 512 ranks at 1:1:2:4, 25 batches of 64 ms (at speed 1) a rank: claims cost nothing, so only their size makes ranks wait.
    cluster = but(FREE, ranks_per_host=per_host, jitter=0.05)
    options = {"ranks": 512, "rounds": 4, "settle": 2, "mega_batch": 512 * 25 * 64}
    together = play("local", cluster, **options)
    monkeypatch.setattr("hvd_adaptive.simulate.virtual_strategies.VirtualLocal._open_cursors", one_cursor)
    alone = play("local", cluster, **options)
    assert together.utilisation > alone.utilisation - 0.008
    assert together.wait_share < alone.wait_share + 0.006


def one_cursor(strategy: Any, num_samples: int, rule_of: Any) -> list[Cursor]:
    return [Cursor(0, num_samples)] * strategy._cluster.world_size


@pytest.mark.parametrize(("ranks", "per_host"), [(64, 8), (65, 8), (128, 1), (128, 128), (128, 64), (66, 33), (4096, 4)])
def test_hosts_have_stores_where_those_of_real_runs_have_them(ranks: int, per_host: int) -> None:
    cluster = described_cluster(but(FREE, ranks_per_host=per_host), ranks)
    hosts = [f"host {rank // per_host}" for rank in range(ranks)]
    assert cluster.has_host_stores == has_host_stores(hosts)
    districts = {tuple(district(rank, hosts) or ()) for rank in range(0, ranks, per_host)}
    assert cluster.num_districts == (0 if districts == {()} else len(districts))


@pytest.mark.parametrize(("ranks", "most_ms"), [(512, 10), (4096, 40)])
def test_control_stays_within_its_bounds(ranks: int, most_ms: float) -> None:
    # As described by default but for 8 ranks a host; the rules are left out.
    cluster = described_cluster(ClusterConfig(ranks_per_host=8), ranks)
    assert 1e3 * cluster.control_s < 0.75 * most_ms


def test_synchronous_ranks_ask_the_store_for_several_steps_at_once() -> None:
    # Steps of 1 ms, 32 of which are promised at once, and 1024 questions of 100 us.
    quick = but(FREE, speeds="1", samples_per_s=64_000, store_operation="100us")
    few, many = (
        play("horovod", quick, ranks=ranks, rounds=3, settle=1, mega_batch=ranks * 64 * 1000) for ranks in (64, 1024)
    )
    assert few.steps_per_s == pytest.approx(1000, rel=0.1)
    assert many.steps_per_s == pytest.approx(1 / (1024 * 1e-4 / 32), rel=0.1)


def test_shares_are_right_after_the_first_round_of_sixteen_steps() -> None:
    options = {"mega_batch": 4096, "rounds": 8, "settle": 1}
    assert play("sync", FREE, **options).utilisation > 0.999
    noisy = but(FREE, step_overhead="30ms", jitter=0.1, drift=0.1)
    settled = play("sync", noisy, mega_batch=4096, rounds=60, settle=30)
    assert play("sync", noisy, **options).samples_per_s > 0.93 * settled.samples_per_s
    assert settled.samples_per_s > 1.35 * play("horovod", noisy, mega_batch=4096, rounds=60, settle=30).samples_per_s


def test_static_shares_fall_behind_where_speeds_change() -> None:
    options = {"mega_batch": 4096, "slowdown": "0:4,4,2,1;5:1,2,4,4"}
    moving, static = (play(name, but(FREE, speeds="1"), rounds=40, settle=30, **options) for name in ("sync", "static"))
    assert moving.utilisation > 0.95 > 0.6 > static.utilisation
    assert play("local", but(FREE, speeds="1"), rounds=40, settle=30, **options).utilisation > 0.97


def test_drift_is_followed_by_dispatch() -> None:
    drifting = but(FREE, drift=1.0)
    found = {name: play(name, drifting, rounds=60, settle=30, mega_batch=8192) for name in ("local", "static")}
    assert found["local"].utilisation > 0.97 > 0.95 > found["static"].utilisation


def test_the_merge_period_follows_the_measured_share() -> None:
    slow = but(FREE, exchange_overhead="100ms")
    found = play("local", slow, mega_batch=1024, merge_period="auto", merge_share=0.05)
    assert found.communication_share == pytest.approx(0.05, abs=0.01)


# Links


def links(ranks: int, per_host: int, gbit: float = 1.0) -> Links:
    return Links(
        world_size=ranks, ranks_per_host=per_host, bandwidth=gbit * 1e9 / 8, latency_s=50e-6, host_bandwidth=1e10,
        host_latency_s=1e-6,
    )  # fmt: skip


def test_two_hosts_on_a_gigabit_as_measured_there() -> None:
    # 100 MB over 1 Gbit/s of namespaces, of which TCP leaves 940 Mbit/s: measured 0.845 s, 0.45 s (fp16), 0.113 s (4 bits).
    two, count = links(2, 1, gbit=0.94), 25_000_000
    assert two.allreduce_s(4 * count) == pytest.approx(0.85, rel=0.02)
    assert two.allreduce_s(2 * count) == pytest.approx(0.43, rel=0.05)
    assert two.sra_s(parse_codec("maxmin:4"), count) == pytest.approx(0.11, rel=0.05)


def test_a_hosts_ranks_share_its_link_where_all_send_to_all() -> None:
    codec, count = parse_codec("maxmin:4"), 25_000_000
    assert links(16, 4).sra_s(codec, count) > 3 * links(4, 1).sra_s(codec, count)
    assert links(16, 4).hierarchical_s(codec, count) < 1.1 * links(4, 1).sra_s(codec, count)
    assert links(1, 1).allreduce_s(1e8) == links(1, 1).sra_s(codec, count) == 0
    assert links(4, 4).allreduce_s(1e8) < 0.1 * links(4, 1).allreduce_s(1e8)


@pytest.mark.parametrize("spec", ["none", "fp16", "maxmin:4", "normal:2", "topk:0.01"])
@pytest.mark.parametrize("count", [1, 1000, 1_000_003])
def test_payloads_are_those_of_the_codec_piece_by_piece(spec: str, count: int) -> None:
    codec = parse_codec(spec)
    whole = Links.payload_bytes(codec, count, 1)
    assert whole == codec.payload_bytes(count)
    assert whole <= Links.payload_bytes(codec, count, 64) <= whole + 64 * 16 + 64 * codec.payload_bytes(1)


def test_encoded_values_go_by_host_where_they_would_in_a_run() -> None:
    # Many ranks of a host on a slow link; 3 and 2 ranks of two hosts; one rank a host.
    codec = parse_codec("maxmin:4")

    def exchange_s(ranks: int, per_host: int, reducer: str) -> float:
        cluster = described_cluster(ClusterConfig(ranks_per_host=per_host, link="1gbit", host_link="100GB/s"), ranks)
        return cluster.exchange_s(1e8, codec, reducer)

    assert exchange_s(32, 8, "by-host") == exchange_s(32, 8, "hierarchical") < 0.5 * exchange_s(32, 8, "sra")
    assert exchange_s(5, 3, "by-host") == exchange_s(5, 3, "sra")
    with pytest.raises(ValueError, match="same number of ranks on every host, got 5 ranks, 3 a host; use 'sra'"):
        exchange_s(5, 3, "hierarchical")
    for ranks, per_host in ((4, 1), (4, 4), (3, 8)):
        assert len({exchange_s(ranks, per_host, reducer) for reducer in ("by-host", "hierarchical", "sra")}) == 1
    for ranks, per_host in ((32, 8), (5, 3), (8, 1), (65, 8)):
        hosts = [f"host {rank // per_host}" for rank in range(ranks)]
        assert links(ranks, per_host).sums_by_host("by-host") == has_equal_hosts(hosts)


def test_what_ranks_send_by_host_is_counted() -> None:
    # 2 hosts of 2 ranks: half the values in fp32 to the neighbour, half of the code to the other host, and both hosts' codes of
    # this half to the neighbour.
    codec, count = parse_codec("maxmin:4"), 1 << 20
    code = Links.payload_bytes(codec, count, 4)
    assert links(4, 2).sent_bytes(codec, count, "by-host") == 4 * count / 2 + code / 2 + code
    assert links(4, 2).sent_bytes(codec, count, "sra") == links(4, 1).sent_bytes(codec, count, "by-host") == 2 * 3 / 4 * code
    assert links(4, 2).sent_bytes(None, count, "by-host") == 2 * 3 / 4 * 4 * count
    shared = ClusterConfig(ranks_per_host=8, link="1gbit", host_link="100GB/s")
    sra = play("sync", shared, ranks=32, rounds=2, settle=1, compression="maxmin:4", reducer="sra")
    assert sra.sent_mb_per_s / sra.steps_per_s < 0.2 * 2 * 100


# What always holds


@st.composite
def clusters(draw: Any) -> ClusterConfig:
    return ClusterConfig(
        speeds=",".join(map(str, draw(st.lists(st.floats(0.2, 5), min_size=1, max_size=5)))),
        step_overhead=f"{draw(st.floats(0, 5))}ms",
        jitter=draw(st.floats(0, 0.5)),
        drift=draw(st.floats(0, 0.5)),
        link=f"{draw(st.floats(0.1, 100))}gbit",
        ranks_per_host=draw(st.integers(1, 4)),
        overlap=draw(st.floats(0, 1)),
        store_operation=f"{draw(st.floats(0, 200))}us",
        first_batch=f"{draw(st.floats(0, 5))}ms",
    )


@settings(max_examples=40, deadline=None)
@given(cluster=clusters(), ranks=st.integers(1, 9), name=st.sampled_from(NAMES), seed=st.integers(0, 1000))
def test_every_second_and_every_sample_of_every_rank_is_accounted_for(
    cluster: ClusterConfig, ranks: int, name: str, seed: int
) -> None:
    config = strategy_config(name, {"batch_size": 16, "mega_batch": 1000, "seed": seed})
    rounds = simulate(config, described_cluster(cluster, ranks), num_rounds=4, dataset_size=2500)
    before_s, before = 0.0, 0
    for done in rounds:
        seconds = sum(done.stats[part] for part in ("busy_s", "claim_s", "wait_s", "control_s", "merge_s"))
        assert seconds == pytest.approx(np.full(ranks, done.train_s - before_s))
        assert min(done.stats[part].min() for part in ("busy_s", "claim_s", "wait_s")) >= 0
        computed = done.stats["num_samples"].sum()
        # Plain Horovod pads the last batch of an epoch.
        is_padded = name == "horovod" and done.num_samples % 2500 == 0
        assert computed == done.num_samples - before or (is_padded and computed > done.num_samples - before)
        before_s, before = done.train_s, done.num_samples
    if name not in ("sync", "static", "horovod"):
        # An epoch is cut evenly.
        assert [r.num_samples for r in rounds] == [1250, 2500, 3750, 5000] and rounds[1].epoch == 1
    again = simulate(config, described_cluster(cluster, ranks), num_rounds=4, dataset_size=2500)
    assert [r.train_s for r in again] == [r.train_s for r in rounds]


def test_another_seed_draws_other_times() -> None:
    described = described_cluster(ClusterConfig(), 4)
    times = {simulate(Config(seed=seed), described, num_rounds=3)[-1].train_s for seed in range(3)}
    assert len(times) == 3


def test_jitter_has_the_mean_and_spread_that_it_says() -> None:
    cluster = described_cluster(but(FREE, speeds="1", jitter=0.3), 1)
    steps = StepTimes(cluster, Slowdown(None, world_size=1), seed=0)
    steps.begin_round(0.0, 0.0)
    seconds = np.array([steps.one(0, 1000) for _ in range(20_000)])
    assert seconds.mean() == pytest.approx(1, rel=0.01) and seconds.std() == pytest.approx(0.3, rel=0.05)


def test_a_virtual_rank_claims_what_a_real_one_does() -> None:
    config = Config(batch_size=16, mega_batch=300)
    model = nn.Linear(1, 1)
    session = Session(model, optim.SGD(model.parameters(), lr=0.1), config, transport=LocalTransport())
    sizes = []
    for batch in session.batches(TensorDataset(zeros(900, 1), zeros(900, 1)), num_epochs=1):
        with session.step(batch):
            pass
        sizes.append(batch.num_samples)
    session.close()
    rule = ClaimRule.of_round(
        0, batch_sizes=np.array([16.0]), speed_shares=np.ones(1), work_per_sample=1.0, dynamic=True
    )
    cluster = described_cluster(FREE, 1)
    drawn: list[int] = []

    class Watched(StepTimes):
        def one(self, rank: int, num_samples: int) -> float:
            drawn.append(num_samples)
            return 1.0

    steps = Watched(cluster, Slowdown(None, world_size=1), seed=0)
    for _ in range(3):
        play_claims(0.0, [Cursor(0, 300)], [rule], steps, total_work=300, first_batch_s=0.0)
    assert sizes == drawn


def test_a_virtual_rank_does_not_wait_for_what_others_have_not_claimed() -> None:
    # A round of less than two batches: the first rank's fair part is a half, as the other one holds nothing yet. Then it is half
    # of what is left and of what is under way.
    cluster, rules = described_cluster(but(FREE, speeds="1"), 2), [
        ClaimRule.of_round(
            rank, batch_sizes=np.full(2, 64.0), speed_shares=np.full(2, 0.5), work_per_sample=1.0, dynamic=True
        )
        for rank in range(2)
    ]  # fmt: skip
    drawn: list[int] = []

    class Watched(StepTimes):
        def one(self, rank: int, num_samples: int) -> float:
            drawn.append(num_samples)
            return super().one(rank, num_samples)

    steps, cursor = Watched(cluster, Slowdown(None, world_size=2), seed=0), Cursor(0, 100)
    steps.begin_round(0.0, 0.0)
    play_claims(0.0, [cursor, cursor], rules, steps, total_work=100, first_batch_s=0.0)
    assert drawn[:2] == [50, 41] and sum(drawn) == 100


# Numbers as people write them


def test_units() -> None:
    assert parse_seconds("x", "50us") == pytest.approx(5e-5) and parse_seconds("x", "1.5 ms") == 0.0015
    assert parse_rate("x", "1gbit") == 125e6 and parse_rate("x", "2GB/s") == 2e9 == parse_rate("x", "2 gB/s")
    assert parse_ranks("2..64") == [2, 4, 8, 16, 32, 64] and parse_ranks("3,5") == [3, 5]
    assert parse_ranks("3..20") == [3, 6, 12, 20] and parse_ranks("4..4") == [4]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ClusterConfig(latency="50"), "latency must be a number and one of s, ms, us, ns, as in 5s, got '50'"),
        (lambda: ClusterConfig(link="0gbit"), "link must be > 0, got '0gbit'"),
        (lambda: ClusterConfig(link="10Gb/s"), "link must say bits or bytes, got '10Gb/s': write 10gbit or 10GB/s"),
        (lambda: ClusterConfig(host_link="9 kb/s "), "host_link must say bits or bytes, got '9 kb/s ': write 9kbit or 9kB/s"),
        (lambda: ClusterConfig(link="10 Tb/s"), "link must be a number and one of kbit, mbit, gbit, kB/s, MB/s, GB/s"),
        (lambda: ClusterConfig(speeds="1,-2"), "speeds must be numbers > 0"),
        (lambda: ClusterConfig(ranks="8..2"), "a range must rise, got '8..2'"),
        (lambda: ClusterConfig(overlap=1.5), r"overlap must be in \[0, 1\], got 1.5"),
        (lambda: SweepConfig(strategies="local,foo"), "strategies must be of .*, got 'foo'"),
        (lambda: SweepConfig(rounds=4, settle=4), "settle must be < rounds, got 4 of 4"),
        (lambda: play("local", FREE, compression="powersgd:4"), "compression must not be powersgd here"),
        (lambda: play("local", FREE, compression="maxmin:4; in*=none"), "compression must be one codec"),
        (lambda: play("local", FREE, compression="maxmin:4", reducer="allreduce"), "linear codec"),
        (lambda: play("local", FREE, slowdown="1,2"), "slowdown must have one factor a rank"),
    ],
)  # fmt: skip
def test_bad_descriptions_are_named(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_few_ranks_are_like_the_whole_list() -> None:
    speeds = 1000 * described_cluster(FREE, 2).per_sample_s
    assert speeds == pytest.approx([1, 0.25])
    assert 1000 * described_cluster(FREE, 6).per_sample_s == pytest.approx([1, 1, 0.5, 0.25, 1, 1])


def test_a_strategy_takes_the_options_that_mean_something_to_it() -> None:
    shared = {"batch_size": 32, "merge_period": "auto"}
    assert strategy_config("local", shared).merge_period == "auto"
    assert strategy_config("horovod", {"compression": "maxmin:4"}).compression == "auto"
    assert strategy_config("horovod", shared).merge_period is None and strategy_config("horovod", shared).batch_size == 32


# From a calibration



def rank(per_work_s: float, together: float, slowdown: float) -> dict[str, Any]:
    return {
        "host": "alpha", "device": "cpu", "threads": 1, "fixed_s": 0.001, "per_work_s": per_work_s, "fit_error": 0.0,
        "jitter": 0.0, "alone": 1.0, "together": together, "slowdown": slowdown, "memory": "not measured", "batch_size": [32],
        "step_work": [32.0], "step_s": [0.001 + 32 * per_work_s],
    }  # fmt: skip


MEASURED: dict[str, Any] = {
    "batch_size": 32,
    "mega_batch": 6400,
    "slowdown": "1,2",
    "epochs": 3.0,
    "calibration": {
        "format": 1,
        "created": "2026-11-21T16:40:12+00:00",
        "num_samples": 12800,
        "work": "samples",
        "work_per_sample": 1.0,
        "model_bytes": 4_000_000,
        "claim_s": 1e-4,
        "claim_p99_s": 2e-4,
        "versions": {},
        "ranks": [rank(1e-4, 0.9, 1.0), rank(2e-4, 1.25, 2.0)],
        "link": {"num_hosts": 1, "latency_s": 0.001, "per_byte_s": 1e-9, "fit_error": 0.0, "bytes": [4096], "seconds": [0.001]},
        "merge": {
            "mega_batch": [3200, 6400],
            "payload_bytes": [1_000_000, 2_000_000],
            "merge_s": [0.004, 0.005],
            "control_s": [0.0005, 0.0007],
            "wait_s": [0.0, 0.0],
            "round_s": [0.3, 0.6],
            "local_s": 0.002,
        },
        "sync": {"step_s": [0.008, 0.008], "lengthened": [1.2, 1.5], "exchange_s": 0.004},
        "horovod": {"step_s": [0.004, 0.018], "lengthened": [1.0, 1.25], "exchange_s": 0.003},
        "predicted": {"samples_per_s": 1000.0},
    },
}  # fmt: skip


def test_a_calibrated_cluster_has_the_measured_seconds() -> None:
    calibration = read_table(MEASURED["calibration"], "c.toml")
    cluster = measured_cluster(calibration, ClusterConfig(), 2, strategy="local", mega_batch=4800)
    assert cluster.fixed_s == pytest.approx([0.0009, 0.001]) and cluster.per_sample_s == pytest.approx([0.9e-4, 2e-4])
    # Alone, a rank is not slowed by the others.
    assert cluster.own_speeds(32) == pytest.approx([32 / 0.00378, 32 / 0.0074])
    assert cluster.exchange_s(2e6, None, "sra") == pytest.approx(0.001 + 2e6 * 1e-9)
    assert cluster.own_merge_s == 0.002 and cluster.control_s == pytest.approx(0.0006) and cluster.model_bytes == 1_500_000
    assert 2 * cluster.claim_trip_s + cluster.claim_service_s == pytest.approx(1e-4)
    more = measured_cluster(calibration, ClusterConfig(latency="1ms"), 64, strategy="local", mega_batch=4800)
    assert more.control_s > 0.01 and more.own_speeds(32).shape == (64,) and more.links.num_hosts == 32


def test_steps_that_all_make_together_take_what_was_measured_of_them() -> None:
    calibration = read_table(MEASURED["calibration"], "c.toml")
    kind = {"strategy": "sync", "mega_batch": 4800}
    sync = measured_cluster(calibration, ClusterConfig(), 2, **kind)
    # Rank 1 is lengthened by a quarter by rank 0, which computes as long as it does: the rest is its own. Its step was emulated
    # twice as long.
    added_s = [0.008 - 0.008 / 1.2, (0.008 / 1.25 - 0.008 / 1.5) / 2]
    assert sync.fixed_s == pytest.approx([0.001 + added_s[0], 0.001 + added_s[1]])
    assert sync.per_sample_s == pytest.approx([1e-4, 2e-4]) and sync.contention == pytest.approx([0.0, 0.25])
    horovod = measured_cluster(calibration, ClusterConfig(), 2, **{**kind, "strategy": "horovod"})
    # Here rank 0 computes for only 4 ms of rank 1's 18.
    assert horovod.fixed_s == pytest.approx([0.001, 0.001 + (0.018 / (1 + 0.25 * 4 / 18) - 0.018 / 1.25) / 2])
    exchange_s = sync.exchange_s(sync.gradient_bytes, None, "")
    assert sync.exposed_s(exchange_s, 0.1, encoded=False) == pytest.approx(0.004)
    assert horovod.exposed_s(exchange_s, 0.1, encoded=False) == pytest.approx(0.003)
    assert sync.exposed_s(0.02, 0.01, encoded=True) == pytest.approx(0.02 - 0.5 * 0.01)
    more = measured_cluster(calibration, ClusterConfig(), 64, **kind)
    added_s = more.exchange_s(more.gradient_bytes, None, "") - exchange_s
    assert more.exposed_s(exchange_s + added_s, 0.0, encoded=False) == pytest.approx(0.004 + added_s)
    # Of what more ranks add, a part is beside the step.
    step_s = 2 * exchange_s + added_s
    assert more.exposed_s(exchange_s + added_s, step_s, encoded=False) == pytest.approx(0.004 + added_s / 2)
    assert more.exposed_s(exchange_s + added_s, 0.1, encoded=False) == pytest.approx(0.004)
    given = measured_cluster(calibration, ClusterConfig(gradient_mb=1.0), 2, **kind)
    assert given.exposed_s(0.02, 0.01, encoded=False) == pytest.approx(0.015)


def test_one_measured_rank_says_nothing_of_a_link() -> None:
    table = {**MEASURED["calibration"], "ranks": [rank(1e-4, 1.0, 1.0)]}
    table["sync"] = {"step_s": [0.008], "lengthened": [1.2], "exchange_s": 0.0}
    table["link"] = {**table["link"], "latency_s": 5e-5, "per_byte_s": 0.0}
    calibration, described = read_table(table, "c.toml"), ClusterConfig(exchange_overhead="3ms")
    cluster = measured_cluster(calibration, described, 8, strategy="sync", mega_batch=4800)
    plain = described_cluster(described, 8)
    assert cluster.exchange_s(4e6, None, "") == plain.exchange_s(4e6, None, "") > 0.003
    assert cluster.exposed_s(0.02, 0.01, encoded=False) == pytest.approx(0.015)
    assert cluster.claim_trip_s == plain.claim_trip_s > 0.9e-4
    assert "exchange_overhead" not in without_effect(calibration, described)
    assert "exchange_overhead" in without_effect(read_table(MEASURED["calibration"], "c.toml"), described)


def test_ranks_lengthen_steps_of_others_while_they_compute() -> None:
    table = {**MEASURED["calibration"], "ranks": [rank(1e-4, 1.5, 1.0), rank(1e-4, 1.25, 2.0), rank(1e-4, 1.2, 4.0)]}
    table["ranks"][2]["host"] = "beta"
    cluster = measured_cluster(read_table(table, "c.toml"), ClusterConfig(), 3, strategy="local", mega_batch=4800)
    # Rank 0 was lengthened by half while rank 1 computed half of the time; rank 2 is alone on its host.
    assert cluster.contention == pytest.approx([1.0, 0.25, 0.0])
    assert cluster.fixed_s == pytest.approx([0.001, 0.001, 0.0012])
    cluster = dataclasses.replace(cluster, links=dataclasses.replace(cluster.links, ranks_per_host=2))

    def begun(slowdown: str) -> StepTimes:
        steps = StepTimes(cluster, Slowdown(slowdown, world_size=3), seed=0)
        steps.begin_round(0.0, 0.0)
        return steps

    steps = begun("1,4,1")
    assert [steps.one(0, 90), steps.one(1, 90)] == pytest.approx([0.01 * 1.25, 0.04 * 1.25])
    assert steps.one(2, 90) == pytest.approx(0.012)
    steps.leave(1)
    assert steps.one(0, 90) == pytest.approx(0.01)
    # Steps that begin together: rank 1 is lengthened only while rank 0 still computes.
    first, second, _ = begun("1,2,1").all(np.array([40.0, 90.0, 90.0]))
    assert first == pytest.approx(0.005 * 1.5)
    assert second == pytest.approx(0.02 * (1 + 0.25 * first / second), rel=1e-3)
    assert begun("1,2,1").all(np.array([0.0, 90.0, 90.0])) == pytest.approx([0.0, 0.02, 0.012])


# The command


def test_the_command_prints_a_table_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    png = tmp_path / "s.png"
    options = ["--ranks", "2,8", "--strategies", "local,horovod", "--rounds", "4", "--settle", "2"]
    assert main(["simulate", *options, "--png", str(png)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Simulated: speeds 1,1,2,4, 100 MB, 4 ranks a host, 10gbit"
    assert lines[1].split()[:3] == ["ranks", "strategy", "samples/s"]
    assert [line.split()[:2] for line in lines[2:] if line] == [
        ["2", "local"], ["2", "horovod"], ["8", "local"], ["8", "horovod"]
    ]  # fmt: skip
    assert png.read_bytes().startswith(b"\x89PNG")
    assert main(["simulate", *options, "--json", "--png", str(png)]) == 0
    said = capsys.readouterr()
    assert len(json.loads(said.out)) == 4 and said.err == f"picture: {png}\n"


def test_options_come_from_files_and_the_command_line_wins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster, measured = tmp_path / "cluster.toml", tmp_path / "measured.json"
    cluster.write_text('ranks = "4"\nlatency = "1ms"\nbatch-size = 16\nstrategies = "local"\nrounds = 4\nsettle = 2\n')
    measured.write_text(json.dumps(MEASURED))

    def rows(*arguments: str) -> list[dict[str, Any]]:
        assert main(["simulate", "--json", *arguments]) == 0
        found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
        return found

    (described,) = rows("--config", str(cluster))
    assert described["ranks"] == 4 and described["strategy"] == "local"
    assert rows("--config", str(cluster), "--ranks", "2")[0]["ranks"] == 2
    (calibrated,) = rows("--calibration", str(measured), "--strategies", "local")
    # Two ranks of 32 samples in 3.78 ms and, slowed twice and by the other, in 18.5 ms.
    assert calibrated["ranks"] == 2 and calibrated["samples_per_s"] == pytest.approx(32 / 0.00378 + 32 / 0.0185, rel=0.05)
    # Further ranks repeat the measured ones, their slowdown too.
    alike, more = rows("--calibration", str(measured), "--strategies", "local", "--ranks", "2,4")
    assert alike == calibrated and more["samples_per_s"] > 1.5 * alike["samples_per_s"]
    # The smallest batch that calibrate recommends is for local steps; one that is given is for all.
    by_rule = ("--calibration", str(measured), "--strategies", "sync", "--slowdown", "1,8")
    (free,) = rows(*by_rule)
    measured.write_text(json.dumps({**MEASURED, "min_batch_size": 32}))
    assert rows(*by_rule) == [free] and rows(*by_rule, "--min-batch-size", "32")[0]["wait_share"] > 2 * free["wait_share"]
    # Of micro-batches any number fits into memory, so memory sets no bound on the batch.
    short = {**MEASURED["calibration"], "ranks": [{**one, "largest_batch": 8} for one in MEASURED["calibration"]["ranks"]]}
    sizes = {"min_batch_size": 32, "max_batch_size": 32, "micro_batch_size": 4}
    measured.write_text(json.dumps({**MEASURED, **sizes, "calibration": short}))
    assert rows(*by_rule) == [free] and rows("--calibration", str(measured), "--strategies", "local") == [calibrated]


def test_a_measured_period_is_that_of_the_measured_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measured, described = tmp_path / "measured.json", tmp_path / "c.toml"
    measured.write_text(json.dumps({**MEASURED, "slowdown": None}))
    described.write_text("local_steps = 5\n")

    def merges(*arguments: str) -> int:
        """Samples a rank between two merges."""
        options = ["--strategies", "local", "--dataset-size", str(10**9), "--rounds", "2", "--settle", "0"]
        assert main(["simulate", "--json", "--calibration", str(measured), *options, *arguments]) == 0
        (found,) = json.loads(capsys.readouterr().out)
        return round(found["samples_per_s"] / found["rounds_per_s"] / found["ranks"])

    assert merges() == merges("--ranks", "8") == 3200
    assert merges("--mega-batch", "640") == 320 and merges("--mega-batch", "640", "--ranks", "8") == 80
    assert merges("--local-steps", "10") == 320 and merges("--config", str(described), "--ranks", "8") == 160
    command = ["simulate", "--calibration", str(measured), "--config", str(described), "--mega-batch", "640"]
    assert main(command) == 2
    assert "local_steps 5 would have no effect with mega_batch: leave one out (local_steps is from" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--link", "fast"], "link must be a number and one of"),
        (["--ranks", "2", "--slowdown", "1,2,3"], "slowdown must have one factor a rank: 2 ranks, got 3"),
        (["--config", "missing.toml"], "--config missing.toml: cannot be read"),
        (["--ranks", "2", "--png", "/nowhere/s.png"], "--png /nowhere/s.png: /nowhere is not there"),
        (["--ranks", "65536", "--rounds", "9999", "--png", "/proc/s.png"], "--png /proc/s.png: cannot be written: "),
        (["--calibration", "cluster.json"], "--calibration cluster.json: has no table 'calibration'; write one with"),
    ],
)
def test_errors_are_one_line(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("cluster.json").write_text('{"batch_size": 16}')
    assert main(["simulate", "--strategies", "local", "--rounds", "2", "--settle", "0", *arguments]) == 2
    assert f"hvd-adaptive: error: {message}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "in_file", "message"),
    [
        (["--speeds", "1,2"], "", "speeds 1,2 would have no effect with --calibration c.json, which measured it: leave one out"),
        (["--samples-per-s", "9"], "", "samples_per_s 9.0 would have no effect with --calibration c.json, which measured it"),
        (["--ranks", "2..8", "--host-link", "1GB/s"], "", "host_link 1GB/s would have no effect with --calibration c.json"),
        (["--link", "1gbit"], "", "link 1gbit would have no effect with --calibration c.json, whose 2 ranks are on one host"),
        ([], "model_mb = 9\n", "which measured it: leave one out (model_mb is from --config c.toml)"),
        (["--ranks", "4", "--slowdown", "1,1,2,2", "--link", "1gbit", "--latency", "1ms", "--drift", "0.1"], "", ""),
    ],
)
def test_a_description_of_what_was_measured_is_refused(
    options: list[str], in_file: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("c.json").write_text(json.dumps(MEASURED))
    Path("c.toml").write_text(in_file)
    command = ["simulate", "--calibration", "c.json", "--config", "c.toml", "--strategies", "local"]
    assert main([*command, "--rounds", "2", "--settle", "0", *options]) == (2 if message else 0)
    assert message in capsys.readouterr().err


def test_an_error_says_that_a_bound_is_from_the_calibration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("c.json").write_text(json.dumps({**MEASURED, "min_batch_size": 16}))
    command = ["simulate", "--calibration", "c.json", "--strategies", "local", "--batch-size", "8", "--max-batch-size", "8"]
    assert main(command) == 2
    assert "got 16 > 8 (min_batch_size is from --calibration c.json)" in capsys.readouterr().err


def test_an_unknown_name_in_a_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "c.toml"
    file.write_text('epochs = 3\n')
    assert main(["simulate", "--config", str(file)]) == 2
    assert "unknown option 'epochs'; options are" in capsys.readouterr().err


def test_the_commands_of_the_documentation_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (Path(__file__).parents[2] / "docs" / "simulate.md").read_text()
    monkeypatch.chdir(tmp_path)
    Path("calibration.toml").write_text(to_toml(MEASURED))
    Path("cluster.toml").write_text("\n".join(re.findall(r"^    (\w+ = .*)$", text, flags=re.M)))
    commands = [shlex.split(line, comments=True)[1:] for line in re.findall(r"^(hvd-adaptive simulate.*)$", text, flags=re.M)]
    commands.append(["simulate", "--config", "cluster.toml"])
    assert len(commands) == 4
    for command in commands:
        # As they stand they take a minute together.
        sizes = ["--ranks", "2"] if "--calibration" in command else ["--ranks", "2,8"]
        assert main([*command, *sizes, "--rounds", "3", "--settle", "1"]) == 0, command
        assert "horovod" in capsys.readouterr().out
    assert Path("gain.png").exists()


def test_a_thousand_ranks_take_seconds_not_minutes() -> None:
    (found,) = sweep(SweepConfig(strategies="local", rounds=2, settle=1), ClusterConfig(ranks="1024"), {})
    assert found.ranks == 1024 and 0 < found.utilisation < 1

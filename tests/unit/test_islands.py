"""Islands without ranks: which ranks they are, their parts of a batch, their statistics, and claims that each of them hears."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_adaptive.algorithm.islands import Islands, own_part
from hvd_adaptive.algorithm.micro_batches import micro_batches, stand_in
from hvd_adaptive.cli.calibrate_options import check_calibrate
from hvd_adaptive.combinations import check_elastic
from hvd_adaptive.comm.in_process_store import InProcessStore
from hvd_adaptive.config import Config
from hvd_adaptive.engine.claims import Claim, IslandClaims, SharedCursor


@pytest.mark.parametrize(
    ("option", "hosts", "of_rank"),
    [
        ("node", "aabb", [0, 0, 1, 1]),
        ("node", "abab", [0, 1, 0, 1]),
        ("2", "aaaa", [0, 0, 1, 1]),
        ("4", "aaaa", [0, 0, 0, 0]),
        ("1", "ab", [0, 1]),
        ("1,3", "aaaa", [0, 1, 1, 1]),
    ],
)
def test_islands_are_those_of_the_option(option: str, hosts: str, of_rank: list[int]) -> None:
    islands = Islands.of(option, hosts)
    assert islands.of_rank.tolist() == of_rank
    assert islands.leaders == [of_rank.index(island) for island in range(max(of_rank) + 1)]
    assert islands.sizes.sum() == len(hosts)


@pytest.mark.parametrize(
    ("option", "words"),
    [("3", ["got 3 and 4 ranks", "choose 2 or 4"]), ("1,2", ["3 of 4 ranks"]), ("2,3", ["5 of 4 ranks"])],
)
def test_ranks_that_cannot_be_divided_so_are_told_how(option: str, words: list[str]) -> None:
    with pytest.raises(ValueError, match="island must") as found:
        Islands.of(option, "aabb")
    assert all(word in str(found.value) for word in words)


@pytest.mark.parametrize("option", ["", "0", "-1", "2,0", "two", "node,2", "1.5"])
def test_what_names_no_islands_is_refused(option: str) -> None:
    with pytest.raises(ValueError, match="island must be 'node', a number"):
        Config(island=option)


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "sync"}, {"strategy": "horovod"}, {"logical_ranks": 2},
        {"work": "nonzeros"}, {"merge_weights": "fisher-rows"}, {"record": True}, {"reference_ranks": 4},
        {"compression": "maxmin:4", "reducer": "hierarchical"},
    ],
)  # fmt: skip
def test_options_that_islands_do_not_have_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="island '2' needs"):
        Config(island="2", **options)


def test_commands_that_measure_ranks_or_change_them_refuse_islands() -> None:
    config = Config(island="node")
    with pytest.raises(ValueError, match="leave --island node out"):
        check_calibrate(config, "calibration.toml", 1.0)
    with pytest.raises(ValueError, match="island 'node' takes the ranks as they are"):
        check_elastic(config)


def num_passes(num_samples: int, unit: int) -> int:
    rows = np.arange(max(1, num_samples))
    return len(micro_batches(rows, unit) if num_samples else stand_in(rows, unit))


@given(st.integers(1, 300), st.integers(1, 9), st.integers(1, 9), st.integers(1, 2))
def test_the_parts_of_a_batch_make_it_up(num_samples: int, size: int, unit: int, smallest: int) -> None:
    parts = [own_part(num_samples, member=m, size=size, unit=unit, smallest=smallest) for m in range(size)]
    assert [row for start, stop in parts for row in range(start, stop)] == list(range(num_samples))
    lengths = [stop - start for start, stop in parts]
    assert lengths[0] > 0 or (size > 1 and num_samples < unit)
    if unit > 1:
        reads = [num_passes(length, unit) for length in lengths]
        assert reads[0] == min(reads), "others would wait for claims that the first rank makes after this step only"
        whole = [length for (_, stop), length in zip(parts, lengths, strict=True) if stop < num_samples]
        assert all(length % unit == 0 for length in whole)
    elif num_samples >= smallest:
        assert min(length for length in lengths if length) >= smallest
    if unit == 1 and num_samples >= size * smallest:
        assert max(lengths) - min(lengths) <= 1


def test_an_island_is_as_slow_as_its_slowest_rank_and_broken_with_any() -> None:
    islands = Islands.of("1,3", "aaaa")
    gathered = {
        "num_samples": np.array([8.0, 3.0, 3.0, 2.0]),
        "busy_s": np.array([1.0, 2.0, 5.0, 3.0]),
        "work": np.array([8.0, 8.0, 8.0, 8.0]),
        "finite": np.array([1.0, 1.0, 0.0, 1.0]),
        "stop": np.array([0.0, 0.0, 0.0, 1.0]),
    }
    found = {name: values.tolist() for name, values in islands.combine(gathered).items()}
    assert found == {"num_samples": [8, 8], "busy_s": [1, 5], "work": [8, 8], "finite": [1, 0], "stop": [0, 1]}


@pytest.mark.parametrize("closer", [None, 0, 2])
def test_all_ranks_of_an_island_hear_the_same_claims(closer: int | None) -> None:
    """Also where one of them, whichever, closes the cursor."""
    store = InProcessStore()
    heard: list[list[Claim]] = [[] for _ in range(3)]
    ends: list[int | None] = [0] * 3
    many: list[IslandClaims] = []

    def claim_all(rank: int, claims: IslandClaims) -> None:
        # Only the first rank's size counts.
        while (claim := claims.claim(lambda remaining: min(remaining, 7 if rank == 0 else 5))) is not None:
            heard[rank].append(claim)
            if rank == closer and len(heard[rank]) == 4:
                claims.close()
        ends[rank] = claims.end

    for rank in range(3):
        many.append(IslandClaims(SharedCursor(store, "cursor", total_work=100), store, "island.0.0", leads=rank == 0))
    threads = [threading.Thread(target=claim_all, args=(rank, claims)) for rank, claims in enumerate(many)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert heard[0] == heard[1] == heard[2] and len(set(ends)) == 1
    edges = [0, *(stop for _, stop in heard[0])]
    assert [start for start, _ in heard[0]] == edges[:-1]
    if closer is None:
        assert edges[-1] == 100 and ends[0] is None
    else:
        assert edges[-1] == (100 if ends[0] is None else ends[0])
    many[0].forget()
    assert not [key for key in store._values if key.startswith("island")]

"""Nested state survives flattening, a file, and unflattening; what cannot be saved is named."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from hvd_adaptive.state import checkpoint
from hvd_adaptive.state.nested import flatten_state, unflatten_state
from hvd_adaptive.state.random_state import random_state, seeded_random_state, set_random_state

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]
CPU = torch.device("cpu")


def make_state(generator: random.Random, depth: int = 0) -> Any:
    kind = generator.randrange(9 if depth < 4 else 6)
    if kind == 0:
        return generator.choice([None, True, False, 0, -3, 1 << 70, "", "a.b", "\ud800 $", "näher"])
    if kind == 1:
        return generator.choice([0.1, -0.0, 5e-324, math.inf, -math.inf, math.nan, 1e300])
    if kind in (2, 3):
        shape = [generator.randrange(4) for _ in range(generator.randrange(4))]
        tensor = torch.randint(0, 2, shape).to(generator.choice([*DTYPES, torch.complex64, torch.complex128]))
        return tensor.t() if tensor.dim() == 2 else tensor
    if kind in (4, 5):
        dtype = generator.choice(["<f8", ">f4", "u4", "i2", "?", "f2"])
        return np.arange(12).astype(dtype).reshape(3, 4)[:: generator.choice([1, 2]), 1:]
    children = [make_state(generator, depth + 1) for _ in range(generator.randrange(4))]
    if kind == 6:
        return children
    if kind == 7:
        return tuple(children)
    keys = generator.sample(["a", "b", "a.b", "$", "kind", "__metadata__", 0, 7, (1, 2), None, 0.5], len(children))
    return dict(zip(keys, children, strict=True))


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype.newbyteorder("=") == b.dtype.newbyteorder("=") and np.array_equal(a, b)
    if isinstance(a, float):
        return isinstance(b, float) and (
            (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
        )
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return type(a) is type(b) and a == b


@pytest.mark.parametrize("seed", range(20))
def test_any_state_comes_back_as_it_was(seed: int, tmp_path: Path) -> None:
    generator = random.Random(seed)
    for number in range(5):
        # At the top a dict, as every state is; "__metadata__" there is a name that the file format has taken.
        state = {"__metadata__": torch.ones(2), "state": make_state(generator)}
        path = tmp_path / f"{number}.safetensors"
        skeleton, tensors = flatten_state(state)
        assert equal(unflatten_state(skeleton, tensors), state)
        written = checkpoint.write_state(path, skeleton, tensors)
        assert equal(checkpoint.read_state(path), state)
        assert written == checkpoint.measure_file(path) and written.num_bytes == path.stat().st_size
        # Any reader of the format can read it.
        assert load_file(path).keys() == tensors.keys()


def test_a_commit_comes_back_whole_or_not_at_all(tmp_path: Path) -> None:
    state = {"model": torch.arange(6.0).view(2, 3), "epoch": 3}
    for number in (1, 2, 2):
        checkpoint.write_commit(tmp_path / "new", number, *flatten_state(state), world_size=2)
    first, second = sorted((tmp_path / "new").iterdir())
    assert [path.name for path in (first, second)] == ["commit-00000001", "commit-00000002"]
    assert equal(checkpoint.read_commit(second), state)
    data = bytearray((second / "global.safetensors").read_bytes())
    data[-1] ^= 1
    (second / "global.safetensors").write_bytes(data)
    (first / "MANIFEST.json").unlink()
    old = tmp_path / "new" / "commit-00000003.safetensors"
    old.write_bytes(data)
    for path, reason in ((second, "is damaged: its"), (first, "MANIFEST.json cannot be"), (old, "by an older version")):
        with pytest.raises(checkpoint.RefusedError, match=reason):
            checkpoint.read_commit(path)
    checkpoint.prune(tmp_path / "new", 0, "commit")
    assert not list((tmp_path / "new").iterdir())
    # What cannot be written leaves nothing behind.
    with pytest.raises(TypeError, match="no dtype"):
        checkpoint.write_commit(tmp_path, 1, {}, {"x": torch.zeros(1, dtype=torch.complex64)}, world_size=1)
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


def test_flattening_copies() -> None:
    state = {"tensor": torch.zeros(3), "array": np.zeros(3)}
    saved = unflatten_state(*flatten_state(state))
    state["tensor"] += 1
    state["array"] += 1
    assert not saved["tensor"].any() and not saved["array"].any()


def test_flattening_again_overwrites_what_fits() -> None:
    state = {"same": torch.ones(3), "longer": torch.ones(3), "other": torch.ones(3), "turned": torch.ones(2, 3)}
    _, first = flatten_state(state)
    kept = dict(first)
    turned = torch.eye(3)[:, :2].T
    state = {"same": torch.full((3,), 2.0), "longer": torch.ones(4), "other": torch.ones(3).double(), "turned": turned}
    skeleton, second = flatten_state(state, first)
    assert equal(unflatten_state(skeleton, second), state) and first == kept
    assert [second[name] is first[name] for name in state] == [True, False, False, True]


def test_memory_for_a_state_can_be_found_before() -> None:
    state = {"tensor": torch.ones(3), "array": np.ones(2), "list": [torch.eye(2)]}
    _, found = flatten_state(state, copy=False)
    kept = dict(found)
    skeleton, tensors = flatten_state(state, found)
    assert equal(unflatten_state(skeleton, tensors), state)
    assert tensors.keys() == kept.keys() and all(tensors[name] is kept[name] for name in kept)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (object(), "object"),
        ({1, 2}, "set"),
        (torch.eye(2).to_sparse(), "Tensor"),
        (np.array(["x"]), "ndarray"),
        (lambda: 0, "function"),
    ],
)
def test_what_cannot_be_saved_is_named(value: Any, kind: str) -> None:
    with pytest.raises(TypeError, match=rf"state scheduler\.0\.x cannot be saved, got {kind}: use numbers"):
        flatten_state({"scheduler": [{"x": value}]})


def test_tensors_of_a_dtype_that_files_have_not_are_named() -> None:
    with pytest.raises(TypeError, match=r"state a\.0 cannot be saved: safetensors has no dtype torch\.float8_e4m3fnuz"):
        flatten_state({"a": [torch.zeros(2).to(torch.float8_e4m3fnuz)]}, copy=False)


def test_complex_tensors_come_back_also_conjugated(tmp_path: Path) -> None:
    value = torch.tensor([1 + 2j, 3 - 1j]).conj()
    checkpoint.write_state(tmp_path / "x", *flatten_state({"a": value, "b": torch.tensor(2j)}))
    found = checkpoint.read_state(tmp_path / "x")
    assert torch.equal(found["a"], value.resolve_conj()) and found["b"].item() == 2j


def test_random_states_repeat_and_new_ranks_differ(tmp_path: Path) -> None:
    def draw() -> list[float]:
        return [random.random(), float(np.random.rand()), float(torch.rand(())), random.gauss(0, 1)]

    before = random_state(CPU)
    draw()
    checkpoint.write_state(tmp_path / "x", *flatten_state(random_state(CPU)))
    expected = [draw(), draw()]
    set_random_state(checkpoint.read_state(tmp_path / "x"), CPU)
    assert [draw(), draw()] == expected
    seen = set()
    for rank in range(3):
        for round_number in range(3):
            set_random_state(seeded_random_state((0, rank, round_number), CPU), CPU)
            seen |= set(draw())
    assert len(seen) == 36
    set_random_state(before, CPU)

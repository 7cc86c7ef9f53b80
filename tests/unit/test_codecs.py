"""What every codec promises, and what each promises by itself."""

from __future__ import annotations

import pytest
import torch

from hvd_adaptive.compress import decode, encode, parse_codec
from hvd_adaptive.compress.codec import of_values
from hvd_adaptive.compress.feedback import ErrorFeedback
from hvd_adaptive.compress.kernels import dispatch
from hvd_adaptive.compress.kernels.reference import levels_bytes, mix_key
from hvd_adaptive.compress.quantize import SPREADS

SPECS = [
    "none", "fp16", "bf16", *(f"maxmin:{bits}" for bits in range(1, 9)), "maxmin:4,bucket=1024,nearest",
    "maxmin:3,bucket=8", "normal:2", "normal:1,bucket=64", "topk:0.01", "topk:0.3,sampled", "topk:1",
]  # fmt: skip
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


def normal(num: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("spec", SPECS)
def test_sizes_types_and_texts(spec: str) -> None:
    codec = parse_codec(spec)
    assert parse_codec(codec.spec) == codec
    for num in (0, 1, 7, 8, 513, 70_001):
        x = normal(num)
        for dtype in DTYPES:
            payload = encode(codec, x.to(dtype), key=5)
            assert payload.dtype == torch.uint8 and payload.numel() == codec.payload_bytes(num)
            assert payload.numel() % 4 == 0 and (num or not payload.numel())
            assert torch.equal(payload, encode(codec, x.to(dtype), key=5))
            y = decode(codec, payload, num, dtype)
            assert y.dtype == dtype
            # Adding and subtracting are the same numbers.
            for add in (1, -1):
                start = normal(num, 1).to(dtype)
                out = start.clone()
                codec.decode_(payload, out, add=add)
                exact = start + add * y if dtype in (torch.float32, torch.float64) else None
                assert exact is None or torch.equal(out, exact)


@pytest.mark.parametrize("spec", SPECS)
def test_strided_tensors_and_slices_of_results(spec: str) -> None:
    codec = parse_codec(spec)
    matrix = normal(600).view(20, 30)
    assert torch.equal(encode(codec, matrix.T), encode(codec, matrix.T.contiguous()))
    out = torch.zeros(30, 20)
    codec.decode_(encode(codec, matrix), out.T)
    assert torch.equal(out.T.reshape(-1), decode(codec, encode(codec, matrix), 600))
    with pytest.raises(ValueError, match=r"has \d+ bytes, got"):
        decode(codec, encode(codec, matrix), 700)


@pytest.mark.parametrize("spec", [s for s in SPECS if not s.startswith(("topk:0", "normal"))])
def test_constants_and_zeros_are_exact(spec: str) -> None:
    codec = parse_codec(spec)
    for value in (0.0, 1.0, -0.375, 0.1 if spec not in ("fp16", "bf16") else 0.5, -2.0**-20):
        for num in (1, 77, 1300):
            x = torch.full((num,), value)
            assert torch.equal(decode(codec, encode(codec, x, key=3), num), x)
    zeros = torch.tensor([0.0, -0.0]).repeat(400)
    assert torch.equal(decode(codec, encode(codec, zeros), 800), zeros)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_never_become_numbers_quietly(spec: str, bad: float) -> None:
    codec = parse_codec(spec)
    num = 70_000 if "sampled" in spec else 3000
    x = normal(num)
    x[700] = bad
    y = decode(codec, encode(codec, x), num)
    assert not torch.isfinite(y[700])
    assert torch.isfinite(y[2048:]).all()


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e-38, 1e-41, 1e-44, 1e37])
def test_maxmin_errs_by_less_than_a_unit_and_does_compress(bits: int, scale: float) -> None:
    x = (normal(4096) * scale).clamp(-1.7e38, 1.7e38)
    buckets = x.view(-1, 512)
    unit = (buckets.amax(1) - buckets.amin(1)) / (2**bits - 1)
    room = (unit.clamp(min=2.0**-126) * 1.0001)[:, None] + buckets.abs() * 2.0**-23
    for rounding, units in (("nearest", 0.5), ("stochastic", 1.0)):
        codec = parse_codec(f"maxmin:{bits},{rounding}")
        payload = encode(codec, x, key=7)
        y = decode(codec, payload, 4096).view(-1, 512)
        assert torch.isfinite(y).all()
        assert ((y - buckets).abs() <= units * room).all()
        assert payload.numel() == 4096 * bits // 8 + 8 * 8
        # Not better than so few levels can be.
        assert all(len(row.unique()) <= 2**bits for row in y)


def test_stochastic_rounding_is_unbiased_and_no_better_than_it_can_be() -> None:
    codec = parse_codec("maxmin:2")
    x, trials = normal(5120), 400
    total, squares = torch.zeros(5120, dtype=torch.float64), 0.0
    for trial in range(trials):
        y = decode(codec, encode(codec, x, key=mix_key(trial)), 5120)
        total += y.double()
        squares += float((y - x).double().square().mean())
    buckets = x.view(-1, 512)
    unit = ((buckets.amax(1) - buckets.amin(1)) / 3)[:, None]
    place = (buckets - buckets.amin(1, keepdim=True)) / unit % 1
    variance = float((unit.square() * place * (1 - place)).mean())
    assert squares / trials == pytest.approx(variance, rel=0.02)
    # The mean of the mean errors, squared: variance / trials if unbiased.
    assert float((total / trials - x).square().mean()) == pytest.approx(variance / trials, rel=0.1)


def test_normal_has_levels_about_zero_as_far_apart_as_loses_least() -> None:
    x = normal(1000)
    one, two = (decode(parse_codec(spec), encode(parse_codec(spec), x), 1000) for spec in ("normal:1", "normal:2"))
    for part, a, b in zip(x.split(512), one.split(512), two.split(512), strict=True):
        # EF-signSGD's.
        assert torch.allclose(a, part.sign() * part.abs().mean(), rtol=1e-6)
        levels = torch.tensor([-1.5, -0.5, 0.5, 1.5])
        nearest = levels[(part[:, None] - part.square().mean().sqrt() * SPREADS[2] * levels).abs().argmin(1)]
        assert torch.allclose(b, nearest * (part @ nearest / (nearest @ nearest)), rtol=1e-5)
    zeros = torch.zeros(600)
    assert torch.equal(decode(parse_codec("normal:2"), encode(parse_codec("normal:2"), zeros), 600), zeros)


@pytest.mark.parametrize(("bits", "part"), [(1, 0.3634), (2, 0.1188), (3, 0.03744), (4, 0.01154)])
def test_normal_loses_of_normal_values_what_max_computed(bits: int, part: float) -> None:
    x = normal(1 << 20)

    def lost(spread: float) -> float:
        payload, y = torch.empty(levels_bytes(len(x), bits, 512), dtype=torch.uint8), torch.empty_like(x)
        dispatch.levels_encode(x, payload, bits=bits, bucket=512, key=None, spread=spread)
        dispatch.levels_decode(payload, y, bits=bits, bucket=512, add=0)
        return float((y - x).square().sum() / x.square().sum())

    assert lost(SPREADS[bits]) == pytest.approx(part, rel=0.01)
    # With one bit the codes are signs.
    assert bits == 1 or all(lost(SPREADS[bits] * factor) > lost(SPREADS[bits]) for factor in (0.8, 1.2))


@pytest.mark.parametrize("bits", SPREADS)
@pytest.mark.parametrize("power", [0, 1, 3, 9])
def test_normal_never_loses_more_than_all(bits: int, power: int) -> None:
    """However heavy the tails: else what is lost would grow from exchange to exchange."""
    codec, x, residual = of_values(parse_codec(f"normal:{bits}")), normal(2048) ** power, torch.zeros(2048)
    x[512:1024] = 0.0
    x[600] = 1.0
    payload, received, out = torch.empty(codec.payload_bytes(2048), dtype=torch.uint8), torch.zeros(2048), torch.empty(2048)
    before = float(x.norm())
    for number in range(60):
        codec.encode_(x if number == 0 else torch.zeros(2048), payload, key=number, residual=residual)
        codec.decode_(payload, out)
        received += out
        assert float(residual.norm()) < before
        before = float(residual.norm())
    assert torch.allclose(received + residual, x, rtol=1e-4, atol=1e-5 * float(x.abs().max()))


def test_topk_sends_the_largest_in_the_order_of_their_places() -> None:
    x = normal(1000)
    payload = encode(parse_codec("topk:0.05"), x)
    y = decode(parse_codec("topk:0.05"), payload, 1000)
    assert payload.view(torch.int32)[:50].diff().min() > 0  # a GPU's decoder searches them
    assert int((y != 0).sum()) == 50 and torch.equal(y[y != 0], x[y != 0])
    assert x[y != 0].abs().min() >= x[y == 0].abs().max()


def test_a_sampled_threshold_is_near_the_exact_one() -> None:
    x = normal(1_000_000)
    y = decode(parse_codec("topk:0.01,sampled"), encode(parse_codec("topk:0.01,sampled"), x), 1_000_000)
    kept = y != 0
    assert 9_000 <= int(kept.sum()) <= 10_000 and torch.equal(y[kept], x[kept])
    assert float(x[kept].abs().min()) == pytest.approx(2.576, rel=0.02)
    few = torch.zeros(1_000_000)
    few[5::100_000] = 1.0
    assert torch.equal(decode(parse_codec("topk:0.01,sampled"), encode(parse_codec("topk:0.01,sampled"), few), 1_000_000), few)


@pytest.mark.parametrize("spec", SPECS)
def test_error_feedback_telescopes(spec: str) -> None:
    codec = parse_codec(spec)
    residual = torch.zeros(2000)
    inputs = sent = torch.zeros(2000, dtype=torch.float64)
    for step in range(20):
        x = normal(2000, step)
        inputs = inputs + x
        payload = torch.empty(codec.payload_bytes(2000), dtype=torch.uint8)
        codec.encode_(x, payload, key=step, residual=residual)
        sent = sent + decode(codec, payload, 2000)
    if spec == "maxmin:1":
        return  # its error is three times its input: residuals grow without end, which is why sign is there
    assert torch.allclose(sent + residual, inputs, atol=1e-4)
    # What is still unsent does not grow: the code sends what it lost before.
    assert float(residual.norm()) < 40 * float(normal(2000).norm())


def test_residuals_are_kept_by_name_and_forgotten_on_reset() -> None:
    feedback = ErrorFeedback()
    cpu = torch.device("cpu")
    with feedback.lent("a", 3, cpu) as residual:
        residual.add_(1)
    other = ErrorFeedback()
    other.load_state_dict(feedback.state_dict())
    with feedback.lent("a", 3, cpu, slice(1, 2)) as residual:
        residual.add_(1)
    with other.lent("a", 3, cpu) as theirs, feedback.lent("a", 3, cpu) as own:
        assert (theirs.tolist(), own.tolist()) == ([1, 1, 1], [1, 2, 1])
    with pytest.raises(RuntimeError, match="has 3 elements, but the exchange now has 4"), other.lent("a", 4, cpu):
        pass
    other.reset()
    with other.lent("a", 4, cpu) as residual:
        assert residual.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("maxmin:0", r"bits must be in \[1, 8\], got 0"),
        ("maxmin:9", r"bits must be in \[1, 8\], got 9"),
        ("maxmin", "number of bits is missing; the form is maxmin:BITS"),
        ("maxmin:four", "bits must be a whole number, got 'four'"),
        ("maxmin:4,bucket=0", r"bucket must be a multiple of 8 in \[8, 65536\], got 0"),
        ("maxmin:4,bucket=12", "got 12"),
        ("maxmin:4,buckets=8", "unknown option 'buckets=8'"),
        ("normal", "number of bits is missing; the form is normal:BITS"),
        ("normal:5", r"bits must be in \[1, 4\], got 5"),
        ("normal:1,bucket=7", "got 7"),
        ("normal:2,bucket=64,nearest", "unknown option 'nearest'"),
        ("topk:0", r"fraction must be in \(0, 1\], got 0"),
        ("topk:nan", r"fraction must be in"),
        ("topk:0.1,fast", "unknown option 'fast'"),
        ("topk:0.1,exact,sampled", "it takes one of exact and sampled, got exact, sampled"),
        ("maxmin:4,nearest,stochastic", "rounding must be given once, got 'stochastic' as well"),
        ("maxmin:4,bucket=64,bucket=128", "bucket must be given once, got 'bucket=128' as well"),
        ("fp16:4", "takes no options"),
        ("maxmim:4", "did you mean 'maxmin'"),
        ("zip", "known are none, fp16, bf16, maxmin:BITS"),
    ],
)
def test_texts_that_name_no_codec(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_codec(text)


@pytest.mark.parametrize("spec", SPECS)
def test_one_call_encodes_all_pieces(spec: str) -> None:
    """As calls for each piece do; random numbers go by the place among all values."""
    codec = parse_codec(spec)
    piece, num = 2 * codec.granularity, 5 * codec.granularity - codec.granularity // 2
    values, residuals = normal(num, 1), (normal(num, 2), normal(num, 2))
    payloads = [torch.empty(codec.payload_bytes(len(part)), dtype=torch.uint8) for part in values.split(piece)]
    for part, own, lost in zip(values.split(piece), payloads, residuals[0].split(piece), strict=True):
        codec.encode_(part, own, key=9, residual=lost, weight=0.3)
    together = torch.empty(sum(map(len, payloads)), dtype=torch.uint8)
    codec.encode_(values, together, key=9, residual=residuals[1], weight=0.3, piece=piece)
    if "maxmin" in codec.spec and "nearest" not in codec.spec:
        assert torch.equal(together[: len(payloads[0])], payloads[0])
        assert not torch.equal(together, torch.cat(payloads))
        out = torch.empty(num)
        codec.decode_(together, out, piece=piece)
        assert torch.allclose(out + residuals[1], values * 0.3 + normal(num, 2), rtol=0, atol=1e-6)
    else:
        assert torch.equal(together, torch.cat(payloads)) and torch.equal(*residuals)


@pytest.mark.parametrize("spec", SPECS)
def test_weights_and_payloads_of_several_peers_and_pieces(spec: str) -> None:
    """A weight is what the values times it are; one call decodes what calls for each payload do, in their order."""
    codec = parse_codec(spec)
    piece, num, num_peers = 2 * codec.granularity, 5 * codec.granularity - codec.granularity // 2, 3
    sent = []
    for peer in range(num_peers):
        for part in normal(num, peer).split(piece):
            payloads = [torch.empty(codec.payload_bytes(len(part)), dtype=torch.uint8) for _ in range(2)]
            residuals = [normal(len(part), 7) for _ in range(2)]
            codec.encode_(part, payloads[0], key=peer, residual=residuals[0], weight=0.3)
            codec.encode_(part * 0.3, payloads[1], key=peer, residual=residuals[1])
            assert torch.equal(*payloads) and torch.equal(*residuals)
            sent.append(payloads[0])
    expected = torch.empty(num)
    for index, payload in enumerate(sent):
        place = index % len(expected.split(piece))
        codec.decode_(payload, expected.split(piece)[place], add=int(index != place))
    for dtype in DTYPES:
        out = torch.empty(num, dtype=dtype)
        codec.decode_(torch.cat(sent), out, num_peers=num_peers, piece=piece)
        assert torch.equal(out, expected.to(dtype))

"""Instructions of the interpreter beside exact arithmetic: fractions, integers, float64."""

from fractions import Fraction

import numpy as np
import pytest
import torch

from tests.gpu import arithmetic
from tests.gpu.arithmetic import EXPRESSIONS, VIEWS, Seed

GENERATOR = np.random.default_rng(0)


def computed(opcode, *operands):
    """The result of an instruction on arrays of its operands' types."""
    text, kinds, to = EXPRESSIONS[opcode]
    scope = {**vars(arithmetic), "np": np}
    names = [f"x{number}" for number in range(len(kinds))]
    for name, kind, operand in zip(names, kinds, operands, strict=True):
        scope[name] = np.asarray(operand).astype(VIEWS[kind])[None]
    with np.errstate(all="ignore"):
        return eval(text.format(*names), scope)[0].view(VIEWS[to])


def bits(many, kind="u4"):
    """Random numbers of all sizes."""
    return GENERATOR.integers(0, np.iinfo(kind).max, many, kind, endpoint=True)


def rounded(exact):
    """A fraction as the nearest float32, ties to even; exact integers only."""
    near = np.float32(float(exact))
    around = [near, np.nextafter(near, np.float32(-np.inf)), np.nextafter(near, np.float32(np.inf))]
    return min(around, key=lambda x: (abs(Fraction(float(x)) - exact), int(x.view("u4")) & 1))


def test_fma_rounds_once():
    """Also where the sum in float64 lies in the middle of two float32 numbers, but for its rest."""
    a, b, c = (GENERATOR.standard_normal(500).astype("f4") for _ in range(3))
    c[:250] *= np.float32(2.0**-30)
    a = np.append(a, np.float32([1 + 2.0**-12, 1 + 2.0**-12, 2.0**-75, 1 + 2.0**-23]))
    b = np.append(b, np.float32([1 + 2.0**-12, 1 + 2.0**-12, 2.0**-75, 1 + 2.0**-1]))
    c = np.append(c, np.float32([2.0**-60, -(2.0**-60), 2.0**-149, 2.0**-80]))
    exact = [
        Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        for x, y, z in zip(a, b, c, strict=True)
    ]
    wanted = np.array([rounded(x) for x in exact])
    assert (computed("fma.rn.f32", a, b, c) == wanted).all()
    twice = (a.astype("f8") * b + c).astype("f4")
    assert (twice != wanted).any()  # what rounding twice gives is seen


INTEGERS = {
    "mul.hi.u32": lambda a, b: (a * b) >> 32,
    "mul.hi.u64": lambda a, b: (a * b) >> 64,
    "mul.hi.s32": lambda a, b: (a * b) >> 32,
    "mul.wide.s32": lambda a, b: a * b,
    "div.s32": lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),
    "rem.s32": lambda a, b: abs(a) % abs(b) * (1 if a >= 0 else -1),
    "shl.b32": lambda a, b: a << b if b < 32 else 0,
    "shr.s32": lambda a, b: a >> min(b, 31),
    "shr.u64": lambda a, b: a >> b if b < 64 else 0,
    "add.s16x2": lambda a, b: ((a + b) & 0xFFFF) | (((a >> 16) + (b >> 16)) << 16),
    "prmt.b32": lambda a, b, c: sum(
        (((a | b << 32) >> 8 * (c >> 4 * n & 7) & 255) if not c >> 4 * n & 8 else
         255 * ((a | b << 32) >> 8 * (c >> 4 * n & 7) + 7 & 1)) << 8 * n for n in range(4)
    ),
    "popc.b32": lambda a: a.bit_count(), "cvt.s8.s32": lambda a: (a + 128) % 256 - 128,
}  # fmt: skip


@pytest.mark.parametrize("opcode", INTEGERS)
def test_integers(opcode):
    _, kinds, to = EXPRESSIONS[opcode]
    operands = [bits(300, VIEWS[kind]) for kind in kinds]
    if opcode[:3] in ("shl", "shr"):
        operands[1] %= 70
    found = computed(opcode, *operands)
    modulus = 1 << 8 * found.itemsize
    rows = zip(*(operand.tolist() for operand in operands), strict=True)
    wanted = [INTEGERS[opcode](*row) % modulus for row in rows]
    assert [x % modulus for x in found.tolist()] == wanted
    assert found.dtype == np.dtype(VIEWS[to])


@pytest.mark.parametrize("kind", ["u32", "s32"])
def test_bit_fields(kind):
    a, start, length = bits(300, VIEWS[kind]), bits(300) % 40, bits(300) % 40
    found = computed(f"bfe.{kind}", a, start, length)
    for x, p, n, one in zip(*(y.tolist() for y in (a, start, length, found)), strict=True):
        exact = (x >> p) & ((1 << n) - 1)
        sign = kind == "s32" and n and x >> min(p + n - 1, 31) & 1
        assert one == (exact - (1 << n) if sign else exact)


@pytest.mark.parametrize(("kind", "dtype"), [("f16", torch.float16), ("bf16", torch.bfloat16)])
def test_conversions_are_those_of_torch(kind, dtype):
    """Every 16-bit number to float32; and back with numbers in the middle of two, and overflow."""
    every = np.arange(1 << 16, dtype="u2")
    wide = computed(f"cvt.f32.{kind}", every)
    assert np.array_equal(wide, torch.from_numpy(every).view(dtype).float().numpy(), equal_nan=True)
    with np.errstate(all="ignore"):
        between = np.nextafter(wide, np.float32(np.inf))
        middle = ((wide[:-1].astype("f8") + wide[1:]) / 2).astype("f4")
    for x in (wide, between, middle, bits(4000).view("f4")):
        found = computed(f"cvt.rn.{kind}.f32", x)
        wanted = torch.from_numpy(x.copy()).to(dtype)
        nan = wanted.isnan().numpy()
        assert (found[~nan] == wanted.view(torch.int16).numpy().view("u2")[~nan]).all()
        assert (found[nan] == 0x7FFF).all()


SPECIAL = np.float32([0.0, -0.0, np.inf, -np.inf, np.nan])
APPROXIMATE = {
    "ex2.approx.ftz.f32": ([1, 1, np.inf, 0, np.nan], np.exp2, 2.0**-22),
    "rsqrt.approx.ftz.f32": ([np.inf, -np.inf, 0, np.nan, np.nan], lambda x: x**-0.5, 2.0**-22.9),
}


@pytest.mark.parametrize("opcode", APPROXIMATE)
def test_approximate_instructions_are_moved_within_their_error(opcode, monkeypatch):
    special, function, relative = APPROXIMATE[opcode]
    assert np.array_equal(computed(opcode, SPECIAL), np.float32(special), equal_nan=True)
    x = GENERATOR.uniform(0.01, 9, 5000).astype("f4")
    exact, runs = function(x.astype("f8")), []
    for seed in (0, 1):
        monkeypatch.setattr(Seed, "value", seed)
        runs.append(computed(opcode, x))
        off = np.abs(runs[-1] / exact - 1)
        assert relative / 2 < off.max() <= relative
        assert np.array_equal(runs[-1], computed(opcode, x))
    assert (runs[0] != runs[1]).mean() > 0.5


def test_div_full_is_moved_by_two_ulps_at_most():
    a, b = (GENERATOR.uniform(0.5, 2, 5000).astype("f4") for _ in range(2))
    exact = a.astype("f8") / b
    ulp = 2.0 ** (np.floor(np.log2(exact)) - 23)
    off = np.abs(computed("div.full.f32", a, b) - exact) / ulp
    assert 0.9 < off.max() <= 2
    assert np.array_equal(
        computed("div.full.f32", SPECIAL, SPECIAL[[1, 0, 0, 0, 0]])[2:4], SPECIAL[2:4]
    )


def test_comparisons_and_extremes_of_nan_and_zeros():
    nan = np.float32(np.nan)
    a, b = np.float32([0.0, -0.0, nan, 1.0, nan]), np.float32([-0.0, 0.0, 1.0, nan, nan])
    assert np.signbit(computed("max.f32", a, b)).tolist()[:2] == [False, False]
    assert np.array_equal(computed("max.f32", a, b)[2:], np.float32([1, 1, nan]), equal_nan=True)
    assert np.isnan(computed("max.NaN.f32", a, b)[2:]).all()
    for how, wanted in (("ne", False), ("neu", True), ("lt", False), ("ltu", True), ("nan", True)):
        assert computed(f"setp.{how}.f32", a[2:3], b[2:3]).tolist() == [wanted]

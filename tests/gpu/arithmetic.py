"""What instructions compute, over NumPy arrays, with the bits that the PTX ISA demands.

The ISA leaves the last bits of ``ex2.approx``, ``rsqrt.approx`` and ``div.full`` open. Here each
result is moved within the allowed error by a hash of the operands and `Seed.value`, so that nothing
may depend on these bits; equal operands give equal results, and special values stay exact.
"""

import itertools
import operator

import numpy as np

VIEWS = {"pred": "?", "f32": "f4"}
VIEWS |= {f"{k}{8 * n}": f"{'i' if k == 's' else 'u'}{n}" for k in "bsu" for n in (1, 2, 4, 8)}
BITS = ("b16", "b32", "b64")
INTEGERS = tuple(f"{kind}{size}" for kind in "su" for size in (16, 32, 64))


class Seed:
    """By what the results of approximate instructions are moved."""

    value = 0


# -- floats --------------------------------------------------------------------------------------


def fma(a, b, c):
    """Multiply and add float32 with one rounding.

    The product is exact in float64. The sum is rounded to odd there, so that rounding it to float32
    is the only rounding (Boldo and Melquiond, 2008).
    """
    product = a.astype("f8") * b
    total = product + c
    high = total - product
    rest = (product - (total - high)) + (c - high)
    bits = total.view("i8")
    off = (rest != 0) & (bits & 1 == 0) & np.isfinite(total)
    if off.any():
        total = np.where(off, bits + np.where((rest > 0) == (total > 0), 1, -1), bits).view("f8")
    return total.astype("f4")


def flushed(x):
    """Subnormal float32 numbers as zeros of the same sign."""
    return np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(np.float32(0), x), x)


def largest(a, b):
    """Of a NaN and a number the number; 0 is above -0."""
    return np.where((a == 0) & (b == 0), (a.view("u4") & b.view("u4")).view("f4"), np.fmax(a, b))


def from_bf16(bits):
    """The float32 of bfloat16 bits."""
    return (bits.astype("u4") << np.uint32(16)).view("f4")


def to_bf16(x):
    """The bits of float32 rounded to the nearest, ties to even; NaN is 0x7fff."""
    bits = x.view("u4")
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(x != x, np.uint32(0x7FFF), rounded).astype("u2")


def from_f16(bits):
    """The float32 of float16 bits."""
    return bits.view("f2").astype("f4")


def to_f16(x):
    """The bits of float32 rounded to float16; NaN is 0x7fff."""
    return np.where(x != x, np.uint16(0x7FFF), x.astype("f2").view("u2"))


def joined(low, high):
    """Two numbers as one of twice as many bits."""
    wide, bits = f"u{2 * low.itemsize}", 8 * low.itemsize
    return low.astype(wide) | (high.astype(wide) << np.array(bits, wide))


def halves(bits):
    """The lower and the upper half of unsigned numbers."""
    half = bits.itemsize // 2
    return bits.astype(f"u{half}"), (bits >> np.array(8 * half, bits.dtype)).astype(f"u{half}")


WIDEN = {"f16": from_f16, "bf16": from_bf16, "s16": lambda bits: bits}
NARROW = {"f16": to_f16, "bf16": to_bf16, "s16": lambda bits: bits}


def short(kind, name, a, b):
    """An operation on 16-bit numbers; of floats rounded once: float32 is wide enough for that."""
    return NARROW[kind](getattr(operator, name)(WIDEN[kind](a), WIDEN[kind](b)))


def packed(kind, name, a, b):
    """The same on two in each register."""
    return joined(*(short(kind, name, x, y) for x, y in zip(halves(a), halves(b), strict=True)))


def _moved(exact, relative, *operands):
    """Round float64 to float32, off by up to ``relative``; special values are not moved."""
    mixed = np.uint64(Seed.value * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF)
    for operand in operands:
        mixed = (mixed ^ operand.view("u4")) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = mixed ^ (mixed >> np.uint64(29))
    share = (mixed >> np.uint64(40)).astype("f8") * 2.0**-23 - 1.0  # in [-1, 1)
    return (exact * (1.0 + share * (relative - 2.0**-24))).astype("f4")  # 2**-24: this rounding


def ex2(x, ftz):
    """2 to the power of x, off by 2**-22 of it (ISA: ex2)."""
    x = flushed(x) if ftz else x
    y = np.where(x == 0, np.float32(1), _moved(np.exp2(x.astype("f8")), 2.0**-22, x))
    return flushed(y) if ftz else y


def rsqrt(x):
    """1 over the root, off by 2**-22.9 of it (ISA: rsqrt.approx.ftz)."""
    return _moved(1.0 / np.sqrt(flushed(x).astype("f8")), 2.0**-22.9, x)


def quotient(a, b):
    """A quotient, off by two ulps, each 2**-24 of it or more (ISA: div.full)."""
    return _moved(a.astype("f8") / b, 2.0**-23, a, b)


# -- integers ------------------------------------------------------------------------------------


def high_64(a, b):
    """The upper half of the product of 64-bit unsigned numbers."""
    low, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    a0, a1, b0, b1 = a & low, a >> shift, b & low, b >> shift
    middle = a1 * b0 + ((a0 * b0) >> shift)
    other = a0 * b1 + (middle & low)
    return a1 * b1 + (middle >> shift) + (other >> shift)


def high(a, b):
    """The upper half of a product of up to 32 bits."""
    wide = f"{a.dtype.kind}8"
    return ((a.astype(wide) * b.astype(wide)) >> np.array(8 * a.itemsize, wide)).astype(a.dtype)


def divided(a, b):
    """Quotient towards zero; by zero: all bits set, as GPUs do."""
    safe = np.where(b == 0, 1, b).astype(a.dtype)
    return np.where(b == 0, ~np.zeros_like(a), (a - np.fmod(a, safe)) // safe)


def remainder(a, b):
    """What `divided` leaves; its sign is that of ``a``."""
    return np.where(b == 0, a, np.fmod(a, np.where(b == 0, 1, b).astype(a.dtype)))


def left(a, by):
    """Shift; by the width or more: 0."""
    most = np.uint32(8 * a.itemsize - 1)
    return np.where(by <= most, a << np.minimum(by, most).astype(a.dtype), 0).astype(a.dtype)


def right(a, by):
    """Shift; by the width or more: the sign, or 0."""
    most = np.uint32(8 * a.itemsize - 1)
    shifted = a >> np.minimum(by, most).astype(a.dtype)
    return shifted if a.dtype.kind == "i" else np.where(by <= most, shifted, 0).astype(a.dtype)


def extracted(a, start, length):
    """``bfe`` of 32 bits: ``length`` bits from ``start``, with their sign if they have one."""
    start, given = np.minimum(start & np.uint32(255), 32), length & np.uint32(255)
    length = np.minimum(given, 32 - start)
    kept = right(left(a, 32 - start - length), 32 - length)
    return np.where(given == 0, 0, kept).astype(a.dtype)


def permuted(a, b, control):
    """``prmt``: four bytes of eight; bit 3 of a selector spreads the sign."""
    both = a.astype("u8") | (b.astype("u8") << np.uint64(32))
    made = np.uint32(0)
    for place in range(4):
        chosen = (control >> np.uint32(4 * place)) & np.uint32(15)
        byte = ((both >> (np.uint64(8) * (chosen & np.uint32(7)))) & np.uint64(255)).astype("u4")
        sign = np.where(byte > 127, np.uint32(255), np.uint32(0))
        made = made | (np.where(chosen > 7, sign, byte) << np.uint32(8 * place))
    return made


def ones(a):
    """How many bits are set."""
    return np.unpackbits(a.astype("<u4")[..., None].view("u1"), axis=-1).sum(-1, dtype="u4")


# -- which instruction is which ------------------------------------------------------------------

# Opcodes without type, types, expression. Operands and result have the type, but for those below.
_ROWS = [
    ("add", INTEGERS, "{} + {}"), ("sub", INTEGERS, "{} - {}"), ("mul.lo", INTEGERS, "{} * {}"),
    ("mad.lo", INTEGERS, "{} * {} + {}"), ("mul.hi", INTEGERS[:2] + INTEGERS[3:5], "high({}, {})"),
    ("mul.hi", ("u64",), "high_64({}, {})"), ("div", INTEGERS, "divided({}, {})"),
    ("rem", INTEGERS, "remainder({}, {})"), ("min", INTEGERS, "np.minimum({}, {})"),
    ("max", INTEGERS, "np.maximum({}, {})"), ("neg", (*INTEGERS, "f32"), "-{}"),
    ("and", (*BITS, "pred"), "{} & {}"), ("or", (*BITS, "pred"), "{} | {}"),
    ("xor", (*BITS, "pred"), "{} ^ {}"), ("not", (*BITS, "pred"), "~{}"),
    ("mov", (*BITS, *INTEGERS, "f32", "pred"), "{}"),
    ("shl", BITS, "left({}, {})"), ("shr", INTEGERS, "right({}, {})"),
    ("popc", ("b32",), "ones({})"),
    ("bfe", ("u32", "s32"), "extracted({}, {}, {})"), ("prmt", ("b32",), "permuted({}, {}, {})"),
    ("selp", (*BITS, *INTEGERS, "f32"), "np.where({2}, {0}, {1})"),
    ("add add.rn", ("f32",), "{} + {}"), ("sub sub.rn", ("f32",), "{} - {}"),
    ("mul mul.rn", ("f32",), "{} * {}"), ("fma.rn", ("f32",), "fma({}, {}, {})"),
    ("fma.rn.ftz", ("f32",), "flushed(fma(flushed({}), flushed({}), flushed({})))"),
    ("div.rn", ("f32",), "{} / {}"), ("sqrt.rn", ("f32",), "np.sqrt({})"),
    ("sqrt.rn.ftz", ("f32",), "np.sqrt(flushed({}))"),
    ("div.rn.ftz", ("f32",), "flushed(flushed({}) / flushed({}))"),
    ("abs", ("f32",), "np.abs({})"), ("max", ("f32",), "largest({}, {})"),
    ("max.NaN", ("f32",),
     "np.where({0} != {0}, {0}, np.where({1} != {1}, {1}, largest({0}, {1})))"),
    ("ex2.approx", ("f32",), "ex2({}, False)"), ("ex2.approx.ftz", ("f32",), "ex2({}, True)"),
    ("rsqrt.approx.ftz", ("f32",), "rsqrt({})"), ("div.full", ("f32",), "quotient({}, {})"),
]  # fmt: skip
_SIGNS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
OTHERS = {"shl": "u32", "shr": "u32", "bfe": "u32", "selp": "pred"}  # type of the last operands


def _table():
    """Opcode -> text of an expression, types of its operands, type of the result."""
    for words, kinds, text in _ROWS:
        for word, kind in itertools.product(words.split(), kinds):
            of = [kind] * (3 if "{2}" in text else 2 if "{1}" in text else text.count("{"))
            if word in OTHERS:
                first = 2 if word == "selp" else 1
                of[first:] = [OTHERS[word]] * len(of[first:])
            yield f"{word}.{kind}", (text, of, kind)
    for kind in INTEGERS:
        for to in (*INTEGERS, "s8", "u8"):
            yield f"cvt.{to}.{kind}", (f"{{}}.astype('{VIEWS[to]}')", [kind], to)
        yield f"cvt.rn.f32.{kind}", ("{}.astype('f4')", [kind], "f32")
    for kind, to in itertools.product(("s8", "u8"), INTEGERS):  # of a register of 16 bits
        text = f"{{}}.astype('{VIEWS[kind]}').astype('{VIEWS[to]}')"
        yield f"cvt.{to}.{kind}", (text, ["b16"], to)
    for kind in ("s16", "u16", "s32", "u32"):
        wide = f"{kind[0]}{2 * int(kind[1:])}"
        text = f"{{}}.astype('{VIEWS[wide]}') * {{}}.astype('{VIEWS[wide]}')"
        yield f"mul.wide.{kind}", (text, [kind] * 2, wide)
        yield f"mad.wide.{kind}", (f"{text} + {{}}", [kind, kind, wide], wide)
    yield "add.s16x2", ("packed('s16', 'add', {}, {})", ["b32"] * 2, "b32")
    for kind in ("f16", "bf16"):
        yield f"cvt.f32.{kind}", (f"from_{kind}({{}})", ["b16"], "f32")
        yield f"cvt.rn.{kind}.f32", (f"to_{kind}({{}})", ["f32"], "b16")
        both = f"joined(to_{kind}({{1}}), to_{kind}({{0}}))"
        yield f"cvt.rn.{kind}x2.f32", (both, ["f32"] * 2, "b32")
        yield f"mul.rn.{kind}", (f"short('{kind}', 'mul', {{}}, {{}})", ["b16"] * 2, "b16")
        yield f"mul.rn.{kind}x2", (f"packed('{kind}', 'mul', {{}}, {{}})", ["b32"] * 2, "b32")


def _comparisons():
    """The same of ``setp``; with a NaN only what ends in u is true, and nan."""
    for how, kind in itertools.product(_SIGNS, (*BITS, *INTEGERS)):
        yield f"setp.{how}.{kind}", (f"{{}} {_SIGNS[how]} {{}}", [kind] * 2, "pred")
    ordered = "({0} == {0}) & ({1} == {1})"
    floats = {"num": f"({ordered})", "nan": f"~({ordered})"}
    for how, sign in _SIGNS.items():
        floats[how] = f"({{0}} {sign} {{1}}) & {ordered}"
        floats[f"{how}u"] = f"({{0}} {sign} {{1}}) | ~({ordered})"
    for how, text in floats.items():
        yield f"setp.{how}.f32", (text, ["f32"] * 2, "pred")
        for kind in ("f16", "bf16"):
            wide = text.format(f"from_{kind}({{0}})", f"from_{kind}({{1}})")
            yield f"setp.{how}.{kind}", (wide, ["b16"] * 2, "pred")


EXPRESSIONS = dict([*_table(), *_comparisons()])


def loose(parts):
    """Whether the last bits of a result are open: approximate, or free to be fused with another."""
    plain = parts[0] in ("add", "sub", "mul") and parts[-1] == "f32" and "rn" not in parts
    return plain or "approx" in parts or "full" in parts

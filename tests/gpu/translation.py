"""Translate PTX: each block of a kernel becomes a Python function over arrays, once.

A register is an array of shape ``(programs, threads)``, or with a 1 for either where all are equal:
addresses of rows and masks of columns stay small. Arrays are never changed in place, so that
copying a register is naming its array. What is more than arithmetic calls `machine.Group`.
"""

from collections import defaultdict

import numpy as np

from tests.gpu import arithmetic, ptx
from tests.gpu.arithmetic import EXPRESSIONS, VIEWS

SHARED = 1 << 10  # address of shared memory
DONE = 1 << 30
WIDE = {"cp": 4, "ldmatrix": 4, "stmatrix": 4}  # bytes of a number that they move in shared memory


class Registers(dict):
    """Arrays by name; one that nothing was written to has all bits set, which is a NaN."""

    def __init__(self, kernel, values=()):
        super().__init__(values)
        self._kernel = kernel

    def __missing__(self, name):
        return ~np.zeros((1, 1), self._kernel.view(name))

    def of(self, rows):
        """Those of some programs."""
        few = {name: array[rows] if len(array) > 1 else array for name, array in self.items()}
        return Registers(self._kernel, few)


class Code:
    """A kernel with its blocks as functions, made when they are first run."""

    def __init__(self, text):
        self.kernel = ptx.parsed(text)
        every = [one for block in self.kernel.blocks for one in block]
        self.lines = [one.line for one in every]
        self.loose = {one.name for one in every if arithmetic.loose(one.parts)}
        shared = [one.parts for one in every if "shared" in one.parts]
        sizes = [WIDE.get(parts[0]) or ptx.BYTES[parts[-1]] for parts in shared]
        self.element = min(sizes, default=4)  # of shared memory
        self._firsts = np.cumsum([0, *map(len, self.kernel.blocks)]).tolist()
        self._functions = {}
        self.live = set()  # what a block reads that another one, or its last run, wrote
        for block in self.kernel.blocks:
            written = set()
            for one in block:
                self.live |= one.reads - written
                written |= one.writes

    def block(self, number, masked):
        """The function of a block: ``(group, registers, mask) -> predicate to leave or None``."""
        key = number, masked
        if key not in self._functions:
            writer = _Writer(self, masked, self._firsts[number])
            self._functions[key] = writer.function(self.kernel.blocks[number])
        return self._functions[key]

    def follows(self, number):
        """Where the last instruction of a block leads, besides the next one."""
        last = self.kernel.blocks[number][-1]
        return self.kernel.labels[last.operands[-1]] if last.parts[0] == "bra" else DONE


class _Writer:
    """Writes the function of a block."""

    def __init__(self, code, masked, first):
        self.code, self.kernel, self.masked, self.site = code, code.kernel, masked, first
        self.lines = []
        self.views = defaultdict(dict)  # register -> type -> local name
        self.written = set()
        self.scope = {**vars(arithmetic), "np": np}

    def function(self, block):
        """Compile a block."""
        last = {name: n for n, one in enumerate(block) for name in one.reads | one.writes}
        result = "None"
        for number, one in enumerate(block):
            if one.leaves:
                result = self._guard(one) or "True"
                continue
            self._translate(one)
            self.site += 1
            for name in one.reads | one.writes:
                if last[name] == number and self.views.get(name) and name not in self.code.live:
                    self.lines.append(f"del {', '.join(self.views.pop(name).values())}")
        for name in sorted(self.written & self.code.live):
            self.lines.append(f"R['{name}'] = {self.read(name, self.kernel.view(name))}")
        text = "\n ".join(["def run(G, R, m):", *self.lines, f"return {result}"])
        exec(compile(text, f"<{self.kernel.name}>", "exec"), self.scope)
        return self.scope["run"]

    def read(self, operand, kind):
        """The text of an operand, viewed as a NumPy type."""
        if operand.rstrip("xyz.") in ("%tid", "%ctaid", "%nctaid", "%ntid"):
            return f"G.special['{operand}'].view('{kind}')"
        if not operand.startswith("%"):
            name = f"K{len(self.scope)}"
            self.scope[name] = _immediate(operand, kind)
            return name
        views, own = self.views[operand], self.kernel.view(operand)
        if not views:
            self._name(operand, own, f"R['{operand}']")
        if kind not in views:
            source = next(iter(views.values()))
            if np.dtype(kind).itemsize == np.dtype(own).itemsize:
                self._name(operand, kind, f"{source}.view('{kind}')")
            else:  # an instruction may be narrower than its register
                self._name(operand, kind, f"{source}.view('{own}').astype('{kind}')")
        return views[kind]

    def _name(self, register, kind, text):
        self.views[register][kind] = f"{register[1:]}_{kind.strip('?')}"
        self.lines.append(f"{self.views[register][kind]} = {text}")

    def write(self, register, kind, text, guard=""):
        """Put the value of an expression of a NumPy type into a register."""
        if register == "_":
            return
        own = self.kernel.view(register)
        if np.dtype(kind).itemsize != np.dtype(own).itemsize:
            text, kind = f"({text}).astype('{own}')", own
        if guard or self.masked:
            text = f"np.where({self._active(guard)}, {text}, {self.read(register, kind)})"
        self.views[register].clear()
        self._name(register, kind, text)
        self.written.add(register)

    def _guard(self, one):
        predicate = one.guard.lstrip("!")
        return predicate and ("~" if one.guard[0] == "!" else "") + self.read(predicate, "?")

    def _active(self, guard):
        """The text of the mask of an access."""
        return " & ".join(word for word in (guard, "m" * self.masked) if word) or "None"

    def _address(self, operand):
        base, *offsets = operand.strip("[] ").replace(" ", "").split("+")
        kind = self.kernel.view(base) if base.startswith("%") else "u4"
        offset = sum(int(word, 0) for word in offsets)
        return f"{self.read(base, kind)}.astype('i8')" + (f" + {offset}" if offset else "")

    def _values(self, operand, kind):
        return f"({''.join(f'{self.read(word, kind)}, ' for word in ptx.members(operand))})"

    def _call(self, name, *arguments):
        self.lines.append(f"G.site = {self.site}")
        self.lines.append(f"loaded = G.{name}({', '.join(map(str, arguments))})")

    def _loaded(self, operand, kind, guard=""):
        for number, name in enumerate(ptx.members(operand)):
            self.write(name, kind, f"loaded[{number}]", guard)

    # -- instructions --

    def _translate(self, one):
        guard = self._guard(one)
        if one.name in EXPRESSIONS:
            text, kinds, to = EXPRESSIONS[one.name]
            of = zip(one.operands[1:], kinds, strict=True)
            self.write(
                one.operands[0],
                VIEWS[to],
                text.format(*(self.read(w, VIEWS[k]) for w, k in of)),
                guard,
            )
            return
        special = getattr(self, f"_do_{one.parts[0]}", None)
        try:
            known = special and special(one, guard, *one.operands) is not NotImplemented
        except (KeyError, IndexError, TypeError, ValueError):
            known = False  # other words, or more operands, than a method expects
        if not known:
            raise NotImplementedError(f"PTX instruction {one.name} at {one.line}")

    def _do_mov(self, one, guard, to, source):
        kind = VIEWS[one.parts[-1]]
        half = f"u{int(kind[1:]) // 2}" if "{" in to + source else kind
        if source.startswith("{"):
            low, high = (self.read(word, half) for word in ptx.members(source))
            self.write(to, kind, f"joined({low}, {high})", guard)
        elif to.startswith("{"):
            self.lines.append(f"loaded = halves({self.read(source, kind)})")
            self._loaded(to, half, guard)
        else:
            self.write(to, kind, self.read(source, kind), guard)

    def _do_setp(self, one, guard, to, a, b):
        view = "u2" if one.parts[-1] in ("f16", "bf16") else VIEWS[one.parts[-1]]
        text = arithmetic.comparison(one.parts, self.read(a, view), self.read(b, view))
        self.write(to, "?", text, guard)

    def _do_ld(self, one, guard, to, source):
        kind, names = VIEWS[one.parts[-1]], ptx.members(to)
        if one.parts[1] not in ("param", "global", "shared"):
            return NotImplemented
        if one.parts[1] == "param":
            text = f"G.launch.parameters['{source.strip('[] ')}'].view('{kind}')"
            wide = f"{kind[0]}{self.kernel.view(to)[1:]}"
            self.write(to, wide, f"{text}.astype('{wide}')", guard)
        else:
            size = ptx.BYTES[one.parts[-1]]
            active = self._active(guard)
            self._call("load", repr(one.parts[1]), self._address(source), size, len(names), active)
            self._loaded(to, kind, guard)
        return None

    def _do_st(self, one, guard, to, source):
        if one.parts[1] not in ("global", "shared"):
            return NotImplemented
        size, space = ptx.BYTES[one.parts[-1]], repr(one.parts[1])
        values = self._values(source, f"u{size}")
        return self._call("store", space, self._address(to), size, values, self._active(guard))

    def _do_bar(self, one, guard, number):
        if guard or one.name != "bar.sync" or number != "0":
            return NotImplemented
        return self._call("barrier", self._active(""))

    def _do_shfl(self, one, guard, to, source, by, most, members):
        if guard or (one.parts[2], most, members) != ("bfly", "31", "-1"):
            return NotImplemented
        self._call("exchanged", self.read(source, "u4"), by, self._active(""))
        return self._loaded(to, "u4")

    def _do_redux(self, one, guard, to, source, members):
        if guard or one.name != "redux.sync.add.s32":  # Triton gives all threads as members
            return NotImplemented
        self._call("added", self.read(source, "u4"), self._active(""))
        return self._loaded(to, "u4")

    def _do_ldmatrix(self, one, guard, to, source):
        if guard or self.masked:
            return NotImplemented
        many = len(ptx.members(to))
        self._call("load_matrices", self._address(source), many, "trans" in one.parts)
        return self._loaded(to, "u4")

    def _do_stmatrix(self, one, guard, to, source):
        if guard or self.masked:
            return NotImplemented
        values = self._values(source, "u4")
        return self._call("store_matrices", self._address(to), values, "trans" in one.parts)

    def _do_cp(self, one, guard, *operands):
        if one.parts[2] == "commit_group":
            return self._call("commit")
        if one.parts[2] == "wait_group":
            return self._call("wait", operands[0])
        to, source, size, part = operands
        addresses = self._address(to), self._address(source)
        return self._call(
            "copy", *addresses, int(size, 0), self.read(part, "u4"), self._active(guard)
        )


def _immediate(word, kind):
    """A number as an array."""
    if kind == "?":
        return np.array([[word not in ("0", "false")]])
    size = np.dtype(kind).itemsize
    if word == "global_smem":
        value = SHARED
    else:
        value = int(word[2:], 16) if word.startswith("0f") else int(word.rstrip("U"), 0)
    return np.array([[value % (1 << 8 * size)]], f"u{size}").view(kind)

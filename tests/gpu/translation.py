"""Translate PTX: each block of a kernel becomes a Python function over arrays, once.

A register is an array of shape ``(programs, threads)``, or with a 1 for either where all are equal:
addresses of rows and masks of columns stay small. Arrays are never changed in place, so that
copying a register is naming its array. What is more than arithmetic calls `machine.Group`.
"""

from collections import defaultdict

import numpy as np

from tests.gpu import arithmetic, ptx
from tests.gpu.arithmetic import EXPRESSIONS, VIEWS
from tests.gpu.memory import SHARED

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

    def _loaded(self, operand, kind, guard=""):
        for number, name in enumerate(ptx.members(operand)):
            self.write(name, kind, f"loaded[{number}]", guard)

    # -- instructions --

    def _translate(self, one):
        guard = self._guard(one)
        text, kinds, result = EXPRESSIONS.get(one.name, ("", (), ""))
        match one.parts, one.operands:
            case ["mov", kind], [to, source] if "{" in source:
                half = f"u{ptx.BYTES[kind] // 2}"
                low, high = (self.read(word, half) for word in ptx.members(source))
                self.write(to, VIEWS[kind], f"joined({low}, {high})", guard)
            case ["mov", kind], [to, source] if "{" in to:
                self.lines.append(f"loaded = halves({self.read(source, VIEWS[kind])})")
                self._loaded(to, f"u{ptx.BYTES[kind] // 2}", guard)
            case ["ld", "param", kind], [to, source]:
                wide = f"{VIEWS[kind][0]}{self.kernel.view(to)[1:]}"
                text = f"G.launch.parameters['{source.strip('[] ')}'].view('{VIEWS[kind]}')"
                self.write(to, wide, f"{text}.astype('{wide}')", guard)
            case _, [to, *sources] if text and len(sources) == len(kinds):
                of = zip(sources, kinds, strict=True)
                text = text.format(*(self.read(word, VIEWS[k]) for word, k in of))
                self.write(to, VIEWS[result], text, guard)
            case _:
                text, kind = self._call(one, self._active(guard), not guard)
                self.lines += [f"G.site = {self.site}", f"loaded = G.{text}"]
                if kind:
                    self._loaded(one.operands[0], kind, guard)

    def _call(self, one, active, every):
        """The method of a group that does an instruction, and the type of what it loads.

        Triton gives ``every`` thread as a member of what a warp does together.
        """
        match one.parts, one.operands:
            case ["ld", "global" | "shared" as space, *_, kind], [to, source]:
                size, many = ptx.BYTES[kind], len(ptx.members(to))
                text = f"load('{space}', {self._address(source)}, {size}, {many}, {active})"
                return text, VIEWS[kind]
            case ["st", "global" | "shared" as space, *_, kind], [to, source]:
                size, values = ptx.BYTES[kind], self._values(source, f"u{ptx.BYTES[kind]}")
                return f"store('{space}', {self._address(to)}, {size}, {values}, {active})", ""
            case ["bar", "sync"], ["0"] if every:
                return f"barrier({active})", ""
            case ["shfl", "sync", "bfly", "b32"], [_, source, by, "31", "-1"] if every:
                return f"exchanged({self.read(source, 'u4')}, {by}, {active})", "u4"
            case ["redux", "sync", "add", "s32"], [_, source, _] if every:
                return f"added({self.read(source, 'u4')}, {active})", "u4"
            case ["ldmatrix", *words], [to, source] if active == "None":
                many, turned = len(ptx.members(to)), "trans" in words
                return f"load_matrices({self._address(source)}, {many}, {turned})", "u4"
            case ["stmatrix", *words], [to, source] if active == "None":
                values, turned = self._values(source, "u4"), "trans" in words
                return f"store_matrices({self._address(to)}, {values}, {turned})", ""
            case ["cp", "async", "commit_group" | "wait_group" as word], pending:
                return f"{word}({', '.join(pending)})", ""
            case ["cp", "async", "ca" | "cg", "shared", "global"], [to, source, size, part]:
                addresses = f"{self._address(to)}, {self._address(source)}"
                return f"copy({addresses}, {size}, {self.read(part, 'u4')}, {active})", ""
        raise NotImplementedError(f"PTX instruction {one.name} at {one.line}")


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

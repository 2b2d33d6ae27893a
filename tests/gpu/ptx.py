"""Read PTX as Triton writes it: a kernel with its blocks, instructions and source lines."""

import re
from dataclasses import dataclass, field

BYTES = {f"{kind}{8 * size}": size for kind in "bsuf" for size in (1, 2, 4, 8)} | {"bf16": 2}
LEAVES = ("bra", "ret", "exit")
_OPERANDS = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^\s,]+")


@dataclass
class Instruction:
    """One instruction.

    Attributes:
        name: The opcode.
        operands: Registers, numbers, ``{...}`` and ``[...]``, as they are written.
        guard: The predicate before it with its ``!``, or nothing.
        line: Of the source, as ``file:line:column @[ caller ... ]``.
        parts: The opcode, split at its dots; ``shared::cta`` is another word for ``shared``.
    """

    name: str
    operands: tuple[str, ...]
    guard: str
    line: str

    def __post_init__(self):
        self.parts = self.name.replace("::cta", "").split(".")
        self.leaves = self.parts[0] in LEAVES  # whether it ends a block
        stores = self.leaves or self.parts[0] in ("st", "stmatrix", "bar", "cp")
        read, written = (0, ()) if stores else (1, self.operands[:1])
        self.writes = _registers(*written)
        self.reads = _registers(*self.operands[read:], self.guard)
        if self.guard:
            self.reads |= self.writes


@dataclass
class Kernel:
    """A kernel: types of its parameters and registers, blocks, and the block of each label."""

    name: str
    threads: int
    parameters: dict[str, str]
    widths: dict[str, str]  # letters of a register's name -> its type
    blocks: list[list[Instruction]] = field(default_factory=lambda: [[]])
    labels: dict[str, int] = field(default_factory=dict)

    def view(self, register):
        """The unsigned NumPy type of a register."""
        size = BYTES.get(self.widths[register.rstrip("0123456789")])
        return f"u{size}" if size else "?"


def _registers(*operands):
    return {word for operand in operands for word in re.findall(r"%[a-z]+\d+", operand)}


def members(operand):
    """What is between the braces, or the operand itself."""
    return re.split(r"[\s,]+", operand.strip("{} "))


def parsed(text):
    """Read the text of a kernel."""
    head, _, body = text.partition("\n{\n")
    body = body.partition("\n}\n")[0]
    parameters = re.findall(r"\.param\s+\.(\w+)[^,)]*?(\w+_param_\d+)", head)
    kernel = Kernel(
        re.search(r"\.entry\s+(\w+)", head)[1],
        int(re.search(r"\.reqntid\s+(\d+)", head)[1]),
        {name: kind for kind, name in parameters},
        {letters: kind for kind, letters in re.findall(r"\.reg\s+\.(\w+)\s+(%\w+?)<", body)},
    )
    line = ""
    for row in body.splitlines():
        code, _, comment = row.partition("//")
        if code.split()[:1] == [".loc"]:
            line = comment.strip()
        else:
            for statement in re.split(r";|(?<=:)\s*$", code):
                _statement(kernel, statement.strip(), line)
    return kernel


def _statement(kernel, statement, line):
    if statement.endswith(":"):
        if kernel.blocks[-1]:
            kernel.blocks.append([])
        kernel.labels[statement[:-1]] = len(kernel.blocks) - 1
    elif statement and statement[0] not in ".{}":
        guard, opcode, operands = re.fullmatch(r"(?:@(\S+)\s+)?(\S+)(.*)", statement).groups()
        made = Instruction(opcode, tuple(_OPERANDS.findall(operands)), guard or "", line)
        kernel.blocks[-1].append(made)
        if made.leaves:
            kernel.blocks.append([])

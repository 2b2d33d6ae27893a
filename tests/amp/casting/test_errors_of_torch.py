"""What docs/recipes.md says to write instead of lines that torch refuses in 16 bits."""

import pathlib
import re

import pytest
import torch
from torch import nn

from tests.amp.levels import LEVELS, cast

PAGE = pathlib.Path(__file__).parents[3] / "docs" / "recipes.md"
SECTION = PAGE.read_text("utf-8").split("## Errors that 16 bits bring")[1].split("\n## ")[0]
ROWS = re.findall(r"^\| `([^`]+)`(.*?)\(`[^`]+`\) \| (.+) \|$", SECTION, re.MULTILINE)
FORMATS = {"in float16": LEVELS[1:4], "in bfloat16": LEVELS[4:]}
REPLACED = {  # the part of each line that its remedies replace
    "scores.masked_fill(mask, -1e9)": "-1e9",
    "out = torch.zeros(n, 4); out[rows] = layer(x)": "out = torch.zeros(n, 4)",
    "total.index_add(0, rows, layer(x))": "layer(x)",
    "layer(torch.randn(n, 8))": "torch.randn(n, 8)",
    "torch.quantile(layer(x), 0.5)": "layer(x)",
    "layer(x).numpy()": "layer(x).numpy()",
}


class Model(nn.Module):
    def __init__(self, code):
        super().__init__()
        self.layer, self.code, self.ran = nn.Linear(8, 4), code, False

    def forward(self, x):
        y = self.layer(x)
        names = {"torch": torch, "layer": self.layer, "x": x, "n": 4, "scores": y, "mask": y > 0}
        names |= {"rows": torch.arange(4), "total": torch.zeros(4, 4, dtype=torch.float32)}
        exec(self.code, names)
        self.ran = True
        return y


def remedies():
    for line, where, cell in ROWS:
        levels = re.findall(r"O\d", where) or FORMATS.get(where.strip(), LEVELS[1:])
        for remedy in re.findall(r"`([^`]+)`", cell):
            code = line.replace(REPLACED[line], remedy)
            yield from ((level, line, code) for level in levels)


@pytest.mark.parametrize(("level", "line", "code"), list(remedies()))
def test_the_remedy_runs(level, line, code):
    assert code != line
    model = cast(level, Model(code))
    with torch.set_grad_enabled("numpy" not in code):  # NumPy refuses what needs a gradient
        model(torch.randn(4, 8))
    assert model.ran


def test_every_row_is_tried():
    assert [line for line, *_ in ROWS] == list(REPLACED)
    assert len(ROWS) == SECTION.count("\n| `")

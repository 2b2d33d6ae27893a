"""The errors of torch that docs/recipes.md explains, and what it says to write instead."""

import pathlib
import re

import pytest
import torch
from torch import nn

from tests.amp.levels import cast

RECIPES = pathlib.Path(__file__).parents[3] / "docs" / "recipes.md"


def rows_of(y):
    return torch.arange(len(y)) % 2


def masked(y, value):
    return y.masked_fill(y > 0, value)


def put(y, out):
    out[rows_of(y) == 0] = y[rows_of(y) == 0]
    return out


# By a part of its error: levels, the line, and what to write instead; ``y`` is ``layer(x)``.
CASES = {
    "value cannot be converted to type c10::Half without overflow": (
        ("O1", "O2"),
        lambda layer, y: masked(y, -1e9),
        lambda layer, y: masked(y, torch.finfo(y.dtype).min),
    ),
    "Index put requires the source and destination dtypes match": (
        ("O1", "O2", "O4"),
        lambda layer, y: put(y, torch.zeros(4, 8, dtype=torch.float32)),
        lambda layer, y: put(y, y.new_zeros(4, 8)),
    ),
    "must have the same scalar type": (
        ("O1", "O2", "O4"),
        lambda layer, y: torch.zeros(2, 8, dtype=torch.float32).index_add(0, rows_of(y), y),
        lambda layer, y: torch.zeros(2, 8, dtype=torch.float32).index_add(0, rows_of(y), y.float()),
    ),
    "mat1 and mat2 must have the same dtype": (
        ("O2", "O5"),
        lambda layer, y: layer(torch.ones(4, 8, dtype=torch.float32)),
        lambda layer, y: layer(torch.ones(4, 8, dtype=y.dtype)),
    ),
    "must be either float or double dtype": (
        ("O2", "O5"),
        lambda layer, y: torch.quantile(y, 0.5),
        lambda layer, y: torch.quantile(y.float(), 0.5),
    ),
    "Got unsupported ScalarType BFloat16": (
        ("O4", "O5"),
        lambda layer, y: y.detach().numpy(),
        lambda layer, y: torch.from_numpy(y.detach().float().numpy()),
    ),
}


class Model(nn.Module):
    def __init__(self, line):
        super().__init__()
        self.layer, self.line = nn.Linear(8, 8), line

    def forward(self, x):
        return self.line(self.layer, self.layer(x))


@pytest.mark.parametrize(
    ("level", "text"), [(level, text) for text, case in CASES.items() for level in case[0]]
)
def test_the_error_and_its_remedy(level, text):
    _, wrong, right = CASES[text]
    with pytest.raises((RuntimeError, TypeError), match=re.escape(text)):
        cast(level, Model(wrong))(torch.randn(4, 8))
    assert cast(level, Model(right))(torch.randn(4, 8)).isfinite().all()


def test_the_page_has_these_errors():
    section = RECIPES.read_text().split("## Errors that 16 bits bring")[1].split("\n## ")[0]
    assert re.findall(r"\(`([^`]+)`\)", section) == list(CASES)

"""A warning fails the suite; what torch deprecates is passed over, in whatever category."""

import pathlib
import re
import warnings

import pytest

TESTS = pathlib.Path(__file__).parent
FILTER = re.compile(r'"(ignore:(?!:)[^"]*(?:deprecated|instantiated|torch\.jit)[^"]*)"')


@pytest.mark.parametrize("category", [DeprecationWarning, FutureWarning, UserWarning])
def test_torchscript_is_deprecated_by_another_category_in_each_release(category):
    warnings.warn("`torch.jit.script` is deprecated. Use `torch.compile`.", category, stacklevel=1)


def test_no_filter_of_a_deprecation_names_a_category():
    found = {path.name: FILTER.findall(path.read_text()) for path in sorted(TESTS.rglob("*.py"))}
    assert any(found.values())
    named = {name: [one for one in some if one.endswith("Warning")] for name, some in found.items()}
    assert [name for name, some in named.items() if some] == []

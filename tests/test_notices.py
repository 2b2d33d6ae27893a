"""Warnings, a version check and a log formatter that programs import from ``apex``."""

import logging
import warnings

import pytest
import torch

import apex


@pytest.fixture
def _rank(request, monkeypatch):
    distributed = torch.distributed
    monkeypatch.setattr(distributed, "is_available", lambda: True)
    monkeypatch.setattr(distributed, "is_initialized", lambda: True, raising=False)
    monkeypatch.setattr(distributed, "get_rank", lambda: request.param, raising=False)


def old_name():
    apex.deprecated_warning("old_name is deprecated: use new_name")


def test_the_warning_names_the_line_that_called_the_deprecated_function():
    with pytest.warns(apex.DeprecatedFeatureWarning, match="use new_name") as caught:
        old_name()
    line = test_the_warning_names_the_line_that_called_the_deprecated_function.__code__
    assert caught[0].filename == __file__
    assert caught[0].lineno == line.co_firstlineno + 2
    assert issubclass(apex.DeprecatedFeatureWarning, FutureWarning)


@pytest.mark.usefixtures("_rank")
@pytest.mark.parametrize(("_rank", "number"), [(0, 1), (3, 0)], indirect=["_rank"])
def test_rank_0_alone_warns(number):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        old_name()
    assert len(caught) == number


@pytest.mark.parametrize(
    ("found", "needed", "words"),
    [
        (8900, 8900, None),
        (91002, 8900, None),
        (8600, 8900, "--bnp needs cuDNN 8900 or newer, and torch has cuDNN 8600"),
        (None, 8900, "--bnp needs cuDNN 8900 or newer, and this torch has none"),
    ],
)
def test_the_check_of_cudnn(monkeypatch, found, needed, words):
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: found is not None)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: found)
    if words is None:
        assert apex.check_cudnn_version_and_warn("--bnp", needed) is True
        return
    with pytest.warns(UserWarning, match=words) as caught:
        assert apex.check_cudnn_version_and_warn("--bnp", needed) is False
    assert caught[0].filename == __file__


@pytest.mark.usefixtures("_rank")
@pytest.mark.parametrize("_rank", [3], indirect=True)
def test_the_formatter_knows_the_rank():
    assert formatted("%(rank_info)s %(levelname)s %(message)s") == "3 INFO begun"


def test_the_formatter_without_a_process_group():
    assert formatted("%(rank_info)s %(message)s") == "0 begun"
    assert formatted(None) == "begun"


def formatted(form):
    record = logging.LogRecord("apex", logging.INFO, __file__, 1, "%s", ("begun",), None)
    return apex.RankInfoFormatter(form).format(record)

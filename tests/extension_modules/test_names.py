"""What all modules have in common: functions by position alone, and the version of apex."""

import importlib
import inspect
import pathlib

import amp_C
import pytest

import apex

FOLDER = pathlib.Path(amp_C.__file__).parent
NAMES = sorted(file.stem for file in FOLDER.glob("[!_]*.py"))


@pytest.mark.parametrize("name", NAMES)
def test_functions_take_arguments_by_position(name):
    """As functions of compiled modules do, whose arguments have no names."""
    module = importlib.import_module(name)
    for function in (getattr(module, each) for each in module.__all__):
        kinds = {p.kind for p in inspect.signature(function).parameters.values()}
        assert kinds == {inspect.Parameter.POSITIONAL_ONLY}, function
    assert getattr(module, "__version__", apex.__version__) == apex.__version__


def test_which_modules_have_a_version():
    """Those in which the original had one."""
    found = [name for name in NAMES if hasattr(importlib.import_module(name), "__version__")]
    assert found == [
        "fused_dense_cuda",
        "fused_rotary_positional_embedding",
        "fused_weight_gradient_mlp_cuda",
        "generic_scaled_masked_softmax_cuda",
        "mlp_cuda",
        "scaled_masked_softmax_cuda",
        "scaled_softmax_cuda",
        "scaled_upper_triang_masked_softmax_cuda",
        "xentropy_cuda",
    ]

"""Every update over lists of tensors: its kernel beside its definition, its scalars by name."""

import importlib
import pkgutil

import pytest
import torch

import apex.ops
from apex.ops import _runtime
from apex.ops.lists.multi_tensor import Update, run
from tests.multi_tensor_apply.common import joined, tensors
from tests.tolerance import assert_one_rounding

SIZES = (1, 7, 0, 1030)


def _updates():
    for info in pkgutil.walk_packages(apex.ops.__path__, "apex.ops."):
        module = importlib.import_module(info.name)
        for name, value in vars(module).items():
            if isinstance(value, Update):
                yield value.kernel, value
            assert not isinstance(value, Update) or name.isupper()


UPDATES = dict(_updates())


def test_all_are_found():
    assert len(UPDATES) >= 12
    assert {"adam:adam", "lamb:lamb_term", "sgd:momentum", "scale:scale"} <= UPDATES.keys()


# -- the kernel is the definition ------------------------------------------------------------------


def _scalars(update, kind):
    """Numbers that are all different and that float32 holds; and each position's as a list."""
    names = update.scalars._fields
    rows = [[(11 + 3 * name + row) / 64 for name in range(len(names))] for row in range(len(SIZES))]
    if kind != "per tensor":
        rows = rows[:1] * len(SIZES)
    for number, name in enumerate(names):
        if name == "first":  # a truth value, and of each tensor only
            for row, values in enumerate(rows):
                values[number] = float(row % 2) if kind == "per tensor" else 0.0
    columns = [list(column) for column in zip(*rows, strict=True)]
    given = {
        "numbers": [column[0] for column in columns],
        "on the device": [torch.tensor([column[0]]) for column in columns],
        "per tensor": [torch.tensor(column) for column in columns],
    }[kind]
    return update.scalars(*given), rows


@pytest.mark.parametrize("kind", ["numbers", "on the device", "per tensor"])
@pytest.mark.parametrize("kernel", UPDATES)
def test_the_kernel_computes_the_definition(kernel, kind):
    """With every scalar in play: the gradient's factor, L2 penalty and decoupled decay at once."""
    update = UPDATES[kernel]
    scalars, rows = _scalars(update, kind)
    count = 5 if "_swa" in kernel else 4  # at most; an average comes last
    inputs = [tensors(SIZES, seed=seed, scale=1.0) for seed in range(count)]
    inputs[2:] = [[x.abs() for x in column] for column in inputs[2:]]  # roots are taken of some
    wanted = []
    for position, row in zip(zip(*inputs, strict=True), rows, strict=True):
        values = tuple(x.double() for x in position)
        row = [torch.tensor(number) if kind == "per tensor" else number for number in row]
        wanted.append(update.reference(values, update.scalars(*row)))
    results = range(len(wanted[0]))
    outputs = [tensors(SIZES, seed=9) for _ in results]
    stores = tuple((count + result, result) for result in results)
    with _runtime.use("triton"):
        run(update, [*inputs, *outputs], stores, scalars)
    for result, found in zip(results, outputs, strict=True):
        assert_one_rounding(joined(found), joined([position[result] for position in wanted]))


# -- what is inspected is what runs ----------------------------------------------------------------


def test_inspection_names_the_scalars_of_the_operation():
    """Kernels may not import operations, so that their cases spell the names again."""
    pytest.importorskip("triton")
    from tools.kernels import finding

    inspected = {}
    for case in finding.cases():
        if "SCALARS" in case.constants:
            names = case.constants["SCALARS"].names
            inspected.setdefault(case.constants["UPDATE"].__name__, set()).add(names)
    declared = {kernel.partition(":")[2]: update for kernel, update in UPDATES.items()}
    assert inspected == {name: {update.scalars._fields} for name, update in declared.items()}

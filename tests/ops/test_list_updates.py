"""Every update over lists of tensors: its kernel beside its definition, its scalars by name."""

import importlib
import pkgutil

import pytest
import torch

import apex.ops
from apex import optimizers
from apex.ops import _runtime
from apex.ops.lists.multi_tensor import Update, run
from apex.ops.lists.storage import StepOptions
from apex.ops.updates.adagrad import Adagrad, adagrad_
from apex.ops.updates.adam import Adam, adam_
from apex.ops.updates.lamb import Lamb, lamb_
from apex.ops.updates.lion import Lion, lion_
from apex.ops.updates.novograd import NovoGrad, novograd_
from apex.ops.updates.sgd import SGD, sgd_
from tests.multi_tensor_apply.common import PATHS, joined, on, tensors
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
    assert len(UPDATES) >= 15
    assert {"adam:adam", "lamb:lamb_term", "sgd:momentum", "unscale:unscale"} <= UPDATES.keys()


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
    inputs = [tensors(SIZES, seed=seed, scale=1.0) for seed in range(4)]
    inputs[2:] = [[x.abs() for x in column] for column in inputs[2:]]  # roots are taken of some
    wanted = []
    for position, row in zip(zip(*inputs, strict=True), rows, strict=True):
        values = tuple(x.double() for x in position)
        row = [torch.tensor(number) if kind == "per tensor" else number for number in row]
        wanted.append(update.reference(values, update.scalars(*row)))
    results = range(len(wanted[0]))
    outputs = [tensors(SIZES, seed=9) for _ in results]
    stores = tuple((4 + result, result) for result in results)
    with _runtime.use("triton"):
        run(update, [*inputs, *outputs], stores, scalars)
    for result, found in zip(results, outputs, strict=True):
        assert_one_rounding(joined(found), joined([position[result] for position in wanted]))


# -- factor, decay and skipping of every optimizer -------------------------------------------------

COMMON = {"lr": 0.25, "weight_decay": 0.125}
BETAS = {"beta1": 0.875, "beta2": 0.75, "eps": 1e-3, "bias_correction": True, "step": 3}


def _adam(late, **more):
    hyper = Adam(**COMMON, **BETAS, adam_w_mode=late, **more)
    return lambda columns, options: adam_(columns, hyper, options)


def _sgd(late, momentum=0.875, *, nesterov=False, first=None):
    hyper = SGD(
        **COMMON, momentum=momentum, dampening=0.5, nesterov=nesterov, wd_after_momentum=late
    )
    return lambda columns, options: sgd_(columns, hyper, options, first)


def _adagrad(late):
    hyper = Adagrad(**COMMON, eps=1e-3, adagrad_w_mode=late)
    return lambda columns, options: adagrad_(columns, hyper, options)


def _lamb(late):
    hyper = Lamb(**COMMON, **BETAS, adam_w_mode=late, grad_averaging=True, use_nvlamb=False)
    return lambda columns, options: lamb_(columns, hyper, options)


def _lion(late):
    def step(columns, options):
        decay = 0.125 if late else 0.0  # there is no other
        lion_(columns, Lion(0.25, 0.875, 0.75, decay), options)

    return step


def _novograd(late, norm_type=2):
    hyper = NovoGrad(
        **COMMON, **BETAS, reg_inside_moment=not late, grad_averaging=True, norm_type=norm_type
    )

    def step(columns, options):
        norms = torch.tensor([-1.0, 0.5, 0.25, 0.125])
        novograd_(columns, norms, hyper, options)
        columns.append([norms])  # to be compared too

    return step


STEPS = {  # makes the step, and how many states there are
    "adam": (_adam, 2),
    "adam, eps inside": (lambda late: _adam(late, eps_inside_sqrt=True), 2),
    "sgd": (lambda late: _sgd(late, momentum=0.0), 0),
    "momentum": (_sgd, 1),
    "nesterov": (lambda late: _sgd(late, nesterov=True), 1),
    "first step": (lambda late: _sgd(late, first=torch.tensor([1.0, 0.0, 1.0, 1.0])), 1),
    "adagrad": (_adagrad, 1),
    "lamb": (_lamb, 2),
    "lion": (_lion, 1),
    "novograd": (_novograd, 1),
    "novograd, largest": (lambda late: _novograd(late, norm_type=0), 1),
}
steps = pytest.mark.parametrize("name", STEPS)
paths = pytest.mark.parametrize("path", PATHS)


def test_no_optimizer_is_left_out():
    fused = [name for name in optimizers.__all__ if name.startswith("Fused")]
    names = {name.removeprefix("Fused").lower() for name in fused}
    assert names - {"mixedprecisionlamb"} <= STEPS.keys()  # LAMB's update


def _columns(name, dtype=torch.float32, grad_scale=1.0):
    grads = [x * grad_scale for x in tensors(SIZES, dtype, scale=1.0)]
    columns = [grads, tensors(SIZES, dtype, seed=1, scale=1.0)]
    states = range(STEPS[name][1])
    return [*columns, *([x.abs() for x in tensors(SIZES, seed=2 + n)] for n in states)]


def _step(name, late, path, columns, **options):
    with on(path):
        STEPS[name][0](late)(columns, StepOptions(**options))
    return columns


def _same(left, right):
    pairs = zip(left, right, strict=True)
    return all(all(map(torch.equal, a, b)) for a, b in pairs)


@paths
@pytest.mark.parametrize("late", [False, True], ids=["in the gradient", "decoupled"])
@steps
def test_the_factor_multiplies_the_gradient_and_nothing_else(name, late, path):
    """Not the weight decay, say: gradients halved beforehand give the same, bit for bit."""
    factored = _step(name, late, path, _columns(name), factor=0.5)
    halved = _step(name, late, path, _columns(name, grad_scale=0.5))
    assert _same(factored[1:], halved[1:])
    assert not _same(factored[1:2], _step(name, late, path, _columns(name))[1:2])


@paths
@steps
def test_the_decay_is_where_it_is_said_to_be(name, path):
    """The two ways differ, and both from none; without momentum SGD's are one."""
    found = [_step(name, late, path, _columns(name))[1] for late in (False, True)]
    assert _same(found[:1], found[1:]) == (name == "sgd")


@paths
@steps
def test_a_skipped_step_changes_nothing(name, path):
    options = {"factor": 0.5, "write_grads": name != "lamb"}
    noop = torch.ones(1)
    columns = _step(name, True, path, _columns(name), noop=noop, **options)
    assert _same(columns[: len(_columns(name))], _columns(name))
    taken = _step(name, True, path, _columns(name), noop=noop.zero_(), **options)
    assert _same(taken, _step(name, True, path, _columns(name), **options))


@paths
@steps
def test_scaled_gradients_are_left_where_that_is_asked_for(name, path):
    if name != "lamb":  # which leaves its term there
        for write_grads, left in ((True, 0.5), (False, 1.0)):
            columns = _step(name, True, path, _columns(name), factor=0.5, write_grads=write_grads)
            assert _same(columns[:1], _columns(name, grad_scale=left)[:1])


# -- what is inspected is what runs ----------------------------------------------------------------


def test_inspection_names_the_scalars_of_the_operation():
    """Kernels may not import operations, so that their cases spell the names again."""
    pytest.importorskip("triton")
    from apex.kernels.inspect import finding

    inspected = {}
    for case in finding.cases():
        if "SCALARS" in case.constants:
            names = case.constants["SCALARS"].names
            inspected.setdefault(case.constants["UPDATE"].__name__, set()).add(names)
    declared = {kernel.partition(":")[2]: update for kernel, update in UPDATES.items()}
    assert inspected == {name: {update.scalars._fields} for name, update in declared.items()}

"""Modules and optimizers that an older Apex pickled whole lack attributes that came later.

Simulated: each attribute that a constructor sets is deleted, one after the other. What a default
cannot be known for is exempt: attributes that depend on arguments without a default.
"""

import copy
import importlib
import inspect
import pickle
import pkgutil
from types import SimpleNamespace

import pytest
import torch

import apex
from apex import fp16_utils, mlp, normalization, optimizers, parallel
from apex.contrib import (
    bottleneck,
    cudnn_gbn,
    fmha,
    group_norm,
    groupbn,
    layer_norm,
    multihead_attn,
    transducer,
    xentropy,
)
from apex.contrib import optimizers as old
from apex.contrib.bottleneck.bottleneck import FrozenBatchNorm2d
from apex.contrib.optimizers.fused_sgd import FusedSGD as OldSGD
from apex.fused_dense import FusedDense, FusedDenseGeluDense
from apex.RNN.cells import mLSTMRNNCell
from apex.RNN.RNNBackend import RNNCell, bidirectionalRNN, stackedRNN
from apex.transformer import AttnMaskType, layers, tensor_parallel
from apex.transformer.functional import fused_softmax
from tests.saved_whole import make

IDS = torch.tensor([1, 0, 2])


def _x(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _cell(n):
    return RNNCell(4, 8 + n, 6 + n, torch.lstm_cell)


def _attention(n):
    return SimpleNamespace(
        hidden_size=8 + 10 * n, num_attention_heads=2 + n, attention_probs_dropout_prob=0.1 * n
    )


def _norms(x, *kinds):
    return {kind: (lambda n, kind=kind: kind(8 + n), lambda m: m(x)) for kind in kinds}


def _optimizers(*kinds, **options):
    return {kind: lambda params, kind=kind: kind(params, **options) for kind in kinds}


# How each is made, the second time with other arguments that have no default, and what is called.
MODULES = {
    **_norms(_x(2, 8), normalization.FusedLayerNorm, normalization.FusedRMSNorm),
    **_norms(_x(2, 8), normalization.MixedFusedLayerNorm, normalization.MixedFusedRMSNorm),
    **_norms(_x(2, 8), layers.FusedLayerNorm, layers.MixedFusedLayerNorm, layers.FastLayerNorm),
    **_norms(_x(2, 8), layer_norm.FastLayerNorm),
    **_norms(_x(2, 8, 3, 3), parallel.SyncBatchNorm, FrozenBatchNorm2d),
    **_norms(_x(2, 3, 3, 8), groupbn.BatchNorm2d_NHWC),
    cudnn_gbn.GroupBatchNorm2d: (
        lambda n: cudnn_gbn.GroupBatchNorm2d(8 + n, 1),
        lambda m: m(_x(2, 8, 3, 3)),
    ),
    group_norm.GroupNorm: (
        lambda n: group_norm.GroupNorm(2 + n, 8 + 4 * n),
        lambda m: m(_x(2, 8, 3, 3)),
    ),
    fmha.FMHA: (
        lambda n: fmha.FMHA(_attention(n)),
        lambda m: m(_x(5, 24), torch.tensor([0, 5], dtype=torch.int32), 5),
    ),
    multihead_attn.SelfMultiheadAttn: (
        lambda n: multihead_attn.SelfMultiheadAttn(8 + 10 * n, 2 + n),
        lambda m: m(_x(5, 2, 8), None, None)[0],
    ),
    multihead_attn.EncdecMultiheadAttn: (
        lambda n: multihead_attn.EncdecMultiheadAttn(8 + 10 * n, 2 + n),
        lambda m: m(_x(5, 2, 8), _x(3, 2, 8), None)[0],
    ),
    mlp.MLP: (lambda n: mlp.MLP([8, 4] + [3] * n), lambda m: m(_x(2, 8))),
    FusedDense: (lambda n: FusedDense(8 + n, 3), lambda m: m(_x(2, 8))),
    FusedDenseGeluDense: (
        lambda n: FusedDenseGeluDense(8 + n, 6 + n, 4 + n),
        lambda m: m(_x(2, 8)),
    ),
    xentropy.LinearCrossEntropyLoss: (
        lambda n: xentropy.LinearCrossEntropyLoss(8 + n, 5),
        lambda m: m(_x(3, 8), IDS),
    ),
    transducer.TransducerJoint: (
        lambda n: transducer.TransducerJoint(),
        lambda m: m(_x(1, 3, 8), _x(1, 2, 8), torch.tensor([3]), torch.tensor([2])),
    ),
    transducer.TransducerLoss: (
        lambda n: transducer.TransducerLoss(),
        lambda m: m(_x(1, 3, 2, 5), torch.tensor([[1]]), torch.tensor([3]), torch.tensor([1]), 4),
    ),
    bottleneck.Bottleneck: (
        lambda n: bottleneck.Bottleneck(8, 4 + n, 8 + 8 * n),
        lambda m: m(_x(1, 8, 4, 4)),
    ),
    RNNCell: (_cell, lambda m: m(_x(3, 8))[0]),
    mLSTMRNNCell: (lambda n: mLSTMRNNCell(8 + n, 6 + n), lambda m: m(_x(3, 8))[0]),
    stackedRNN: (lambda n: stackedRNN(_cell(n)), lambda m: m(_x(4, 3, 8), True)[0]),
    bidirectionalRNN: (lambda n: bidirectionalRNN(_cell(n)), lambda m: m(_x(4, 3, 8), True)[0]),
    fused_softmax.FusedScaleMaskSoftmax: (
        lambda n: fused_softmax.FusedScaleMaskSoftmax(
            bool(n), False, AttnMaskType(1 + n), bool(n), None, True, None
        ),
        lambda m: m(_x(1, 1, 4, 4), None),
    ),
    fused_softmax.GenericFusedScaleMaskSoftmax: (
        lambda n: fused_softmax.GenericFusedScaleMaskSoftmax(
            bool(n), False, bool(n), None, True, None
        ),
        lambda m: m(_x(1, 1, 4, 4), None),
    ),
    tensor_parallel.ColumnParallelLinear: (
        lambda n: tensor_parallel.ColumnParallelLinear(8 + n, 4 + n, use_cpu_initialization=True),
        lambda m: m(_x(3, 2, 8))[0],
    ),
    tensor_parallel.RowParallelLinear: (
        lambda n: tensor_parallel.RowParallelLinear(8 + n, 4 + n, use_cpu_initialization=True),
        lambda m: m(_x(3, 2, 8))[0],
    ),
    tensor_parallel.VocabParallelEmbedding: (
        lambda n: tensor_parallel.VocabParallelEmbedding(8 + n, 4 + n, use_cpu_initialization=True),
        lambda m: m(IDS),
    ),
    parallel.DistributedDataParallel: (
        lambda n: parallel.DistributedDataParallel(torch.nn.Linear(8, 2)),
        lambda m: m(_x(3, 8)),
    ),
    fp16_utils.tofp16: (lambda n: fp16_utils.tofp16(), lambda m: m(_x(3))),
    fp16_utils.FP16Model: (
        lambda n: fp16_utils.FP16Model(torch.nn.Linear(8, 2)),
        lambda m: m(_x(3, 8)),
    ),
    fp16_utils.FP16_Module: (
        lambda n: fp16_utils.FP16_Module(torch.nn.Linear(8, 2)),
        lambda m: m(_x(3, 8)),
    ),
}
OPTIMIZERS = {
    **_optimizers(optimizers.FusedAdam, optimizers.FusedSGD, optimizers.FusedAdagrad, lr=0.1),
    **_optimizers(optimizers.FusedLAMB, optimizers.FusedNovoGrad, optimizers.FusedLion, lr=0.1),
    **_optimizers(optimizers.FusedMixedPrecisionLamb, optimizers.FusedMuon, lr=0.1),
    **_optimizers(old.FusedAdam, old.FusedLAMB, OldSGD, lr=0.1),
    parallel.LARC: lambda params: parallel.LARC(torch.optim.SGD(params, lr=0.1)),
    fp16_utils.FP16_Optimizer: lambda params: fp16_utils.FP16_Optimizer(
        torch.optim.SGD(params, lr=0.1)
    ),
    optimizers.FP16_Optimizer: lambda params: optimizers.FP16_Optimizer(
        torch.optim.SGD(params, lr=0.1)
    ),
}
OTHERS = {"DistributedFusedAdam", "DistributedFusedLAMB", "OptimWrapper"}  # cannot be pickled
OTHERS |= {"MasterOptimizer", "Computed"}  # bases of what is here, or of a program's classes
OTHERS |= {"FusedAdamSWA"}  # its constructor takes three lists of weights; see test_openfold_triton
COMMANDS = {"catalogue", "commands"}  # packages without classes for users
# NVIDIA's have these, and they depend on the rank, or on the parameters.
ALWAYS_THERE = {"vocab_start_index", "optim", "loss_scaler"}
ALWAYS_THERE |= {"fp16_groups", "fp32_from_fp16_groups", "fp32_from_fp32_groups"}


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    with make.one_rank():
        yield


def _public_classes():
    bases = torch.nn.Module, torch.optim.Optimizer
    for info in pkgutil.walk_packages(apex.__path__, "apex."):
        parts = info.name.split(".")
        if parts[1] in COMMANDS or {"debug", "kernels", "testing", "__main__"} & {*parts}:
            continue
        module = importlib.import_module(info.name)
        listed = getattr(module, "__all__", ())
        for name, found in vars(module).items():
            if not isinstance(found, type) or not issubclass(found, bases):
                continue
            here = found.__module__ == info.name and not parts[-1].startswith("_")
            if found.__module__.startswith("apex.") and (name in listed or here):
                yield found


def test_all_public_classes_are_here():
    found = {kind for kind in _public_classes() if not kind.__name__.startswith("_")}
    names = {kind.__name__ for kind in found - {*MODULES, *OPTIMIZERS}}
    assert names == OTHERS


def _required(kind):
    """Names of arguments that have no default, of all constructors."""
    constructors = [vars(base)["__init__"] for base in kind.__mro__ if "__init__" in vars(base)]
    signatures = map(inspect.signature, constructors)
    every = [one for signature in signatures for one in signature.parameters.values()]
    return {one.name for one in every if one.default is inspect.Parameter.empty}


def _attributes(kind, first, second, torchs):
    """Attributes that do not depend on arguments without a default."""
    names = vars(first).keys() - vars(torchs).keys() - _required(kind) - ALWAYS_THERE
    names &= vars(second).keys()
    return sorted(name for name in names if _equal(vars(first)[name], vars(second)[name]))


def _equal(left, right):
    if isinstance(left, torch.Tensor):
        return left.shape == right.shape
    return left == right


def _from_old_file(instance, name):
    make, arguments, state = instance.__reduce_ex__(4)[:3]
    state = {key: value for key, value in state.items() if key != name}
    make, arguments, state = pickle.loads(pickle.dumps((make, arguments, state)))
    found = make(*arguments)
    found.__setstate__(state)
    return found


TORCHS = {  # whose own attributes are torch's matter
    torch.nn.modules.batchnorm._BatchNorm: lambda: torch.nn.BatchNorm1d(1),
    torch.nn.Linear: lambda: torch.nn.Linear(1, 1),
    torch.nn.Module: torch.nn.Module,
}


@pytest.mark.filterwarnings("ignore:.*has no effect")
@pytest.mark.parametrize("kind", MODULES, ids=lambda kind: f"{kind.__module__}.{kind.__name__}")
def test_modules(kind):
    make, call = MODULES[kind]
    torch.manual_seed(0)
    module = make(0)
    torchs = next(made() for base, made in TORCHS.items() if issubclass(kind, base))
    names = _attributes(kind, module, make(1), torchs)
    expected = call(copy.deepcopy(module))
    for name in names:
        old_module = _from_old_file(module, name)
        assert _equal(getattr(old_module, name), vars(module)[name]), name
        assert torch.equal(call(old_module), expected), name
        assert old_module.state_dict().keys() == module.state_dict().keys()
        repr(old_module)


def _step(optimizer, gradient=1.0):
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for param in params:
        param.grad = torch.full_like(param, gradient)
    optimizer.step()
    return [param.detach() for param in params]


@pytest.mark.parametrize("kind", OPTIMIZERS, ids=lambda kind: f"{kind.__module__}.{kind.__name__}")
def test_optimizers(kind):
    def make():
        return OPTIMIZERS[kind]([torch.nn.Parameter(_x(3, 4)), torch.nn.Parameter(_x(4))])

    optimizer = make()
    torchs = torch.optim.SGD([torch.nn.Parameter(_x(1))])
    _step(optimizer)
    names = _attributes(kind, optimizer, optimizer, torchs)
    expected = _step(copy.deepcopy(optimizer))
    for name in names:
        old_optimizer = _from_old_file(optimizer, name)
        assert all(map(torch.equal, _step(old_optimizer), expected)), name
        old_optimizer.add_param_group({"params": [torch.nn.Parameter(_x(2))]})
        old_optimizer.load_state_dict(old_optimizer.state_dict())
        repr(old_optimizer)


@pytest.mark.parametrize("relu", [False, True])
def test_an_mlp_of_2020(relu):
    """It had ``relu`` instead of an activation."""
    module = mlp.MLP([8, 4], activation="relu" if relu else "none")
    vars(module).update(relu=relu)
    assert torch.equal(_from_old_file(module, "activation")(_x(2, 8)), module(_x(2, 8)))


def test_a_novograd_of_nvidias():
    """It had norms in its groups alone; without them a step would begin with new ones."""
    optimizer = OPTIMIZERS[optimizers.FusedNovoGrad]([torch.nn.Parameter(_x(3, 4))])
    optimizer.add_param_group({"params": [torch.nn.Parameter(_x(4))]})
    _step(optimizer)
    older = copy.deepcopy(optimizer)
    for state in older.state.values():
        del state["norm"]
    # As optimizers of torch without a __getstate__ of their own are pickled.
    state = pickle.loads(pickle.dumps(torch.optim.Optimizer.__getstate__(older)))
    older = optimizers.FusedNovoGrad.__new__(optimizers.FusedNovoGrad)
    older.__setstate__(state)
    assert all(map(torch.equal, _step(older, 3.0), _step(optimizer, 3.0)))

"""Ways to read parameters after a step with ``overlap_param_sync=True``; each gives what it saw.

A reader gets the model, an input and the rank, and returns tensors, numbers or text. Tests compare
what it returns with what it returns where ``step`` has waited.
"""

import copy
import ctypes
import functools
import pickle
import threading
import weakref

import amp_C
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.nn.utils.parametrizations import weight_norm
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from apex._compat import ALL_GATHER, REDUCE_SCATTER
from apex.multi_tensor_apply import multi_tensor_applier
from tests.checkpoints import reloaded


class Part(nn.Module):
    """What TorchScript takes, too."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x):
        return self.inner(x).relu()


class Model(nn.Module):
    """Modules that read parameters of others, a list of parameters, tied weights."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 6)
        self.scales = nn.ParameterList([nn.Parameter(torch.rand(6)) for _ in range(2)])
        self.attention = nn.MultiheadAttention(6, 1)
        self.cell = nn.LSTM(6, 6)
        self.normed = weight_norm(nn.Linear(6, 6))
        self.script = torch.jit.script(Part())
        self.head = nn.Linear(6, 8, bias=False)
        self.head.weight = self.first.weight

    def forward(self, x):
        x = self.second(self.first(x).relu()) + x
        x = sum(x * scale for scale in self.scales)
        x = self.attention(x, x, x)[0] + self.cell(x)[0] + self.normed(x) + self.script(x)
        return self.head(x)


def weights(model):
    return [*model.parameters()]


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


@torch.library.custom_op("apex_tests::total", mutates_args=())
def _total(weight: torch.Tensor) -> torch.Tensor:
    return weight.new_full((), weight.detach().numpy().sum())


class _Calls(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class _Ops(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@torch.jit.script
def _doubled(weight):
    return weight * 2


class _Twice(nn.Module):
    def forward(self, weight):
        return weight * 2


def _in_thread(model, x, rank):
    found = []
    thread = threading.Thread(target=lambda: found.extend(p.norm() for p in weights(model)))
    thread.start()
    thread.join()
    return found


def _sent(model, x, rank):
    """Rank 0 sends, rank 1 receives into another tensor."""
    mine, theirs = model.second.weight, torch.zeros(6, 8)
    if rank == 0:
        dist.send(mine, 1)
        return mine
    dist.recv(theirs, 0)
    return theirs


def _gathered(model, x, rank):
    found = [torch.zeros(8, 6) for _ in range(2)]
    dist.all_gather(found, model.first.weight)
    return found


def _into(collective, rows, model, x, rank):
    found = torch.zeros(rows, 6)
    with torch.no_grad():
        getattr(dist, collective)(found, model.first.weight)
    return found


def _reduced(model, x, rank):
    copies = [p.clone() for p in weights(model)]
    with torch.no_grad():
        dist.all_reduce(model.first.bias)
        model.first.bias.div_(2)
    return copies


def _broadcast(model, x, rank):
    with torch.no_grad():
        dist.broadcast(model.first.weight, 0)
    return model.first.weight


def _objects(model, x, rank):
    found = [None, None]
    dist.all_gather_object(found, weights(model))
    return [p for some in found for p in some]


def _ema(model, x, rank):
    found = [torch.zeros_like(p) for p in weights(model)]
    with torch.no_grad():
        for mean, p in zip(found, weights(model), strict=True):
            mean.lerp_(p, 0.1)
    return found


def _foreach_ema(model, x, rank):
    found = [torch.zeros(p.shape) for p in weights(model)]
    with torch.no_grad():
        torch._foreach_lerp_(found, weights(model), 0.1)
    return found


def _averaged(model, x, rank):
    found = torch.optim.swa_utils.AveragedModel(nn.Linear(6, 8))
    found.update_parameters(model.first)
    return weights(found)


def _saved(model, x, rank):
    return [*reloaded(model.state_dict(), weights_only=True).values()]


def _written(write, model, x, rank):
    with torch.no_grad():
        write(model.second.weight)
    return [p.clone() for p in weights(model)]


def _vector(model, x, rank):
    with torch.no_grad():
        vector_to_parameters(
            parameters_to_vector(weights(model.second)) * 0.5, weights(model.second)
        )
    return weights(model)


def _loaded(model, x, rank):
    state = {name: value * 0.5 for name, value in model.second.state_dict().items()}
    model.second.load_state_dict(state)
    return [p.clone() for p in weights(model)]


def _memory(model, x, rank):
    p = model.first.weight
    return [*(ctypes.c_float * p.numel()).from_address(p.data_ptr())]


def _gradient(model, x, rank):
    return torch.autograd.grad((x @ model.first.weight.t()).square().sum(), [model.first.weight])


def _penalty(model, x, rank):
    loss = sum(p.square().sum() for p in weights(model))
    found = torch.autograd.grad(loss, weights(model))
    return [loss, *found]


def _functional_grad(seen, model, x, rank):
    def loss(params):
        return functional_call(model.first, params, (x,)).square().sum()

    params = {name: seen(p) for name, p in model.first.named_parameters()}
    return [*torch.func.grad(loss)(params).values()]


def _vmapped_module(model, x, rank):
    return torch.vmap(model.first)(x)


def _vmapped_weights(model, x, rank):
    return torch.vmap(lambda row: row * 2)(model.first.weight)


def _captured(model, x, rank):
    return torch.func.grad(lambda y: (y @ model.first.weight.t()).square().sum())(x)


def _dual(model, x, rank):
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(model.first.weight, torch.ones(8, 6))
        return torch.autograd.forward_ad.unpack_dual(dual.square()).tangent


def _stacked(model, x, rank):
    params, _ = torch.func.stack_module_state([model.first, copy.deepcopy(model.first)])
    return [*params.values()]


def _dispatched(model, x, rank):
    with _Ops() as ops:
        found = model.first.weight * 2
    return [found, len(ops.names)]  # what waits is not seen


def _traced_graph(model, x, rank):
    return make_fx(lambda y: y @ model.first.weight.t())(x)(x)


def _modes(model, x, rank):
    with _Calls():
        return [p.sum() for p in weights(model)]


def _inference(model, x, rank):
    with torch.inference_mode():
        return model(x).sum().item()


def _autocast(model, x, rank):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return (x @ model.first.weight.t()).float()


def _exported(model, x, rank):
    return torch.export.export(model.first, (x,)).module()(x)


def _data_set(model, x, rank):
    p = model.first.bias
    p.data = p.data
    return p


def _own_function(model, x, rank):
    found = _Product.apply(x, model.first.weight)
    return [found, *torch.autograd.grad(found.square().sum(), [model.first.weight])]


def _swapped(model, x, rank):
    copied = copy.deepcopy(model.second)
    return weights(copied.double())


def _second_optimizer(model, x, rank):
    """torch's optimizer, whose weight decay reads weights."""
    p = model.first.bias
    p.grad = torch.ones(8)
    torch.optim.SGD([p], lr=0.01, weight_decay=1.0).step()
    p.grad = None
    return p


def _norms(model, x, rank):
    flag = torch.zeros(1, dtype=torch.int32)
    found = multi_tensor_applier(amp_C.multi_tensor_l2norm, flag, [weights(model)], True)
    return [*found]


def _out(model, x, rank):
    found = torch.zeros(8, 6)
    with torch.no_grad():
        torch.mul(model.first.weight, 2, out=found)
    return found


def _inplace_argument(model, x, rank):
    found = torch.zeros(8, 6)
    with torch.no_grad():
        found += model.first.weight
        found[0] = model.first.weight[1]
    return found


def _weak(model, x, rank):
    return [weakref.ref(model.first.weight)().sum(), {model.first.bias: 1}[model.first.bias]]


def _hooked(model, x, rank):
    seen = []
    handle = model.first.register_forward_pre_hook(lambda module, _: seen.append(module.weight * 2))
    with torch.no_grad():
        model.first(x)
    handle.remove()
    return seen


def _functional(model, x, rank):
    return functional_call(model, {"first.bias": model.first.bias * 2}, (x,))


def _quiet(call, model, x, rank):
    with torch.no_grad():
        return call(model, x)


def _of(call):
    """A reader from what is done with the weights."""
    return lambda model, x, rank: call(weights(model))


def _each(call):
    return lambda model, x, rank: [call(p) for p in weights(model)]


RIGHT = {
    "forward": lambda model, x, rank: model(x),
    "forward without gradients": functools.partial(_quiet, lambda model, x: model(x)),
    "inference mode": _inference,
    "one module": lambda model, x, rank: model.second(model.first(x)),
    "multi-head attention": lambda model, x, rank: model.attention(x[None], x[None], x[None])[0],
    "recurrent layer": lambda model, x, rank: model.cell(x)[0],
    "parametrized weight": lambda model, x, rank: model.normed.weight,
    "parameter list": lambda model, x, rank: sum(x * p for p in model.scales),
    "tied weight": lambda model, x, rank: model.head.weight * 2,
    "scripted module": lambda model, x, rank: model.script(x),
    "forward of a scripted module": lambda model, x, rank: model.script.forward(x),
    "weights of a scripted module": lambda model, x, rank: [
        p * 2 for p in model.script.parameters()
    ],
    "argument of a scripted module": lambda model, x, rank: torch.jit.script(_Twice())(
        model.first.weight
    ),
    "autograd function": _own_function,
    "custom operator": lambda model, x, rank: _total(model.first.weight),
    "operator by name": lambda model, x, rank: torch.ops.aten.mul.Tensor(model.first.weight, 2),
    "traced module": lambda model, x, rank: torch.jit.trace(model.first, x)(x),
    "forward hook": _hooked,
    "checkpointed": lambda model, x, rank: checkpoint(model.first, x, use_reentrant=False),
    "functional_call": _functional,
    "functional linear": lambda model, x, rank: F.linear(x, model.first.weight, model.first.bias),
    "reflected operator": lambda model, x, rank: x @ model.first.weight.t() - model.first.bias,
    "bound method": lambda model, x, rank: model.first.weight.mul(2),
    "norm": _each(torch.linalg.vector_norm),
    "sum of squares": _each(lambda p: p.square().sum()),
    "item": _each(lambda p: p.sum().item()),
    "tolist": _each(lambda p: p.tolist()),
    "text": _each(repr),
    "format": lambda model, x, rank: f"{model.scales[0][0]:.4f} {model.first.bias}",
    "iteration": _each(lambda p: [row * 1 for row in p]),
    "index": lambda model, x, rank: model.first.weight[2, 3],
    "comparison": lambda model, x, rank: model.first.weight > 0,
    "equal": lambda model, x, rank: torch.equal(model.first.weight, model.head.weight),
    "data": _each(lambda p: p.data),
    "detach": _each(lambda p: p.detach()),
    "clone": _each(lambda p: p.clone()),
    "numpy": _each(lambda p: p.detach().numpy().copy()),
    "asarray": lambda model, x, rank: np.asarray(model.first.weight.data),
    "dlpack": lambda model, x, rank: torch.from_dlpack(model.first.weight.detach()),
    "storage": _each(lambda p: [*p.untyped_storage()]),
    "address": _memory,
    "cat": _of(lambda ps: torch.cat([p.flatten() for p in ps])),
    "stack": lambda model, x, rank: torch.stack([*model.scales]),
    "einsum": lambda model, x, rank: torch.einsum("bi,oi->bo", x, model.first.weight),
    "out": _out,
    "in-place argument": _inplace_argument,
    "foreach norm": _of(torch._foreach_norm),
    "foreach average": _foreach_ema,
    "average": _ema,
    "averaged model": _averaged,
    "parameters_to_vector": _of(parameters_to_vector),
    "multi_tensor_applier": _norms,
    "clip_grad_norm_": lambda model, x, rank: nn.utils.get_total_norm(
        [p.data for p in weights(model)]
    ),
    "another optimizer": _second_optimizer,
    "state_dict": lambda model, x, rank: [*model.state_dict().values()],
    "state_dict, kept": lambda model, x, rank: [
        v * 1 for v in model.state_dict(keep_vars=True).values()
    ],
    "state_dict of DCP": lambda model, x, rank: [*get_model_state_dict(model).values()],
    "torch.save": _saved,
    "deepcopy": lambda model, x, rank: weights(copy.deepcopy(model.second)),
    "deepcopy of a parameter": _each(copy.deepcopy),
    "copy of a parameter": _each(copy.copy),
    "pickle": lambda model, x, rank: weights(pickle.loads(pickle.dumps(model.second))),
    "copy in another dtype": _swapped,
    "all_gather": _gathered,
    "all_gather_into_tensor": functools.partial(_into, ALL_GATHER, 16),
    "reduce_scatter_tensor": functools.partial(_into, REDUCE_SCATTER, 4),
    "all_to_all_single": functools.partial(_into, "all_to_all_single", 8),
    "all_reduce": _reduced,
    "broadcast": _broadcast,
    "send": _sent,
    "all_gather_object": _objects,
    "autograd.grad": _gradient,
    "penalty": _penalty,
    "grad of functional_call": functools.partial(_functional_grad, lambda p: p),
    "grad of detached weights": functools.partial(_functional_grad, torch.Tensor.detach),
    "grad, captured weight": _captured,
    "vmap of a module": _vmapped_module,
    "vmap of a weight": _vmapped_weights,
    "stack_module_state": _stacked,
    "make_fx": _traced_graph,
    "symbolic_trace": lambda model, x, rank: torch.fx.symbolic_trace(model.first)(x),
    "function mode": _modes,
    "dispatch mode": _dispatched,
    "autocast": _autocast,
    "another thread": _in_thread,
    "weak reference": _weak,
    "copy_": functools.partial(_written, lambda p: p.copy_(p * 0.5)),
    "mul_": functools.partial(_written, lambda p: p.mul_(0.5)),
    "data.mul_": functools.partial(_written, lambda p: p.data.mul_(0.5)),
    "index put": functools.partial(_written, lambda p: p.__setitem__(0, 1.0)),
    "init": functools.partial(_written, nn.init.ones_),
    "foreach write": lambda model, x, rank: torch._foreach_mul_(
        [p.data for p in weights(model)], 0.5
    ),
    "vector_to_parameters": _vector,
    "load_state_dict": _loaded,
    "data again": _data_set,
}

#: Readers for which torch imports seconds of its own.
SLOW = {"forward-mode": _dual, "export": _exported}


# -- what no class of a tensor reaches, as the page says: param_sync() before it -------------------


def _by_extension(model, x, rank):
    """What C++ does with a tensor that it is given."""
    with torch._C.DisableTorchFunctionSubclass():
        return model.first.weight * 2


def _transformed_alone(model, x, rank):
    return torch.func.grad(lambda weight: weight.square().sum())(model.first.weight)


SAID = {
    "compiled extension": _by_extension,
    "scripted function": lambda model, x, rank: _doubled(model.first.weight),
    "method of a module that is scripted later": lambda model, x, rank: torch.jit.script(
        model.first
    ).forward(x),
    "weight as an argument of torch.func": _transformed_alone,
}

"""Permute channels before pruning, so that masks of 2:4 keep more magnitude.

Source: Pool and Yu, "Channel Permutations for N:M Sparsity", NeurIPS 2021. Which weights share a
group of four is the order of the input channels, and between two layers that order is free: the
rows of the layers before are permuted with the columns of the layers after. ``torch.fx`` traces the
model, in training and in evaluation mode. Each tensor between layers has a set of channels; layers
and elementwise operations join the sets that must have one order; what is not known here (a
concatenation, a reshape, the model's inputs and outputs, tied weights, hooks) fixes a set.

The search is greedy: in each round the best swaps of two channels between groups, at most one for
a group, until none is left. It has no randomness and no clock, so ranks with the same weights
choose the same order. The paper also leaves local optima by random swaps; that is not done.

Convolutions are taken to have inputs with a batch.
"""

from __future__ import annotations

import json
import operator
import pathlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from apex.contrib.sparsity._pruned import PrunedModel
from apex.normalization import FusedLayerNorm, FusedRMSNorm

_ROUNDS = 24
_WORK = 2**28  # element operations of a round, 0.3 s on one CPU thread: rows are sampled to it

_CONVOLUTIONS: dict[Any, int] = {nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}
_POOLS: dict[Any, int] = {
    **dict.fromkeys((nn.MaxPool1d, nn.AvgPool1d, nn.AdaptiveAvgPool1d, F.max_pool1d), 1),
    **dict.fromkeys((nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d), 2),
    **dict.fromkeys((F.max_pool2d, F.avg_pool2d, F.adaptive_avg_pool2d), 2),
    **dict.fromkeys((nn.MaxPool3d, nn.AvgPool3d, nn.AdaptiveAvgPool3d), 3),
}
_LAYER_NORMS = (nn.LayerNorm, nn.RMSNorm, FusedLayerNorm, FusedRMSNorm)
_ELEMENTWISE: set[Any] = {
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Mish, nn.Hardswish),
    *(nn.Hardsigmoid, nn.Hardtanh, nn.Sigmoid, nn.Tanh, nn.Softplus, nn.Identity, nn.Dropout),
    *(torch.relu, torch.sigmoid, torch.tanh, torch.relu_, F.relu, F.relu6, F.leaky_relu, F.elu),
    *(F.gelu, F.silu, F.mish, F.hardswish, F.hardsigmoid, F.softplus, F.dropout),
    *("relu", "relu_", "sigmoid", "tanh", "contiguous", "float", "half", "bfloat16"),
    *(operator.add, operator.iadd, operator.sub, operator.mul, operator.imul, operator.truediv),
    *(torch.add, torch.sub, torch.mul, torch.div, "add", "add_", "sub", "mul", "mul_", "div"),
}
_TENSORS = {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}


@dataclass(eq=False)
class _Channels:
    """Channels that have one order wherever they occur."""

    size: int
    outputs: list[str] = field(default_factory=list)  # layers: first dimension of their tensors
    inputs: list[str] = field(default_factory=list)  # layers: second dimension of their weight
    fixed: str = ""  # why they must stay as they are
    joined: _Channels | None = None  # what this set has become a part of

    def root(self) -> _Channels:
        return self if self.joined is None else self.joined.root()

    def fix(self, why: str) -> None:
        root = self.root()
        root.fixed = root.fixed or why

    def join(self, other: _Channels) -> None:
        one, two = self.root(), other.root()
        if one is two:
            return
        one.fixed = one.fixed or two.fixed
        if one.size != two.size:
            one.fix(f"{one.size} and {two.size} channels meet")
        one.outputs += two.outputs
        one.inputs += two.inputs
        two.joined = one


class _Value(NamedTuple):
    """A tensor of the graph: its channels, along which dimension (from the end), and its rank."""

    channels: _Channels
    dim: int
    rank: int | None

    @property
    def is_second(self) -> bool:
        return self.rank is not None and self.rank + self.dim == 1


class _Tracer(fx.Tracer):
    proxy_buffer_attributes = True  # else what forward does to a buffer would be done

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        is_apex = m.__module__.startswith("apex.")
        return is_apex or _has_hooks(m) or super().is_leaf_module(m, module_qualified_name)


class _Analysis:
    """The sets of channels of a model."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.sides: dict[tuple[str, str], _Channels] = {}
        self.fixed: dict[str, str] = {}  # why, by layer
        owners: dict[int, list[str]] = {}  # by address: two parameters may share their memory
        tensors = [*model.named_parameters(remove_duplicate=False)]
        for name, tensor in (*tensors, *model.named_buffers(remove_duplicate=False)):
            owners.setdefault(tensor.data_ptr(), []).append(name.rpartition(".")[0])
        for names in owners.values():
            if len(names) > 1:
                self.fixed.update(dict.fromkeys(names, "has tied weights"))
        for name, module in model.named_modules():
            others = {*module._parameters, *module._buffers} - _TENSORS
            if _has_hooks(module):
                self.fixed[name] = "has hooks"
            elif not all("_mma_" in other for other in others):
                self.fixed[name] = "has other tensors than torch's"

    def trace(self) -> None:
        """Follow the channels through the model in both modes; raises what its code raises."""
        # Tracing leaves constants in the model, and forward may store fx's proxies in it.
        before = {module: dict(vars(module)) for module in self.model.modules()}
        try:
            for training in (True, False):
                for module in before:
                    module.training = training
                values: dict[fx.Node, _Value | None] = {}
                for node in _Tracer().trace(self.model).nodes:
                    if node.op == "get_attr":
                        owner = str(node.target).rpartition(".")[0]
                        self.fixed[owner] = "has tensors that are read elsewhere"
                    given = [values[one] for one in node.all_input_nodes]
                    values[node] = self.visit(node, given)
        finally:
            for module, attributes in before.items():
                vars(module).clear()
                vars(module).update(attributes)

    def sets(self) -> list[_Channels]:
        """All sets of channels, in the order of the graph."""
        for (layer, _), channels in self.sides.items():
            if layer in self.fixed:
                channels.fix(f"{layer} {self.fixed[layer]}")
        return list(dict.fromkeys(channels.root() for channels in self.sides.values()))

    def side(self, layer: str, which: str, size: int) -> _Channels:
        """The ``"inputs"`` or ``"outputs"`` of a layer."""
        if (layer, which) not in self.sides:
            self.sides[layer, which] = _Channels(size, **{which: [layer]})  # type: ignore[arg-type]
        return self.sides[layer, which]

    def visit(self, node: fx.Node, given: list[_Value | None]) -> _Value | None:
        """The value of a node; the channels of its inputs are joined or fixed."""
        name, module, kind = str(node.target), None, node.target  # type: str, Any, Any
        if node.op == "call_module":
            module = self.model.get_submodule(name)
            kind = type(module)
        known = [value for value in given if value is not None]
        x = known[0] if known else None
        if len(given) == 1 and (kind is nn.Linear or kind in _CONVOLUTIONS):
            return self.layer(name, module, x, str(node.all_input_nodes[0]))
        if kind in ("size", "dim") or node.args[1:] in (("shape",), ("ndim",)):
            return None
        if kind in _ELEMENTWISE and x is not None and {one and one.dim for one in given} == {x.dim}:
            for value in known[1:]:
                x.channels.join(value.channels)
            return x if len({value.rank for value in known}) == 1 else x._replace(rank=None)
        if x is not None and len(given) == 1 and _is_norm(module, x):
            x.channels.join(self.side(name, "outputs", x.channels.root().size))
            return x
        if x is not None and kind in _POOLS and _POOLS[kind] < -x.dim:
            return x
        if x is not None and x.is_second and _flattens(node, module):
            return _Value(x.channels, -1, 2)
        self.give_up(node, module, known)
        return None

    def give_up(self, node: fx.Node, module: nn.Module | None, known: list[_Value]) -> None:
        """Fix the inputs of what is not known here, and the layers that are in it."""
        for value in known:
            value.channels.fix(f"used by {node}")
        if module is not None:
            inside = [name for name, _ in module.named_modules(prefix=str(node.target))]
            self.fixed.update(dict.fromkeys(inside, "is used where channels are not known"))

    def layer(self, name: str, module: Any, x: _Value | None, source: str) -> _Value:
        """The output of a linear layer or a convolution on the node ``source``."""
        if isinstance(module, nn.Linear):
            size, out, groups, dim = module.in_features, module.out_features, 1, -1
            rank = None if x is None else x.rank
        else:
            size, out, groups = module.in_channels, module.out_channels, module.groups
            dims = _CONVOLUTIONS[type(module)]
            dim, rank = -1 - dims, dims + 2
        result = _Value(self.side(name, "outputs", out), dim, rank)
        if x is not None and x.dim == dim and groups == size == out:  # depthwise
            x.channels.join(result.channels)
            return result
        inputs = self.side(name, "inputs", size) if groups == 1 else result.channels
        if x is not None:
            x.channels.join(inputs)
        if groups != 1:
            inputs.fix(f"{name} has groups")
        elif x is None or x.dim != dim:
            inputs.fix(f"they come from {source}")
        return result


def _has_hooks(module: nn.Module) -> bool:
    """Whether its call is more than its class's ``forward``."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(vars(module).get(name) for name in ("forward", *hooks))


def _is_norm(module: nn.Module | None, x: _Value) -> bool:
    """Whether a layer normalizes each channel of ``x`` by itself, or all of them together."""
    size = x.channels.root().size
    if isinstance(module, _LAYER_NORMS):
        return x.dim == -1 and tuple(module.normalized_shape) == (size,)
    if not isinstance(module, _BatchNorm) or getattr(module, "channel_last", False):
        return False
    return x.is_second and module.num_features == size


def _flattens(node: fx.Node, module: nn.Module | None) -> bool:
    """Whether all dimensions but the first become one."""
    if isinstance(module, nn.Flatten):
        return (module.start_dim, module.end_dim) == (1, -1)
    if node.target in (torch.flatten, "flatten"):
        return (node.args[1:], node.kwargs) in (((1,), {}), ((), {"start_dim": 1}))
    if node.target not in ("view", "reshape") or len(node.args) != 3 or node.args[2] != -1:
        return False
    x, first, _ = node.args  # x.view(x.size(0), -1) or x.view(x.shape[0], -1)
    if isinstance(first, fx.Node) and first.target is operator.getitem and first.args[1] == 0:
        return isinstance(first.args[0], fx.Node) and first.args[0].args == (x, "shape")
    return isinstance(first, fx.Node) and (first.target, first.args) == ("size", (x, 0))


# -- the search ------------------------------------------------------------------------------------


def kept(matrix: torch.Tensor) -> float:
    """Return the magnitude that a mask of 2:4 keeps of ``(rows, channels)``."""
    largest = matrix.abs().reshape(-1, 4).topk(2, dim=1).values
    return float(largest.sum(dtype=torch.float64))


def best_order(matrix: torch.Tensor) -> torch.Tensor:
    """Search an order of the columns by which 2:4 keeps more: which channel comes where."""
    step = -(-matrix.shape[0] * matrix.shape[1] ** 2 // _WORK)
    columns = matrix[::step].abs().float().t().contiguous()
    order = torch.arange(len(columns), device=matrix.device)
    for _ in range(_ROUNDS):
        swaps = _swaps(columns[order])
        if not swaps:
            break
        left, right = torch.tensor(swaps, device=matrix.device).t()
        order[left], order[right] = order[right], order[left]
    return order


def _swaps(columns: torch.Tensor) -> list[tuple[int, int]]:
    """Swaps of two positions that gain magnitude, the best first; each group takes part in one.

    With a >= b the largest of the three entries that stay, a group keeps a + max(b, new), and
    2 max(b, new) = b + new + abs(b - new): sums over rows are distances in the 1-norm.
    """
    groups = columns.view(-1, 4, columns.shape[1])
    first, second, third, _ = groups.sort(dim=1, descending=True).values.chunk(4, dim=1)
    a = torch.where(groups >= first, second, first).flatten(0, 1)
    b = torch.where(groups >= second, third, second).flatten(0, 1)
    sums = b.sum(1)[:, None] + columns.sum(1) + torch.cdist(b, columns, p=1.0)
    after = a.sum(1)[:, None] + sums / 2
    before = (first + second).sum((1, 2))
    gain = (after + after.t()).view(len(groups), 4, len(groups), 4).transpose(1, 2).flatten(2)
    gain, which = (gain - before[:, None, None] - before[:, None]).max(dim=2)
    gain = gain.triu(1)  # not of a group with itself
    pairs = (gain > 1e-5 * before.mean()).nonzero()  # float32 sums are off by less
    pairs = pairs[gain[tuple(pairs.t())].argsort(descending=True, stable=True)]
    found: list[tuple[int, int]] = []
    used: set[int] = set()
    for (one, two), entry in zip(pairs.tolist(), which[tuple(pairs.t())].tolist(), strict=True):
        if not used & {one, two}:
            used |= {one, two}
            found.append((4 * one + entry // 4, 4 * two + entry % 4))
    return found


# -- the model -------------------------------------------------------------------------------------


@torch.no_grad()
def permute(pruned: PrunedModel, folder: str | None) -> int:
    """Permute what can be, so that pruned layers keep more; return how many of them.

    What was done is saved in ``folder``, if it is given.
    """
    model, pruned_layers = pruned.model, [one.module for one in pruned.pruned]
    try:
        analysis = _Analysis(model)
        analysis.trace()
    except Exception as error:  # noqa: BLE001  the model's code, which runs with fx's proxies
        cause = str(error).partition("\n")[0]
        pruned.log(f"channels are not permuted, for torch.fx cannot trace the model: {cause}", 1)
        return 0
    report: list[dict[str, Any]] = []
    count = 0
    for channels in analysis.sets():
        layers = [model.get_submodule(name) for name in channels.inputs]
        matrices = [
            _matrix(layer) for layer in layers if any(layer is one for one in pruned_layers)
        ]
        if not matrices:
            continue
        free = () if channels.fixed else _tensors(model, channels)
        tensors = [(one, dim, pruned.permuted_with(one)) for one, dim in free]
        if any(others is None for _, _, others in tensors):
            channels.fix("the optimizer's state has another shape than a weight")
        entry: dict[str, Any] = {"outputs_of": channels.outputs, "inputs_of": channels.inputs}
        text = f"did not permute the inputs of {', '.join(channels.inputs)}: "
        if not channels.fixed:
            matrix = torch.cat(matrices)
            order = best_order(matrix)
            before, after = kept(matrix), kept(matrix[:, order])
            entry |= {"kept_before": before, "kept_after": after, "order": order.tolist()}
            if after > before:
                for tensor, dim, others in tensors:
                    tensor.copy_(tensor.index_select(dim, order))
                    for one in others or ():  # .data: not counted as somebody's write by amp
                        one.data.copy_(one.index_select(dim, order))
                count += len(matrices)
                text = f"permuted the inputs of {', '.join(channels.inputs)}: "
                channels.fixed = f"{after / before - 1.0:.2%} more magnitude is kept"
            else:
                channels.fixed = "no better order was found"
        entry["result"] = channels.fixed
        report.append(entry)
        pruned.log(text + channels.fixed, 2)
    pruned.log(f"permuted the input channels of {count} of {len(pruned_layers)} pruned weights", 1)
    if folder is not None:
        path = pathlib.Path(folder, "model_offline_permutation_graph.json")
        path.write_text(json.dumps(report, indent=1))
    return count


def _matrix(layer: nn.Module) -> torch.Tensor:
    """The layer's weight as a matrix ``(all else, input channels)``."""
    weight = layer.get_parameter("weight").detach().float()
    return weight.movedim((0, 1), (-2, -1)).reshape(-1, weight.shape[1])


def _tensors(model: nn.Module, channels: _Channels) -> Iterator[tuple[torch.Tensor, int]]:
    """The tensors that have the channels, and along which dimension."""
    for name in channels.inputs:
        yield model.get_submodule(name).get_parameter("weight"), 1
    for name in channels.outputs:
        module = model.get_submodule(name)
        for key, tensor in {**module._parameters, **module._buffers}.items():
            if tensor is not None and tensor.dim() and key in _TENSORS:
                yield tensor, 0

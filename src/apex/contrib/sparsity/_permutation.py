"""Permute channels before pruning, so that masks of 2:4 keep more magnitude.

Source: Pool and Yu, "Channel Permutations for N:M Sparsity", NeurIPS 2021. Which weights share a
group of four is the order of the input channels, and between two layers that order is free: the
rows of the layer before are permuted with the columns of the layers after. ``torch.fx`` traces the
model, and each layer's output is followed through norms, pools, depthwise convolutions and
elementwise functions to the layers that use it. Where it comes to anything else (a sum of two
tensors, a concatenation, a reshape, the model's output), its order stays.

The search is greedy: in each round the best swaps of two channels between groups, at most one for
a group, until none is left. It has no randomness and no clock, so ranks with the same weights
choose the same order. The paper also leaves local optima by random swaps; that is not done.

Convolutions are taken to have inputs with a batch.
"""

from __future__ import annotations

import json
import pathlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from apex._compat import private
from apex.contrib.sparsity._pruned import PrunedModel
from apex.normalization import FusedLayerNorm, FusedRMSNorm

_ROUNDS = 24
_WORK = 2**28  # element operations of a round, 0.3 s on one CPU thread: rows are sampled to it

# By the number of dimensions after the channels.
_LAYERS: dict[Any, int] = {nn.Linear: 0, nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}
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
}
_TENSORS = {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}


@dataclass
class _Channels:
    """The output channels of one layer."""

    outputs: list[str]  # layers: first dimension of their tensors
    inputs: list[str] = field(default_factory=list)  # layers: second dimension of their weight
    fixed: str = ""  # why their order has to stay


class _Tracer(fx.Tracer):
    proxy_buffer_attributes = True  # else what forward does to a buffer would be done

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        is_apex = m.__module__.startswith("apex.")
        return is_apex or _has_hooks(m) or super().is_leaf_module(m, module_qualified_name)


def _has_hooks(module: nn.Module) -> bool:
    """Whether its call is more than its class's ``forward``."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(vars(module).get(name) for name in ("forward", *hooks))


def _trace(model: nn.Module) -> fx.Graph:
    """The graph of a model; raises what its code raises, or if evaluation has another one."""
    # Tracing leaves constants in the model, and forward may store fx's proxies in it.
    before = {module: dict(vars(module)) for module in model.modules()}
    graphs = []
    for training in (True, False):
        for module in before:
            module.training = training
        try:
            graphs.append(_Tracer().trace(model))
        finally:
            for module, attributes in before.items():
                vars(module).clear()
                vars(module).update(attributes)
    one, other = ([(n.op, n.target, str(n.all_input_nodes)) for n in g.nodes] for g in graphs)
    if one != other:
        raise RuntimeError("it calls other layers in training than in evaluation mode")
    return graphs[0]


def _fixed_layers(model: nn.Module, graph: fx.Graph) -> dict[str, str]:
    """Layers whose tensors cannot be permuted, and why."""
    fixed: dict[str, str] = {}
    for name, module in model.named_modules():
        others = {*module._parameters, *module._buffers} - _TENSORS
        if _has_hooks(module):
            fixed[name] = "has hooks"
        elif not all("_mma_" in other for other in others):
            fixed[name] = "has other tensors than torch's"
    owners: dict[int, list[str]] = {}  # by address: two parameters may share their memory
    tensors = [*model.named_parameters(remove_duplicate=False)]
    for name, tensor in (*tensors, *model.named_buffers(remove_duplicate=False)):
        owners.setdefault(tensor.data_ptr(), []).append(name.rpartition(".")[0])
    for names in owners.values():
        if len(names) > 1:
            fixed.update(dict.fromkeys(names, "has tied weights"))
    calls: Counter[str] = Counter()
    for node in graph.nodes:
        target = str(node.target)
        if node.op == "get_attr":
            fixed[target.rpartition(".")[0]] = "has tensors that are read elsewhere"
        elif node.op == "call_module":
            inside = model.get_submodule(target).named_modules(prefix=target)
            calls.update(name for name, _ in inside)
    return fixed | {name: "is called more than once" for name in calls if calls[name] > 1}


def _find_channels(model: nn.Module) -> list[_Channels]:
    """The output channels of all layers, in the order of the graph."""
    graph = _trace(model)
    fixed, found = _fixed_layers(model, graph), []
    for node in graph.nodes:
        layer: Any = model.get_submodule(node.target) if node.op == "call_module" else None
        if type(layer) in _LAYERS and getattr(layer, "groups", 1) == 1:
            channels = _follow(model, node, layer)
            for name in (*channels.outputs, *channels.inputs):
                if name in fixed:
                    channels.fixed = f"{name} {fixed[name]}"
            found.append(channels)
    return found


def _follow(model: nn.Module, start: fx.Node, layer: Any) -> _Channels:
    """Follow the output of ``layer`` to the layers that use it."""
    channels = _Channels([str(start.target)])
    size, after = layer.weight.shape[0], _LAYERS[type(layer)]
    nodes = [*start.users]
    for node in nodes:  # which grows
        name, module = str(node.target), None
        if node.op == "call_module":
            module = model.get_submodule(name)
        kind: Any = node.target if module is None else type(module)
        same_dim = _LAYERS.get(kind) == after
        if len(node.all_input_nodes) > 1:
            channels.fixed = f"used by {node}"
        elif same_dim and getattr(module, "groups", 1) == 1:
            channels.inputs.append(name)
        elif (same_dim and _is_depthwise(module)) or _is_norm(module, size, after):
            channels.outputs.append(name)
            nodes += node.users
        elif kind in _ELEMENTWISE or _POOLS.get(kind, after + 1) <= after:
            nodes += node.users
        else:
            channels.fixed = f"used by {node}"
    return channels


def _is_depthwise(layer: Any) -> bool:
    return bool(layer.groups == layer.in_channels == layer.out_channels)


def _is_norm(module: nn.Module | None, size: int, after: int) -> bool:
    """Whether a layer normalizes each channel by itself, or all of them together."""
    if isinstance(module, _LAYER_NORMS):
        return after == 0 and tuple(module.normalized_shape) == (size,)
    if not isinstance(module, private.BatchNorm) or getattr(module, "channel_last", False):
        return False
    return after > 0  # after a linear layer the channels are the last dimension


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
        left, right = torch.tensor(swaps, device=matrix.device, dtype=torch.int64).t()
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
    model, pruned_layers = pruned.model, {one.module for one in pruned.pruned}
    try:
        found = _find_channels(model)
    except Exception as error:  # noqa: BLE001  the model's code, which runs with fx's proxies
        cause = str(error).partition("\n")[0]
        pruned.log(f"did not permute channels, because torch.fx cannot trace the model: {cause}", 1)
        return 0
    report: list[dict[str, Any]] = []
    count = 0
    for channels in found:
        layers = [model.get_submodule(name) for name in channels.inputs]
        matrices = [_matrix(layer) for layer in layers if layer in pruned_layers]
        if not matrices and not channels.fixed:
            continue
        entry: dict[str, Any] = {"outputs_of": channels.outputs, "inputs_of": channels.inputs}
        verb, result = "did not permute", channels.fixed
        if not channels.fixed:
            matrix = torch.cat(matrices)
            order = best_order(matrix)
            before, after = kept(matrix), kept(matrix[:, order])
            entry |= {"kept_before": before, "kept_after": after, "order": order.tolist()}
            if after <= before:
                result = "no better order was found"
            elif not _reorder(pruned, channels, order):
                result = "the optimizer's state has another shape than a weight"
            else:
                verb, result = "permuted", f"{after / before - 1.0:.2%} more magnitude is kept"
                count += len(matrices)
        report.append({**entry, "result": result})
        pruned.log(f"{verb} the outputs of {', '.join(channels.outputs)}: {result}", 2)
    pruned.log(f"permuted the input channels of {count} of {len(pruned.pruned)} pruned weights", 1)
    if folder is not None:
        path = pathlib.Path(folder, "model_offline_permutation_graph.json")
        path.write_text(json.dumps(report, indent=1))
    return count


def _reorder(pruned: PrunedModel, channels: _Channels, order: torch.Tensor) -> bool:
    """Permute all tensors that have the channels; False, and nothing done, where one cannot be."""
    tensors = [
        (one, dim, pruned.permuted_with(one)) for one, dim in _tensors(pruned.model, channels)
    ]
    if any(others is None for _, _, others in tensors):
        return False
    for tensor, dim, others in tensors:
        tensor.copy_(tensor.index_select(dim, order))
        for one in others or ():  # .data: not counted as somebody's write by amp
            one.data.copy_(one.index_select(dim, order))
    return True


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

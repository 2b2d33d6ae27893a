"""Convert models to 16 bits by hand, and copy between model parameters and float32 masters.

A training loop with these functions keeps two lists from :func:`prep_param_lists`. It calls
backward on the model, :func:`model_grads_to_master_grads`, steps an optimizer of the masters, and
calls :func:`master_params_to_model_params`. ``apex.amp`` at O2 does the same by itself.

Everything works on every device. The copies are one foreach call for each list.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from apex._compat import private
from apex.amp.casting import cpu_float16
from apex.amp.casting.containers import applier
from apex.amp.legacy.initialize import to_type
from apex.ops.lists.flat import unflatten

#: ``torch.nn.utils.clip_grad_norm_``, as it was called in old versions of torch.
clip_grad_norm = torch.nn.utils.clip_grad_norm_


class tofp16(torch.nn.Module):
    """A layer that casts its input to float16."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return ``input`` in float16."""
        return input.half()


def BN_convert_float(module: torch.nn.Module) -> torch.nn.Module:
    """Convert all batch norms that have weights to float32, with their statistics, in place.

    Returns:
        ``module``.
    """
    for layer in module.modules():
        if _keeps_float(layer):
            layer.float()
    return module


def _keeps_float(layer: torch.nn.Module) -> bool:
    return isinstance(layer, private.BatchNorm) and layer.affine is True


def network_to_half(network: torch.nn.Module) -> torch.nn.Sequential:
    """Convert a model to float16 in place, and add a layer before it that casts its input.

    Batch norms that have weights stay float32 without rounding; the original converted them to
    float16 and back. Batch norms without weights become float16.

    Args:
        network: A model with one tensor as its input.

    Returns:
        ``torch.nn.Sequential(tofp16(), network)``. Keys of its state dict begin with ``1.``.

    Example:
        >>> model = network_to_half(torch.nn.Linear(4, 2))
        >>> list(model.state_dict()), model(torch.ones(1, 4)).dtype
        (['1.weight', '1.bias'], torch.float16)
    """
    half = convert_network(network, torch.float16)
    return torch.nn.Sequential(tofp16(), BN_convert_float(half))


def convert_module(module: torch.nn.Module, dtype: torch.dtype) -> None:
    """Convert a module's floating parameters, gradients and buffers, but not its children's.

    Parameters and buffers stay the same objects. Integer tensors do not change.

    Args:
        module: The module.
        dtype: float16, bfloat16, float32 or float64.

    Raises:
        TypeError: ``dtype`` is not a floating dtype.
    """
    _check_dtype("convert_module", dtype)
    for param in module.parameters(recurse=False):
        if param.is_floating_point():
            grad, param.grad = param.grad, None
            param.data = param.data.to(dtype)
            param.grad = None if grad is None else grad.to(dtype)
    for buffer in module.buffers(recurse=False):
        if buffer.is_floating_point():
            buffer.data = buffer.data.to(dtype)


def _check_dtype(name: str, dtype: torch.dtype) -> None:
    if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(
            f"{name}: dtype was {dtype!r}; pass a floating dtype, such as torch.float16."
        )


def convert_network(network: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """Convert a model in place, except for batch norms that have weights.

    Args:
        network: The model.
        dtype: float16, bfloat16, float32 or float64.

    Returns:
        ``network``.

    Raises:
        TypeError: ``dtype`` is not a floating dtype. Nothing is converted.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
        >>> model = convert_network(model, torch.bfloat16)
        >>> model[0].weight.dtype, model[1].weight.dtype
        (torch.bfloat16, torch.float32)
    """
    _check_dtype("convert_network", dtype)
    cpu_float16.begin(dtype, {param.device.type for param in network.parameters()})
    for module in network.modules():
        if not _keeps_float(module):
            convert_module(module, dtype)
        flatten = getattr(module, "flatten_parameters", None)  # recurrent layers, apex.RNN's too
        if callable(flatten):
            flatten()
    return network


class FP16Model(torch.nn.Module):
    """Convert a model to float16, and cast its inputs. Outputs are not cast.

    Only floating tensors are cast, in containers too. The original also cast token ids to float16,
    and did not support keyword arguments and arguments that are not tensors.

    Args:
        network: The model. It is converted in place, except for batch norms that have weights. Keys
            of the state dict begin with ``network.``.

    Example:
        >>> model = FP16Model(torch.nn.Embedding(10, 4))
        >>> model(torch.tensor([7])).dtype
        torch.float16
    """

    def __init__(self, network: torch.nn.Module) -> None:
        super().__init__()
        self.network = convert_network(network, torch.float16)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the model with floating tensors in float16."""
        cast = functools.partial(to_type, torch.float16)
        return self.network(*applier(inputs, cast), **applier(kwargs, cast))


def conversion_helper(val: Any, conversion: Callable[[Any], Any]) -> Any:
    """Apply ``conversion`` to ``val``, or to all that is in it if it is a list or a tuple."""
    if not isinstance(val, (list, tuple)):
        return conversion(val)
    items = [conversion_helper(item, conversion) for item in val]
    return type(val)(*items) if hasattr(val, "_fields") else type(val)(items)


def fp32_to_fp16(val: Any) -> Any:
    """Convert float32 tensors to float16, in nested lists and tuples too; keep all others.

    Example:
        >>> a, b = fp32_to_fp16((torch.ones(2), torch.tensor([7])))
        >>> a.dtype, b.dtype
        (torch.float16, torch.int64)
    """
    return conversion_helper(val, lambda item: _cast(item, torch.float32, torch.float16))


def fp16_to_fp32(val: Any) -> Any:
    """Convert float16 tensors to float32, in nested lists and tuples too; keep all others."""
    return conversion_helper(val, lambda item: _cast(item, torch.float16, torch.float32))


def _cast(item: Any, old: torch.dtype, new: torch.dtype) -> Any:
    return item.to(new) if isinstance(item, torch.Tensor) and item.dtype == old else item


class FP16_Module(torch.nn.Module):
    """Convert a model to float16, cast float32 inputs to float16, and float16 outputs to float32.

    It comes from the first releases of 2018. Batch norms become float16 too.

    Args:
        module: The model, which is converted in place. Keys of the state dict begin with
            ``module.``.

    Example:
        >>> model = FP16_Module(torch.nn.Linear(4, 2))
        >>> model(torch.ones(1, 4)).dtype
        torch.float32
    """

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module.half()
        cpu_float16.begin(torch.float16, {param.device.type for param in module.parameters()})

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module. Keyword arguments are not cast."""
        return fp16_to_fp32(self.module(*fp32_to_fp16(inputs), **kwargs))


def backwards_debug_hook(grad: torch.Tensor) -> None:
    """Raise ``RuntimeError``: a hook of a master, which must get no gradient by backward."""
    raise RuntimeError(
        "A master parameter received a gradient in a backward pass. Compute the loss with the "
        "model's parameters, and call model_grads_to_master_grads."
    )


def to_python_float(t: Any) -> Any:
    """Return the number in a tensor of one element, or the first element of a sequence ``t``."""
    return t.item() if hasattr(t, "item") else t[0]


def prep_param_lists(
    model: torch.nn.Module, flat_master: bool = False
) -> tuple[list[torch.nn.Parameter], list[torch.Tensor]]:
    """List the parameters that require gradients, and make float32 copies of them, the masters.

    float32 parameters have masters too. Masters of float64 parameters are float64; the original
    rounded them to float32.

    Args:
        model: The model.
        flat_master: Make one 1-D master of all parameters, with zeros in ``grad``. In the original
            ``grad`` was uninitialised memory.

    Returns:
        A list of the model's parameters, and a list of their masters. A flat master is a list of
        one ``torch.nn.Parameter``.

    Raises:
        ValueError: You asked for a flat master, and no parameter requires a gradient or they are
            on several devices.

    Example:
        >>> model = torch.nn.Linear(4, 2).half()
        >>> params, masters = prep_param_lists(model)
        >>> model(torch.ones(1, 4).half()).sum().backward()
        >>> model_grads_to_master_grads(params, masters)
        >>> masters[1].grad
        tensor([1., 1.])
        >>> torch.optim.SGD(masters, lr=0.1).step()
        >>> master_params_to_model_params(params, masters)
    """
    params = [param for param in model.parameters() if param.requires_grad]
    wide = [torch.promote_types(param.dtype, torch.float32) for param in params]
    copies = [p.detach().to(dtype, copy=True) for p, dtype in zip(params, wide, strict=True)]
    if not flat_master:
        return params, [copy.requires_grad_() for copy in copies]
    devices = {param.device for param in params}
    if len(devices) != 1:
        found = f"they are on {sorted(map(str, devices))}" if devices else "there are none"
        raise ValueError(
            "prep_param_lists: a flat master needs parameters that require gradients, all on one "
            f"device; {found}. Pass flat_master=False."
        )
    master = torch.nn.Parameter(torch.cat([copy.reshape(-1) for copy in copies]))
    master.grad = torch.zeros_like(master)
    return params, [master]


@torch.no_grad()
def model_grads_to_master_grads(
    model_params: Iterable[torch.Tensor],
    master_params: Iterable[torch.Tensor],
    flat_master: bool = False,
) -> None:
    """Copy the model's gradients into the masters' gradients, in the masters' dtype.

    If a parameter has no gradient (None), its master has none either. A flat master has zeros in
    its place, or no gradient if no parameter has one. The original raised an AttributeError.

    Args:
        model_params: The first list that :func:`prep_param_lists` returned.
        master_params: The second list.
        flat_master: The value that you passed to :func:`prep_param_lists`.

    Raises:
        ValueError: The lists do not match. Nothing changes. The original ignored the rest of a
            longer list.
    """
    params, masters = list(model_params), list(master_params)
    _check_lists("model_grads_to_master_grads", params, masters, flat_master)
    have = [param.grad is not None for param in params]
    for master, has_grad in zip(masters, [any(have)] if flat_master else have, strict=True):
        if not has_grad:
            master.grad = None
        elif master.grad is None:
            master.grad = torch.zeros_like(master)
        elif flat_master:
            master.grad.zero_()
    if any(have):
        grads: list[Any] = [master.grad for master in masters]
        parts = unflatten(grads[0], params) if flat_master else grads
        both = [(to, p.grad) for to, p in zip(parts, params, strict=True) if p.grad is not None]
        private.foreach_copy_(
            [to for to, _ in both], [x.to_dense() if x.is_sparse else x for _, x in both]
        )


@torch.no_grad()
def master_params_to_model_params(
    model_params: Iterable[torch.Tensor],
    master_params: Iterable[torch.Tensor],
    flat_master: bool = False,
) -> None:
    """Copy the values of the masters into the model's parameters, rounded to their dtypes.

    See :func:`model_grads_to_master_grads` for the arguments and errors.
    """
    params, masters = list(model_params), list(master_params)
    _check_lists("master_params_to_model_params", params, masters, flat_master)
    if params:
        private.foreach_copy_(params, unflatten(masters[0], params) if flat_master else masters)


def _check_lists(
    name: str, params: list[torch.Tensor], masters: list[torch.Tensor], flat: bool
) -> None:
    shapes = [list(param.shape) for param in params]
    if flat:
        shapes = [[sum(param.numel() for param in params)]]
    found = [list(master.shape) for master in masters]
    if shapes == found:
        return
    wrong = f"{len(found)} masters, and {len(shapes)} are needed"
    if len(found) == len(shapes):
        pairs = zip(found, shapes, strict=True)
        wrong = next(f"a master of shape {a} instead of {b}" for a, b in pairs if a != b)
    raise ValueError(
        f"{name}: the masters do not fit the {len(params)} model parameters: {wrong} "
        f"(flat_master={flat}). Pass the two lists of prep_param_lists and its flat_master."
    )

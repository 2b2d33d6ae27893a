"""Autocast kernels for functions that torch's autocast does not cast on a device.

What torch does not cast on a device and Apex did (softmax and its family on the CPU, ``gelu`` and
``std`` everywhere, recurrent layers on the CPU) is registered here under the same dispatch key that
autocast itself uses. So functions that are not listed need no Python, and casts follow autocast's
own state into ``torch.compile``, checkpoint recomputation and other threads. In-place functions of
Apex's float list cannot give float32: on 16-bit tensors O1 refuses them, as Apex did.

A kernel serves the whole process, so it passes the call on unchanged when the casts in force are
not amp's (:func:`apex.amp.casting.switches.current`). Apex's lists were made for float16; bfloat16
is cast only where ``torch.autocast`` raises an error (operands of several types, an LSTM on a CPU
without bfloat16 instructions), as O4 computes what ``torch.autocast`` computes. A process that
casts to bfloat16 alone has no other kernels. An operator that torch casts is left alone.

Source of the lists: the op table that torch 2.13 ships for CUDA, and ``apex.amp.lists``.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce
from typing import Any

import torch

from apex._compat import private
from apex.amp.casting import switches
from apex.amp.casting.containers import with_items
from apex.amp.levels import HALF_TYPES

CASTABLE = (torch.float32, *HALF_TYPES)
_FLOAT16 = (torch.float16,)

_Cast = Callable[[Any], Any]
_Convert = Callable[[Any], _Cast]  # from all arguments, what converts one

_FLOAT_EVERYWHERE = (
    "gelu std std.dim std.correction var var.dim var.correction ctc_loss.IntList ctc_loss.Tensor"
)
_FLOAT_ON_CPU = (
    "softplus softmax.int log_softmax.int layer_norm group_norm rms_norm cosine_similarity "
    "acos asin cosh erfinv exp expm1 log log10 log1p log2 logsumexp reciprocal rsqrt sinh tan "
    "pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar cumprod cumsum dist renorm "
    "norm.Scalar norm.ScalarOpt_dim norm.ScalarOpt_dim_dtype norm.ScalarOpt_dtype "
    "linalg_vector_norm linalg_matrix_norm linalg_matrix_norm.str_ord frobenius_norm.dim "
    "nuclear_norm nuclear_norm.dim pdist sum sum.dim_IntList prod prod.dim_int "
    "upsample_nearest1d.vec upsample_nearest2d.vec upsample_nearest3d.vec "
    "_upsample_nearest_exact1d.vec _upsample_nearest_exact2d.vec _upsample_nearest_exact3d.vec "
    "upsample_linear1d.vec upsample_bilinear2d.vec upsample_trilinear3d.vec "
    "upsample_bicubic2d.vec _upsample_bilinear2d_aa.vec _upsample_bicubic2d_aa.vec"
)
_HALF_ON_CPU = (
    "lstm.input lstm.data addmv addr mv einsum chain_matmul linalg_multi_dot "
    "gru.input gru.data rnn_tanh.input rnn_tanh.data rnn_relu.input rnn_relu.data "
    "lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell"
)
_LSTM = "lstm.input lstm.data"
_NESTED = "_nested_tensor_from_mask_left_aligned"
_PROMOTE_ON_CPU = "addcdiv addcmul atan2"
_ONE_TYPE = "bilinear dot vdot linalg_cross tensordot index_put scatter_add"
_REFUSED_IN_PLACE = (
    "acos_ asin_ cosh_ exp_ expm1_ log_ log10_ log2_ reciprocal_ rsqrt_ sinh_ tan_ erfinv_ "
    "pow_.Scalar pow_.Tensor cumprod_ cumsum_ renorm_"
)

_libraries: dict[torch.dtype, torch.library.Library] = {}  # what casts to it need in addition
_lock = threading.Lock()


def install(dtype: torch.dtype) -> None:
    """Register the kernels that casts to ``dtype`` need, once per process.

    Undone by :func:`uninstall`.
    """
    with _lock:  # another thread that initialises must not go on with half of them
        for needed in (torch.bfloat16, torch.float16):
            if needed not in _libraries:
                library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
                _register_all(library, needed)
                _libraries[needed] = library
            if needed == dtype:
                return


def installed() -> tuple[torch.dtype, ...]:
    """The types for which kernels are registered."""
    return tuple(_libraries)


def uninstall() -> None:
    """Take the kernels back."""
    with _lock:
        while _libraries:
            _libraries.popitem()[1]._destroy()  # type: ignore[no-untyped-call]


def _register_all(library: torch.library.Library, dtype: torch.dtype) -> None:
    """Register what casts to bfloat16 need, or what those to float16 need in addition."""
    if dtype == torch.bfloat16:
        _register(library, _ONE_TYPE, "AutocastCPU", partial(_casting, _to_widest, HALF_TYPES))
        if not private.is_mkldnn_bf16_supported():
            _register(library, _LSTM, "AutocastCPU", partial(_casting, _to_half, HALF_TYPES))
        _register(library, _NESTED, "AutocastCPU", _unnested)
        return
    for device in switches.device_types():
        key = f"Autocast{device.upper()}"
        _register(library, _REFUSED_IN_PLACE, key, _refusing)
        _register(library, _FLOAT_EVERYWHERE, key, partial(_casting, _to_float, _FLOAT16))
    _register(library, _FLOAT_ON_CPU, "AutocastCPU", partial(_casting, _to_float, _FLOAT16))
    _register(library, _HALF_ON_CPU, "AutocastCPU", partial(_casting, _to_half, _FLOAT16))
    _register(library, _PROMOTE_ON_CPU, "AutocastCPU", partial(_casting, _to_widest, _FLOAT16))


def _register(library: Any, names: str, key: str, make: Callable[[Any, Any, str], Any]) -> None:
    """Give the operators that torch does not cast kernels, made of operator, keys and device."""
    dispatch_key = getattr(private.DispatchKey, key, None)
    if dispatch_key is None:  # a backend whose autocast has no key of its own
        return
    device = key.removeprefix("Autocast").lower()
    for name in names.split():
        op = operator(name)
        if op is not None and not _has_kernel(op, key):
            kernel = make(op, private.DispatchKeySet(dispatch_key), device)
            skip_frames(kernel)  # met by Dynamo where a graph breaks, as at nn.LSTM
            library.impl(name, kernel, key)


def operator(name: str) -> Any:
    """The operator of ``aten``, given as ``name.overload``; ``None`` if torch has none."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)


def _has_kernel(op: Any, key: str) -> bool:
    return bool(private.dispatch_has_kernel_for_dispatch_key(op.name(), key))


def _casting(
    cast: _Convert, dtypes: tuple[torch.dtype, ...], op: Any, keys: Any, device: str
) -> Callable[..., Any]:
    """A kernel that casts where autocast is to one of ``dtypes``; else it passes the call on."""
    below = private.ExcludeDispatchKeyGuard
    composite = private.DispatchKey.CompositeImplicitAutograd
    is_composite = _has_kernel(op, composite.name)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        # In a trace this thread's casts may be another model's; autocast's type is the traced one.
        dtype = None if switches.current() is None else torch.get_autocast_dtype(device)
        if dtype in dtypes:
            convert = cast((args, tuple(kwargs.values())))
            args = tuple([convert(value) for value in args])
            kwargs = {name: convert(value) for name, value in kwargs.items()}
        if dtype is not torch.float16 and is_composite:  # torch still casts its parts
            return op._op_dk(composite, *args, **kwargs)
        with below(keys):
            return op(*args, **kwargs)

    return kernel


def _unnested(op: Any, keys: Any, device: str) -> Callable[..., Any]:
    """Have ``nn.TransformerEncoder`` make no nested tensor of a padded batch in evaluation.

    torch makes none under autocast on a GPU. On a CPU it does, and then bfloat16 products meet
    float32 norms, which is an error. It asks this function whether it can.
    """
    below = private.ExcludeDispatchKeyGuard

    def kernel(tensor: torch.Tensor, mask: torch.Tensor) -> bool:
        if switches.current() is not None and torch.get_autocast_dtype(device) in HALF_TYPES:
            return False
        with below(keys):
            return bool(op(tensor, mask))

    return kernel


def _refusing(op: Any, keys: Any, device: str) -> Callable[..., Any]:
    """A kernel that refuses to write a result that belongs in float32 into a 16-bit tensor."""
    below = private.ExcludeDispatchKeyGuard
    name = op.overloadpacket.__name__

    def kernel(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.dtype in HALF_TYPES and _is_refused(name):
            function = name.removesuffix("_")
            raise NotImplementedError(
                f"amp: {name} on a {tensor.dtype} tensor, in place: at this level {function} "
                f"computes in float32, and a {tensor.dtype} tensor cannot hold the result. Write x "
                f"= x.{function}(...), which returns float32. Or call x.{name}(...) inside `with "
                "amp.disable_casts():` to compute in 16 bits."
            )
        with below(keys):
            return op(tensor, *args, **kwargs)

    return kernel


def _is_refused(name: str) -> bool:
    """Whether the in-place function was called by the program under O1's own casts.

    torch's derivatives call such functions too, in a backward pass.
    """
    current = switches.current()
    if current is None or current.dtype != torch.float16 or name not in current.rules:
        return False
    return not switches.in_users_block() and private.current_graph_task_id() == -1


def tensors_in(value: Any, among: tuple[torch.dtype, ...] = CASTABLE) -> Iterator[torch.Tensor]:
    """Tensors of a type ``among`` these, in lists and tuples too."""
    if isinstance(value, torch.Tensor):
        if value.dtype in among:
            yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item, among)


def caster(
    dtype: torch.dtype, among: tuple[torch.dtype, ...] = CASTABLE, devices: Sequence[str] = ()
) -> _Cast:
    """What converts :func:`tensors_in` a value to ``dtype``: on ``devices``, or on any."""

    def convert(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            takes_part = value.dtype in among and (not devices or value.device.type in devices)
            return value.to(dtype) if takes_part else value
        if isinstance(value, (list, tuple)):
            items = [convert(item) for item in value]
            if all([new is old for new, old in zip(items, value, strict=True)]):
                return value
            return with_items(value, items)
        return value

    return convert


_WIDEN = caster(torch.float32, HALF_TYPES)
_LEAVE = caster(torch.float32, ())


def _to_float(arguments: Any) -> _Cast:
    asked = [value for values in arguments for value in values if isinstance(value, torch.dtype)]
    # Whoever names a 16-bit result gets torch's own; some norms refuse a wider input with it.
    return _LEAVE if set(asked) & set(HALF_TYPES) else _WIDEN


def _to_half(arguments: Any) -> _Cast:
    device = next((tensor.device.type for tensor in tensors_in(arguments)), "cpu")
    return caster(torch.get_autocast_dtype(device))


def _to_widest(arguments: Any) -> _Cast:
    dtypes = {tensor.dtype for tensor in tensors_in(arguments, (torch.float64, *CASTABLE))}
    return caster(reduce(torch.promote_types, dtypes) if dtypes else torch.float32)


def skip_frames(*functions: Any) -> None:
    """Tell Dynamo not to compile these frames on their own.

    At the top of a compiled model hooks run before the traced frame. Left to itself Dynamo
    compiles them as graphs of their own, whose back ends drop the change of autocast state. When
    the model is inside a compiled parent they are inlined, which this does not change.
    """
    with contextlib.suppress(private.PrivateNameError):  # only compile differs
        skip = private.FrameAction.SKIP
        strategy = private.FrameExecStrategy(skip, skip)
        for function in functions:
            private.set_code_exec_strategy(function.__code__, strategy)

"""Bytes that compiled code moves on a GPU: an operation as its definition, and as its operator.

Each operation stands between two elementwise functions, with which the compiler can fuse it. No GPU
is needed: torch's compiler generates Triton code for fake CUDA tensors, and the loads and stores in
that code are counted, each with the bytes of its whole tensor. So a row that a kernel loads twice
counts twice. An operator reads its arguments and writes its results once. The numbers are bytes for
each element of the first argument, forward + backward; docs/kernels.md has them. It takes names
from inside torch 2.13.

    python -m benchmarks.compiled_bytes [WORD ...]   # operations with one of the words in the name
"""

import contextlib
import re
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch._dynamo.device_interface import CudaInterface
from torch._functorch.aot_autograd import (  # type: ignore[attr-defined]
    aot_function,
    make_boxed_func,
)
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import compile_fx
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils._triton import has_triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from apex.ops.layers import index_mul_2d, rotary, scaled_softmax, swiglu
from apex.ops.losses import cross_entropy, focal_loss
from apex.ops.norms import group_norm, row_norms  # fmt: skip
from tools import quiet_without_reader

ROWS = 4096
H100 = SimpleNamespace(
    name="H100", major=9, minor=0, warp_size=32, multi_processor_count=132,
    regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, max_threads_per_block=1024,
)  # fmt: skip
DRIVER = SimpleNamespace(
    get_current_target=lambda: GPUTarget("cuda", 90, 32),
    utils=SimpleNamespace(get_device_properties=lambda device: {"max_shared_mem": 232448}),
)
Function = Callable[..., Any]


class _Counted(Exception):
    pass


@contextlib.contextmanager
def fake_gpu(mode: FakeTensorMode) -> Iterator[None]:
    """Let the compiler see an H100."""
    answers: dict[str, Any] = {
        "get_device_properties": H100, "get_device_capability": (9, 0), "is_available": True,
        "device_count": 1, "current_device": 0, "_exchange_device": 0, "_maybe_exchange_device": 0,
        "get_rng_state": torch.zeros(16), "set_rng_state": None, "synchronize": None,
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        for owner, name, answer in [
            *((torch.cuda, name, answer) for name, answer in answers.items()),
            (CudaInterface, "get_device_properties", H100),
            (CudaInterface, "get_compute_capability", 90),
            (compile_fx, "fake_tensor_prop", mode),
        ]:
            answered = mock.Mock(return_value=answer)
            stack.enter_context(mock.patch.object(owner, name, answered))
        stack.enter_context(mock.patch.object(type(driver), "active", DRIVER))
        stack.enter_context(V.set_fake_mode(mode))
        stack.callback(has_triton.cache_clear)  # it asks for a GPU once in a process
        has_triton.cache_clear()
        yield


def on_cuda(value: Any) -> Any:
    """The same fake tensors on a GPU."""

    def moved(t: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda:0")

    return tree_map_only(torch.Tensor, moved, value)


def size(*values: Any) -> int:
    """Bytes of all tensors."""
    return sum(t.nbytes for t in tree_leaves(values) if isinstance(t, torch.Tensor))


def moved_by(traced: torch.fx.GraphModule, given: list[Any]) -> int:
    """Bytes that the compiler's code for a graph, which was traced on a CPU, moves on a GPU."""
    traced = torch.fx.GraphModule(traced, traced.graph.__deepcopy__({}))
    total, calls = 0, list[Any]()
    mode = FakeTensorMode()
    with mode:
        for node in traced.graph.nodes:
            node.meta["val"] = on_cuda(node.meta.get("val"))
            if "device" in node.kwargs:
                node.kwargs = {**node.kwargs, "device": torch.device("cuda:0")}
            if getattr(node.target, "namespace", "") == "apex":
                arguments = [argument.meta["val"] for argument in node.all_input_nodes]
                total += size(arguments, node.meta["val"])
        given = on_cuda(given)

    def count(lowered: GraphLowering) -> None:
        nonlocal total
        code = dict(re.findall(r"triton\('(\w+)', '''(.*?)'''", lowered.codegen()[0].value, re.S))
        for kernel, arguments in calls:
            names = re.findall(rf"def {kernel}\((.*?)\)", code[kernel])[0].split(", ")
            for name, argument in zip(names, arguments, strict=False):
                accesses = re.findall(rf"tl\.(?:load|store|atomic_add)\({name} ", code[kernel])
                if accesses:
                    numbers = lowered.get_numel(argument) * lowered.get_dtype(argument).itemsize
                    total += len(accesses) * int(numbers)
        raise _Counted

    def note(wrapper: Any, kernel: str, arguments: list[str], **_: Any) -> None:
        calls.append((kernel, arguments))

    with (
        fake_gpu(mode),
        mock.patch.object(GraphLowering, "compile_to_module", count),
        mock.patch.object(PythonWrapperCodegen, "generate_kernel_call", note),
        torch._inductor.config.patch(fx_graph_cache=False, compile_threads=1),
        contextlib.suppress(_Counted),
    ):
        try:
            compile_fx.compile_fx_inner(traced, given)
        except torch._inductor.exc.InductorError as error:
            raise error.inner_exception from error
    return total


def partition(graph: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
    """Divide forward from backward, as torch.compile does."""
    joint_graph_passes(graph)
    return min_cut_rematerialization_partition(graph, inputs, compiler="inductor", **options)


def measured(function: Function, tensors: list[torch.Tensor]) -> list[float]:
    """Bytes for each element of the first tensor: forward, backward."""
    found = []

    def lowered(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        found.append(moved_by(graph, inputs) / tensors[0].numel())
        return make_boxed_func(graph.forward)

    compiler: Any = lowered
    compiled = aot_function(
        function, compiler, partition_fn=partition, decompositions=select_decomp_table()
    )
    y = compiled(*tensors)
    y.backward(torch.empty_like(y.detach()))
    return found


def cases(columns: int, dtype: torch.dtype) -> dict[str, tuple[Any, ...]]:
    """Operation, its definition on a GPU, its arguments, and what is behind it."""

    def tensor(*shape: int, dtype: torch.dtype = dtype, grad: bool = True) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, requires_grad=grad)

    def layer(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, *_: Any) -> torch.Tensor:
        return F.layer_norm(x, [columns], w, b, 1e-5)

    def rms(x: torch.Tensor, w: torch.Tensor, *_: Any) -> torch.Tensor:
        return F.rms_norm(x, [columns], w, 1e-5)

    def half(y: torch.Tensor) -> torch.Tensor:
        return y * 0.5

    x, row, norm, indexed = tensor(ROWS, columns), tensor(columns), row_norms.OP, index_mul_2d.OP
    scores = tensor(2, 4, ROWS // 8, columns)
    mask = tensor(2, 1, ROWS // 8, columns, dtype=torch.bool, grad=False)
    index = tensor(ROWS, dtype=torch.int64, grad=False)
    heads = tensor(512, 2, columns // 32, 128)
    angles = tensor(512, 128, dtype=torch.float32, grad=False)
    images = tensor(4, 16, 16, columns * 4).permute(0, 3, 1, 2).detach().requires_grad_()
    channels = tensor(columns * 4)
    anchors = (index, tensor(1, dtype=torch.float32, grad=False), columns, 0.25, 2.0, 0.1)
    return {
        "swiglu": (swiglu.OP, swiglu.reference, (x, tensor(ROWS, columns)), half),
        "rotary": (rotary.OP, rotary.reference, (heads, angles, angles, None, 0), half),
        "focal_loss": (focal_loss.OP, focal_loss.reference, (x, *anchors), half),
        "rms_norm": (norm, rms, (x, row, None, [columns], 1e-5, False, dtype), F.silu),
        "layer_norm": (norm, layer, (x, row, row, [columns], 1e-5, True, dtype), F.silu),
        "group_norm": (
            group_norm.OP, group_norm._definition,
            (images, channels, channels, 32, 1e-5, True), half,
        ),
        "cross_entropy": (
            cross_entropy.OP, cross_entropy.reference, (x, index, 0.1, -100), torch.mean
        ),
        "scaled_softmax": (
            scaled_softmax.OP, scaled_softmax.reference, (scores, mask, 0.1, False), half
        ),
        "index_mul_2d": (
            indexed, index_mul_2d.reference, (x, tensor(ROWS // 4, columns), index), half
        ),
    }  # fmt: skip


def between(call: Function, arguments: tuple[Any, ...], after: Function) -> list[float]:
    """Measure ``after(call(a + b, ...))``."""
    x, *rest = arguments
    tensors = [x, torch.empty_like(x, requires_grad=True)]
    tensors += [argument for argument in rest if isinstance(argument, torch.Tensor)]

    def function(a: torch.Tensor, b: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        given = iter(others)
        filled = [next(given) if isinstance(r, torch.Tensor) else r for r in rest]
        y = call(a + b, *filled)
        return after(y[0] if isinstance(y, tuple | list) else y)

    return measured(function, tensors)


def main(words: list[str]) -> None:
    """Print a line for each operation, dtype and number of columns."""
    print("bytes an element, forward + backward: as the definition | as the operator")
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for columns in (1024, 8192):
            with FakeTensorMode(allow_non_fake_inputs=True):
                for name, (op, definition, arguments, after) in cases(columns, dtype).items():
                    if words and not any(word in name for word in words):
                        continue
                    both = [
                        "{:4.1f} + {:4.1f}".format(*between(call, arguments, after))
                        for call in (definition, op.operator)
                    ]
                    print(f"{str(dtype)[6:]:9}{columns:5} {name:15}", " | ".join(both), flush=True)


if __name__ == "__main__":
    with quiet_without_reader():
        main(sys.argv[1:])

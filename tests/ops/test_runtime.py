"""What :mod:`apex.ops._runtime` says and does for every operation."""

import itertools

import pytest
import torch

from apex.ops import _runtime


def _nested(x):
    return x + 1


@_runtime.not_compiled
def _as_it_is(x, number):
    assert not torch.compiler.is_compiling()
    return _nested(x)


@torch.compiler.disable(recursive=False)
def _skipped(x, number):
    """The compiler looks at what this calls, but not at this."""
    return _as_it_is(x, number)


@pytest.mark.parametrize("function", [_as_it_is, _skipped])
@pytest.mark.parametrize("numbers", [(1,), (1, "a", 2.0, None, (3,))])
def test_what_is_not_compiled_and_what_it_calls(function, numbers):
    """Neither when the compiler has given up on the frame that asks, after so many arguments."""
    graphs = []

    def backend(graph, inputs):
        graphs.extend(node.target.__name__ for node in graph.graph.nodes if node.op[:4] == "call")
        return graph.forward

    def program(x, number):
        return function(x * 2, number) * 3

    torch.compiler.reset()
    compiled = torch.compile(program, backend=backend)
    with torch._dynamo.config.patch(recompile_limit=2):
        for number in itertools.chain(numbers, numbers):
            assert compiled(torch.ones(2), number).tolist() == [9.0, 9.0]
    assert {*graphs} == {"mul"}
    torch.compiler.reset()


def test_what_is_not_compiled_where_the_compiler_skips_the_frame_that_asks():
    """As it does with one that it could not compile: those below are compiled all the same."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    torch._dynamo.eval_frame.skip_code(_as_it_is.__code__)
    compiled = torch.compile(_skipped, backend=backend)
    assert compiled(torch.ones(2), 1).tolist() == [2.0, 2.0]
    assert graphs == []
    torch.compiler.reset()

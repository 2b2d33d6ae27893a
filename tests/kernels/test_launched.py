"""Every operation launches its kernels through Triton's own JIT; see launched.py."""

import pathlib

import pytest

pytest.importorskip("triton")

from tests.kernels.test_compiled import program

LIST, SUMS = "list_kernel", "segment_kernel"
GROUP_NORM = [f"group_norm_{part}" for part in ("moments", "stats", "forward")] + [
    f"group_norm_grad_{part}" for part in ("sums", "stats")
]
CROSS_ENTROPY = [f"cross_entropy_{part}" for part in ("sums", "losses", "backward")]
SOFTMAX = ["scaled_softmax_forward", "scaled_softmax_backward"]
EXPECTED = {
    "adam": [LIST],
    "adam, low bits": [LIST],
    "adam, stochastic": [LIST],
    "sgd": [LIST],
    "adagrad": [LIST],
    "lamb": [LIST, SUMS, LIST, SUMS, LIST],  # norm of all gradients, terms, weights
    "novograd": [LIST, SUMS, LIST],
    "fused step": [LIST, SUMS, LIST],
    "amp_C": [LIST, LIST, LIST, SUMS],
    "clip": [LIST, SUMS, LIST],
    "layer norm": ["row_norm_forward", "row_norm_backward", "row_norm_add_up"],
    "layer norm 1x1": ["row_norm_forward", "row_norm_backward", "row_norm_add_up"],
    "rms norm, wide": [
        "row_norm_forward_wide",
        "row_norm_backward_wide",
        "row_norm_weight_sums",
        "row_norm_add_up",
    ],
    "group norm": [*GROUP_NORM, "group_norm_backward"],
    "group norm 1x1": [*GROUP_NORM, "group_norm_backward"],
    "cross-entropy": CROSS_ENTROPY,
    "cross-entropy 1x1": CROSS_ENTROPY,
    "linear cross-entropy": CROSS_ENTROPY,
    "rotary": ["rotary_kernel"] * 2,
    "rotary 1x1": ["rotary_kernel"] * 2,
    "masked softmax": SOFTMAX,
    "masked softmax 1x1": SOFTMAX,
}


def _launched(*words):
    file = pathlib.Path(__file__).with_name("launched.py")
    return program(str(file), *words, DISABLE_PTXAS_OPT="1")  # no kernel runs


def test_one_launch_for_a_list_and_few_for_a_layer():
    assert _launched() == EXPECTED


@pytest.mark.exhaustive
def test_awkward_arguments_compile_and_launch():
    found = _launched("all")
    assert len(found) > 60
    assert [name for name, kernels in found.items() if not kernels] == []

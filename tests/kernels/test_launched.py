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
LAYERS = {
    "layer_norm": ["row_norm_forward", "row_norm_backward", "row_norm_add_up"],
    "group_norm, SiLU": [*GROUP_NORM, "group_norm_backward"],
    "cross_entropy, smoothed": CROSS_ENTROPY,
    "focal_loss, smoothed": ["_focal_loss"] * 2,
    "swiglu": ["_forward", "_backward"],
    "masked_softmax, no key": ["scaled_softmax_forward", "scaled_softmax_backward"],
    "rotary, three quarters": ["rotary_kernel"] * 2,
    "index_mul_2d": ["_products", "_products", "_sums"],
}
EXPECTED = {
    "FusedAdam": [LIST],
    "FusedAdam, storage=low_bits": [LIST],
    "FusedAdam, storage=stochastic": [LIST],
    "FusedSGD": [LIST],
    "FusedAdagrad": [LIST],
    "FusedLion": [LIST],
    "FusedLAMB": [LIST, SUMS, LIST, SUMS, LIST],  # norm of all gradients, terms, weights
    "FusedNovoGrad": [LIST, SUMS, LIST],
    "amp O2, fused": [LIST, SUMS, LIST],
    "multi_tensor_axpby": [LIST],
    "clip_grad_norm_": [LIST, SUMS, LIST],
    "FusedRMSNorm, backward in blocks": ["row_norm_forward", "row_norm_backward_wide"],
    "FusedRMSNorm, forward in blocks": ["row_norm_forward_wide"],
    **{f"{name}, bf16": kernels for name, kernels in LAYERS.items()},
    **{f"{name}, of one": kernels for name, kernels in LAYERS.items()},
}


def _launched(*words):
    file = pathlib.Path(__file__).with_name("launched.py")
    return program(str(file), *words, DISABLE_PTXAS_OPT="1")  # no kernel runs


def test_one_launch_for_a_list_and_few_for_a_layer():
    assert _launched(*EXPECTED) == EXPECTED


@pytest.mark.exhaustive
def test_awkward_arguments_compile_and_launch():
    found = _launched()
    assert len(found) > 60
    assert [name for name, kernels in found.items() if not kernels] == []

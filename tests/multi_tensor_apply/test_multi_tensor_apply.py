"""The caller of functions over lists."""

import subprocess
import sys

import torch

from apex.multi_tensor_apply import MultiTensorApply, multi_tensor_applier
from apex.multi_tensor_apply.multi_tensor_apply import MultiTensorApply as Same


def test_available_everywhere():
    assert MultiTensorApply is Same
    assert MultiTensorApply.available is multi_tensor_applier.available is True
    assert MultiTensorApply.warned is False
    assert multi_tensor_applier.check_avail() is None
    assert multi_tensor_applier.chunk_size == 65536


def test_everything_is_passed_by_position():
    seen = []

    def op(*args):
        seen.append(args)
        return "result"

    flag, lists = torch.zeros(1), [[torch.ones(1)]]
    assert MultiTensorApply(7)(op, flag, lists, 2.0, None) == "result"
    assert seen == [(7, flag, lists, 2.0, None)]


def test_with_amp_c():
    import amp_C

    flag, x, out = torch.zeros(1, dtype=torch.int32), [torch.ones(3).half()], [torch.zeros(3)]
    multi_tensor_applier(amp_C.multi_tensor_scale, flag, [x, out], 0.5)
    norm, each = multi_tensor_applier(amp_C.multi_tensor_l2norm, flag, [out], True)
    assert torch.equal(out[0], torch.full((3,), 0.5))
    assert norm.tolist() == each.tolist() == torch.tensor([0.75]).sqrt().tolist()


def test_importing_loads_no_triton():
    probe = """
import sys, amp_C, apex_C, apex.multi_tensor_apply, apex.contrib.clip_grad
assert "triton" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", f"import sys; sys.path[:] = {sys.path!r}\n{probe}"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

"""The interpreter of PTX itself, on PTX written by hand: each check sees its planted fault."""

import numpy as np
import pytest
import torch

from tests.gpu.machine import Launch
from tests.gpu.memory import Counters, Fault
from tests.gpu.translation import Code

HEAD = """
.visible .entry planted(
	.param .u64 .ptr .global .align 1 planted_param_0,
	.param .u64 .ptr .global .align 1 planted_param_1
)
.reqntid 64
{
	.reg .pred 	%p<9>;
	.reg .b16 	%rs<9>;
	.reg .b32 	%r<99>;
	.reg .b64 	%rd<9>;
	.loc	1 7 3                         // planted.py:7:3
	ld.param.b64 	%rd1, [planted_param_0];
	ld.param.b64 	%rd2, [planted_param_1];
	mov.u32 	%r1, %tid.x;
	mov.u32 	%r2, %ctaid.x;
	mov.b32 	%r3, global_smem;
	mad.lo.s32 	%r4, %r1, 4, %r3;
	mad.wide.u32 	%rd3, %r1, 4, %rd1;
	mad.wide.u32 	%rd4, %r1, 4, %rd2;
"""  # %r4, %rd3, %rd4: a 32-bit number for each thread, in shared memory, in the two tensors


def ran(body, *tensors, grid=1, counters=None):
    """Run a body of PTX with 64 threads."""
    code = Code(f"{HEAD}{body}\tret;\n\n}}\n")
    values = [np.array([[tensor.data_ptr()]], "u8") for tensor in tensors]
    named = list(zip(("first", "second"), tensors, strict=True))
    Launch(code, (grid, 1, 1), values, named, 512, counters).run()


def two(*sizes):
    """Tensors of int32: numbers from 0 on, and zeros."""
    sizes = sizes or (64, 64)
    return torch.arange(sizes[0], dtype=torch.int32), torch.zeros(sizes[1], dtype=torch.int32)


def test_a_shuffle_a_loop_and_predicates():
    source, sums = two()
    ran(
        """
	ld.global.b32 	%r10, [%rd3];
	mov.b32 	%r12, 0;
$L__loop:
	shfl.sync.bfly.b32 	%r11, %r10, 1, 31, -1;
	add.s32 	%r10, %r10, %r11;
	add.s32 	%r12, %r12, 1;
	setp.lt.s32 	%p1, %r12, 3;
	@%p1 bra 	$L__loop;
	setp.ge.u32 	%p2, %r1, 32;
	@!%p2 st.global.b32 	[%rd4], %r10;
""",
        source,
        sums,
    )
    pairs = source.view(-1, 2).sum(1)[:, None].expand(-1, 2).reshape(-1) * 4
    assert torch.equal(sums[:32], pairs[:32].int())
    assert not sums[32:].any()


def test_registers_are_taken_apart_and_joined():
    body = """
	cvt.u64.u32 	%rd5, %r1;
	shl.b64 	%rd5, %rd5, 32;
	cvt.u64.u32 	%rd6, %r2;
	or.b64 	%rd5, %rd5, %rd6;
	mov.b64 	{_, %r5}, %rd5;
	mov.b64 	%rd6, {%r2, %r5};
	setp.eq.b64 	%p1, %rd5, %rd6;
	mov.b32 	{%rs1, %rs2}, 327681;
	mov.b32 	%r6, {%rs2, %rs1};
	sub.s32 	%r6, %r6, 65541;
	add.s32 	%r5, %r5, %r6;
	@%p1 st.global.b32 	[%rd4], %r5;
"""
    numbers, found = two()
    ran(body, numbers, found)
    assert torch.equal(found, numbers)


def test_programs_that_branch_differently_and_threads_that_do():
    _, found = two()
    body = """
	mad.lo.s32 	%r20, %r2, 64, 0;
	setp.eq.b32 	%p1, %r2, 1;
	mov.b32 	%r10, 5;
	@%p1 bra 	$L__end;
	mov.b32 	%r10, 6;
	setp.lt.u32 	%p2, %r1, 10;
	@%p2 bra 	$L__end;
	mov.b32 	%r10, 7;
$L__end:
	setp.eq.b32 	%p3, %r2, {program};
	@%p3 st.global.b32 	[%rd4], %r10;
"""
    ran(body.format(program=1), *two()[:1], found, grid=2)
    assert (found == 5).all()
    ran(body.format(program=0), *two()[:1], found, grid=2)
    assert (found[:10] == 6).all()
    assert (found[10:] == 7).all()


COPY = """
	mov.b32 	%r9, 4;
	cp.async.ca.shared.global [ %r4 + 0 ], [ %rd3 + 0 ], 0x4, %r9;
	cp.async.commit_group;
"""
WAIT, BARRIER = "	cp.async.wait_group 0;\n", "	bar.sync 0;\n"
STORE, LOAD = "	st.shared.b32 [%r4], %r1;\n", "	ld.shared.b32 %r5, [%r3];\n"
APART = "	setp.lt.u32 %p1, %r1, 5;\n	@%p1 bra $L__end;\n"
GOOD = {
    "a copy": COPY + WAIT + BARRIER + LOAD,
    "stored twice": "	st.shared.b32 [%r3], 7;\n" + BARRIER + LOAD,
    "written, then read": STORE + BARRIER + LOAD,
    "of 16 bytes": "	and.b32 %r5, %r1, 15;\n	mad.wide.u32 %rd5, %r5, 16, %rd1;\n"
    "	ld.global.v4.b32 {%r5, %r6, %r7, %r8}, [%rd5];\n",
}


@pytest.mark.parametrize("name", GOOD)
def test_what_is_right_is_no_fault(name):
    ran(GOOD[name], *two())


FAULTS = {
    "out of bounds: 4 bytes at byte 256 of first": "	ld.global.b32 %r5, [%rd3+4];\n",
    "out of bounds: 4 bytes at byte 256 of second": "	st.global.b32 [%rd4+4], %r1;\n",
    "misaligned access of 8 bytes": "	ld.global.b64 %rd5, [%rd3];\n",
    "misaligned access of 8 bytes of shared": "	st.shared.b64 [%r4], %rd1;\n",
    "out of bounds of shared memory of 512 bytes": "	ld.shared.b32 %r5, [%r3+512];\n",
    "reads shared memory that nobody wrote": LOAD,
    "reads what is still being copied": COPY + BARRIER + LOAD,
    "reads what thread 0 of program 0 wrote": COPY + WAIT + LOAD,
    "reads what thread 1 of program 0 wrote": f"{STORE}	ld.shared.b32 %r5, [%r3+4];\n",
    "writes what several threads of program 0 read": STORE
    + BARRIER
    + LOAD
    + STORE.replace("1;", "3;"),
    "writes what thread 63 of program 0 wrote with another": "	sub.s32 %r5, 64, %r1;\n"
    f"	mad.lo.s32 %r5, %r5, 4, %r3;\n{STORE}	st.shared.b32 [%r5], %r3;\n",
    "writes what another thread writes with another value": "	st.shared.b32 [%r3], %r1;\n",
    "does not reach a barrier": f"{APART}{BARRIER}$L__end:\n",
    "exchanges values with threads that are elsewhere": APART
    + "	shfl.sync.bfly.b32 %r5, %r1, 1, 31, -1;\n$L__end:\n",
    "PTX instruction sad.u32 at planted.py:7:3": "	sad.u32 %r5, %r1, %r1, %r1;\n",
    "several programs": "	ld.global.b32 %r5, [%rd4];\n	st.global.b32 [%rd4], %r3;\n",
    "another value (second)": "	st.global.b32 [%rd4], %r2;\n",
    "writes what thread 0 of program 0 wrote with another": "	setp.eq.b32 %p1, %r2, 1;\n"
    "	@%p1 bra $L__end;\n$L__end:\n	add.s32 %r5, %r2, 1;\n	st.global.b32 [%rd4], %r5;\n",
}


@pytest.mark.parametrize(
    "text",
    [
        "setp.lt.and.s32 %p1, %r1, 5, %p2", "setp.hi.u32 %p1, %r1, 5", "sad.s32 %r1, %r1, %r1, %r1",
        "ld.volatile.shared.b32 %r1, [%r3]", "bar.sync 1", "shfl.sync.up.b32 %r5, %r1, 1, 0, -1",
        "atom.global.add.u32 %r5, [%rd4], 1", "fma.rz.f32 %r5, %r1, %r1, %r1",
        "st.local.b32 [%r1], %r1",
    ],
)  # fmt: skip
def test_an_instruction_that_is_not_interpreted_is_named(text):
    with pytest.raises(
        NotImplementedError, match=f"PTX instruction {text.split()[0]} at planted.py"
    ):
        ran(f"	{text};\n", *two())


@pytest.mark.parametrize("words", FAULTS)
def test_a_planted_fault_is_found(words):
    with pytest.raises((Fault, NotImplementedError)) as caught:
        ran(FAULTS[words], *two(), grid=2)
    assert words in str(caught.value)
    assert "planted.py:7:3" in str(caught.value)


def test_bounds_are_those_of_a_tensor_and_not_of_its_storage():
    rows = torch.zeros(16, 8, dtype=torch.int32)
    ran("	ld.global.b32 %r5, [%rd3];\n", rows[:8].view(-1), rows)  # joined: they overlap
    with pytest.raises(Fault, match="out of bounds: 4 bytes at byte 16 of first"):
        ran("	ld.global.b32 %r5, [%rd3];\n", rows[:, :4], two()[1])
    with pytest.raises(Fault, match=r"program \(1, 0, 0\)"):
        ran(
            "	mad.wide.u32 %rd3, %r2, 4, %rd3;\n	ld.global.b32 %r5, [%rd3];\n", *two(), grid=2
        )


@pytest.mark.slow
def test_counters():
    """64 threads read 256 bytes once in order, and with a stride of 32 bytes; banks by 8 words."""
    counters = Counters()
    ran("	ld.global.b32 %r5, [%rd3];\n", *two(), counters=counters)
    assert counters.asked["first", "read"] == 256
    assert counters.sectors["first", "read"] == 8
    counters = Counters()
    body = "	mad.wide.u32 %rd3, %r1, 32, %rd1;\n	ld.global.b32 %r5, [%rd3];\n"
    body += "	mad.lo.s32 %r4, %r1, 32, %r3;\n	and.b32 %r4, %r4, 511;\n"
    body += "	or.b32 %r4, %r4, 1024;\n"
    body += "	st.shared.b32 [%r4], 1;\n	bar.sync 0;\n"
    ran(body, *two(64 * 8, 64), counters=counters)
    assert counters.asked["first", "read"] == 256
    assert counters.sectors["first", "read"] == 64
    assert counters.once["first", "read"] == 64
    assert counters.totals["barriers"] == 1
    assert counters.totals["conflicts"] == 2 * 3  # 16 words in 4 banks, by each warp
    assert counters.totals["instructions"] == 64 * 16

"""``parallel_state`` and ``tensor_parallel`` on four ranks, beside one process."""

import functools
import math

import pytest
import torch

from apex.transformer import parallel_state as state
from apex.transformer.tensor_parallel.data import _check_data_types
from apex.transformer.tensor_parallel.memory import (
    MemoryBuffer,
    RingMemBuffer,
    allocate_mem_buff,
    get_mem_buff,
)
from apex.transformer.tensor_parallel.random import _set_cuda_rng_state
from apex.transformer.tensor_parallel.utils import VocabUtility, split_tensor_along_last_dim
from tests.transformer import parallel_ranks as jobs

pytestmark = pytest.mark.dist

TWICE = {"use_fp8_": True}
LAYOUTS = {  # sizes, options -> ranks of the groups of rank 2, or None
    (4, 1): ({}, [[0, 1, 2, 3], [0, 1, 2, 3], [2], [2], [2], [2], [2], [2], None]),
    (2, 2): (
        {"use_fp8_": True},
        [[0, 1, 2, 3], [2, 3], [0, 2], [2], [0, 2], None, None, None, [2, 3]],
    ),
    (1, 4): (
        {"pipeline_model_parallel_split_rank_": 2},
        [[0, 1, 2, 3], [2], [0, 1, 2, 3], [2], [0, 2, 3], [0, 2], None, [2, 3], None],
    ),
    (1, 2): ({}, [[0, 2], [2], [0, 2], [2, 3], [0, 2], None, None, None, None]),
    (2, 1): (
        {"use_fp8_": True, "default_backend": "gloo", "p2p_backend": "gloo"},
        [[2, 3], [2, 3], [2], [0, 2], [2], [2], [2], [2], [0, 1, 2, 3]],
    ),
}


@pytest.mark.parametrize("sizes", LAYOUTS)
def test_groups(four, sizes):
    """Several initialisations in the same processes."""
    options, ranks_of_2 = LAYOUTS[sizes]
    answers = four.run(functools.partial(jobs.groups, sizes, options))
    assert answers[2][0] == dict(zip(jobs.GROUPS.split(), ranks_of_2, strict=True))
    tensor, pipeline = sizes
    data = 4 // (tensor * pipeline)
    split = options.get("pipeline_model_parallel_split_rank_")
    for rank, (found, numbers, flags) in enumerate(answers):
        stage, rest = divmod(rank, tensor * data)
        copy, part = divmod(rest, tensor)
        own = found["pipeline_model_parallel"]
        assert numbers == [
            (copy, part, stage, None),
            rank - part,
            rank - tensor * copy,
            own[0], own[stage - 1], own[(stage + 1) % pipeline], own[-1],
        ]  # fmt: skip
        assert flags == [
            stage == 0,
            stage == pipeline - 1,
            split is None or stage < split,
            split is None or stage >= split,
            split is None or stage == split - 1,
            found["embedding"] is not None,
            found["position_embedding"] is not None,
        ]


def test_groups_that_cannot_be(four):
    first, *others = four.run(jobs.wrong_groups)
    assert [text.partition("rank ")[0] for text in first] == [
        text.partition("rank ")[0] for text in others[-1]
    ]
    for text, start in zip(
        first,
        [
            "4 ranks are not divisible by tensor_model_parallel_size_ 3 x",
            "tensor_model_parallel_size_ is 0; pass a positive int",
            "virtual_pipeline_model_parallel_size_ is 2 with pipeline_model_parallel_size_ 2",
            "pipeline_model_parallel_split_rank_ is 2 with pipeline_model_parallel_size_ 2",
            "backend 'carrier pigeon' is not available; pass None",
            "apex.transformer.parallel_state.initialize_model_parallel(init_mpi_proc_group=True)",
            "apex.transformer.parallel_state, model_parallel: there is no group yet",
            "the groups exist already",
            "apex.transformer.parallel_state, amax_reduction: there is no group of this kind",
        ],
        strict=True,
    ):
        assert text.startswith(start), text


def test_numbers_without_processes():
    """What programs set before there are processes."""
    assert state.is_unitialized()
    assert state.get_rank_info() == (0, 0, 0, 0)
    with pytest.raises(AssertionError, match="Call initialize_model_parallel first"):
        state.get_tensor_model_parallel_world_size()
    with pytest.raises(AssertionError, match="call torch.distributed.init_process_group first"):
        state.initialize_model_parallel()
    state.set_tensor_model_parallel_world_size(4)
    state.set_tensor_model_parallel_rank(3)
    state.set_pipeline_model_parallel_world_size(8)
    state.set_pipeline_model_parallel_rank(5)
    state.set_pipeline_model_parallel_split_rank(6)
    state.set_virtual_pipeline_model_parallel_world_size(2)
    state.set_virtual_pipeline_model_parallel_rank(1)
    try:
        assert state.get_tensor_model_parallel_world_size() == 4
        assert state.get_tensor_model_parallel_rank() == 3
        assert state.get_pipeline_model_parallel_world_size() == 8
        assert state.get_pipeline_model_parallel_rank() == 5
        assert state.is_pipeline_stage_at_split()
        assert state.get_virtual_pipeline_model_parallel_rank() == 1
        assert not state.is_rank_in_embedding_group()
        state.set_pipeline_model_parallel_rank(7)
        assert state.is_pipeline_last_stage()
        state.set_virtual_pipeline_model_parallel_rank(0)
        assert not state.is_pipeline_last_stage()
        assert state.is_pipeline_last_stage(ignore_virtual=True)
    finally:
        state.destroy_model_parallel()
    assert state.get_virtual_pipeline_model_parallel_world_size() is None


def test_mappings(four):
    assert set(four.run(jobs.mapped)) == {
        "dimension 0 of a tensor of shape [3, 2] is not divisible into 4 parts."
    }


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"no_async": True, "skip_bias_add": True},
        {"whole": True},
        {"sequence_parallel_enabled": True, "gradient_accumulation_fusion": True},
        {"gradient_accumulation_fusion": True, "accumulation_in_fp16": True},
    ],
    ids=lambda options: "-".join(options) or "default",
)
def test_linear_layers(four, size, options):
    if size == 4 and options.get("whole"):
        size = 1
    four.run(functools.partial(jobs.linears, size, options))


def test_embedding(four):
    for size in (1, 4):
        four.run(functools.partial(jobs.embedding, size))


def test_initial_weights_and_errors(four):
    (first, texts), (second, _), *_ = four.run(jobs.initial)
    assert not torch.equal(first, second)
    for text, part in zip(
        texts,
        [
            "pass gather_output=False",
            "needs input_is_parallel=True",
            "5 is not divisible by 2",
            "both reduce the input's gradient",
            "input has shape [4, 2] and weight [2, 3]",
            "the weight has no main_grad",
            "main_grad is torch.float64",
            "there is no state 'model-parallel-rng'",
        ],
        strict=True,
    ):
        assert part in text


def test_autocast(four):
    four.run(jobs.autocast)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_cross_entropy(four, dtype, smoothing):
    four.run(functools.partial(jobs.cross_entropy, dtype, smoothing))


def test_targets_outside_of_the_classes_and_errors(four):
    shape, dtype, smoothing = four.run(jobs.wrong_targets)[0]
    assert "Pass (..., classes / ranks) and (...)" in shape
    assert "target is torch.float32; pass an integer dtype" in dtype
    assert "label_smoothing is 1.0 with 12 classes" in smoothing


def test_random_number_tracker(four):
    for texts in four.run(jobs.tracker):
        assert "state 'a' exists already" in texts[0]
        assert "seed 1 exists already" in texts[1]
        assert "there is no state 'c'" in texts[2]


@pytest.mark.parametrize(("distribute", "buffered"), [(False, False), (True, False), (True, True)])
def test_recomputed_activations(four, distribute, buffered):
    for texts in four.run(functools.partial(jobs.recomputed, distribute, buffered)):
        assert "divisible by the 2 ranks" in texts[0]
        assert "needs a tensor as its first argument" in texts[1]
        assert "call loss.backward()" in texts[2]


def test_distributed_activations_take_a_part_of_the_memory(four):
    for found, warning in four.run(jobs.kept):
        assert found == [1024, 256]
        assert warning.endswith(
            "no argument requires a gradient, so the weights inside get no gradients"
        )


def test_broadcast(four):
    for rank, (missing, dtype) in enumerate(four.run(jobs.broadcast)):
        source = f"broadcast_data, on rank {rank - rank % 2}: "
        assert (
            missing == f"{source}data['more'] is NoneType; pass a tensor of datatype, torch.int64."
        )
        assert dtype.startswith(
            f"{source}data['text'] is torch.int64; pass a tensor of datatype, torch.float32"
        )


def test_dtypes_of_a_batch():
    data = {"text": torch.ones(2, dtype=torch.int64)}
    _check_data_types(["text"], data, torch.int64)
    with pytest.raises(ValueError, match="_check_data_types: data.'text'. is torch.int64; pass a"):
        _check_data_types(["text"], data, torch.int32)
    with pytest.raises(ValueError, match="data.'more'. is NoneType"):
        _check_data_types(["text", "more"], data, torch.int64)


@pytest.mark.parametrize("device", [[], [-1], [0], ["cpu"], [torch.device("cpu")]], ids=str)
def test_a_state_of_the_generator(device):
    before = torch.get_rng_state()
    drawn = torch.rand(3)
    _set_cuda_rng_state(before, *device)
    assert torch.equal(torch.rand(3), drawn)


def test_the_state_of_a_gpu_s_generator(monkeypatch):
    """By default that of the current one."""
    saved, given = torch.get_rng_state(), []
    monkeypatch.setattr(state, "current_device", lambda: torch.device("cuda", 1))
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda *args: given.append(args))
    for device in ([], [-1], [2], ["cuda:3"]):
        _set_cuda_rng_state(saved, *device)
    assert given == [(saved,), (saved,), (saved, 2), (saved, "cuda:3")]


def test_parts():
    x = torch.arange(12.0).view(2, 6)
    parts = split_tensor_along_last_dim(x, 3)
    assert [part.tolist() for part in parts] == [
        [[0, 1], [6, 7]],
        [[2, 3], [8, 9]],
        [[4, 5], [10, 11]],
    ]
    assert parts[0].data_ptr() == x.data_ptr()
    assert split_tensor_along_last_dim(x, 3, contiguous_split_chunks=True)[1].is_contiguous()
    assert [len(part) for part in split_tensor_along_last_dim(x[:0], 2)] == [0, 0]
    with pytest.raises(ValueError, match=r"shape \[2, 6\] is not divisible into 4 parts"):
        split_tensor_along_last_dim(x, 4)
    assert VocabUtility.vocab_range_from_per_partition_vocab_size(5, 2, 4) == (10, 15)
    assert VocabUtility.vocab_range_from_global_vocab_size(20, 3, 4) == (15, 20)
    with pytest.raises(AssertionError, match="21 is not divisible by 4"):
        VocabUtility.vocab_range_from_global_vocab_size(21, 3, 4)


def test_memory_buffers(caplog):
    buffer = allocate_mem_buff("tests", 10, torch.float32, track_usage=True)
    assert get_mem_buff("tests") is buffer
    piece = buffer.add(torch.ones(2, 3, requires_grad=True))
    assert (piece.tolist(), buffer.numel_in_use(), buffer.is_in_use()) == ([[1.0] * 3] * 2, 6, True)
    assert piece.data_ptr() == buffer.get_data().data_ptr()
    for wrong, what in (
        (torch.ones(5), "5 elements of torch.float32"),
        (torch.ones(1).half(), "float16"),
    ):
        with pytest.raises(
            ValueError, match=f"{what}.* do not fit into 4 free ones of torch.float32"
        ):
            buffer.add(wrong)
    with caplog.at_level("INFO", logger="apex"):
        buffer.print_average_usage()
    assert "60.00 % in use" in caplog.text
    buffer.reset()
    assert not buffer.is_in_use()
    with pytest.raises(ValueError, match="'tests' is allocated already"):
        allocate_mem_buff("tests", 1, torch.float32, track_usage=False)
    with pytest.raises(ValueError, match="track_usage=False"):
        MemoryBuffer("quiet", 1, torch.float32, False).print_average_usage()
    ring = RingMemBuffer("ring", 2, 4, torch.float64, False)
    first = ring.get_next_buffer()
    first.add(torch.ones(1, dtype=torch.float64))
    assert ring.get_next_buffer() is not first
    with pytest.raises(ValueError, match="'ring 0' is in use; reset it first"):
        ring.get_next_buffer()
    assert math.prod(first.data.shape) == 4

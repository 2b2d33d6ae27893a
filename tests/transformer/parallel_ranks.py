"""What four ranks do with apex.transformer's parallel parts, beside one process.

Each job runs on every rank, and raises where the numbers differ. A reference is computed on each
rank from the same seed, in plain PyTorch. Weights and inputs of layers are whole numbers, so that
sums are exact in every order.
"""

import contextlib
import functools
import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F

from apex.transformer import parallel_state as state
from apex.transformer import tensor_parallel as tp
from apex.transformer.tensor_parallel import layers, mappings, memory
from tests import tolerance


@contextlib.contextmanager
def parallel(*sizes, seed=1, **options):
    """The groups, and a seed that all ranks share."""
    state.initialize_model_parallel(*sizes, **options)
    try:
        tp.model_parallel_cuda_manual_seed(seed)
        yield state.get_tensor_model_parallel_rank(), state.get_tensor_model_parallel_world_size()
    finally:
        state.destroy_model_parallel()


def said(function, *args, **kwargs):
    """The text of the error."""
    try:
        function(*args, **kwargs)
    except (RuntimeError, AssertionError) as error:
        return str(error)
    raise AssertionError("no error")


def equal(found, wanted):
    assert torch.equal(found, wanted)


# -- parallel_state --------------------------------------------------------------------------------


GROUPS = "model_parallel tensor_model_parallel pipeline_model_parallel data_parallel embedding "
GROUPS += "position_embedding encoder_relative_position_embedding "
GROUPS += "decoder_relative_position_embedding amax_reduction"


def groups(sizes, options, rank):
    """The ranks of each group, by name, or None; a collective over each gives their sum."""
    found = {}
    with parallel(*sizes, **options):
        for name in GROUPS.split():
            try:
                group = getattr(state, f"get_{name}_group")()
            except AssertionError:
                found[name] = None
                continue
            total = torch.tensor([float(rank)])
            dist.all_reduce(total, group=group)
            found[name] = dist.get_process_group_ranks(group)
            assert total.item() == sum(found[name])
        assert state._STATE.mesh.mesh.shape == (sizes[1], 4 // (sizes[0] * sizes[1]), sizes[0])
        numbers = [
            state.get_rank_info(),
            state.get_tensor_model_parallel_src_rank(),
            state.get_data_parallel_src_rank(),
            state.get_pipeline_model_parallel_first_rank(),
            state.get_pipeline_model_parallel_prev_rank(),
            state.get_pipeline_model_parallel_next_rank(),
            state.get_pipeline_model_parallel_last_rank(),
        ]
        flags = [
            state.is_pipeline_first_stage(),
            state.is_pipeline_last_stage(),
            state.is_pipeline_stage_before_split(),
            state.is_pipeline_stage_after_split(),
            state.is_pipeline_stage_at_split(),
            state.is_rank_in_embedding_group(),
            state.is_rank_in_position_embedding_group(),
        ]
    assert state.is_unitialized()
    return found, numbers, flags


def wrong_groups(rank):
    before = len(dist.distributed_c10d._world.pg_map)
    initialize = state.initialize_model_parallel
    texts = [
        said(initialize, 3),
        said(initialize, 0),
        said(initialize, 1, 2, 2),
        said(initialize, 1, 2, None, 2),
        said(initialize, default_backend="carrier pigeon"),
        said(initialize, init_mpi_proc_group=True),
        said(state.get_model_parallel_group),
    ]
    with parallel(2):
        texts += [said(initialize, 2), said(state.get_amax_reduction_group)]
        assert state.get_tensor_model_parallel_world_size() == 2
    assert len(dist.distributed_c10d._world.pg_map) == before  # every group is destroyed
    return texts


# -- mappings --------------------------------------------------------------------------------------


def mapped(rank):
    """Each mapping, its gradient and the gradient of that, on four ranks."""
    with parallel(4) as (index, ranks):
        x = [tolerance.integers(8, 3, 8) for _ in range(ranks)]  # of each rank
        small = [tolerance.integers(2, 3, 2) for _ in range(ranks)]
        first, last = functools.partial(torch.cat, dim=0), functools.partial(torch.cat, dim=-1)
        total = sum(x)
        part = lambda whole, dim: whole.chunk(ranks, dim)[index]  # noqa: E731
        cases = [  # function, input of this rank, output, gradient of the output -> of the input
            (mappings.copy_to_tensor_model_parallel_region, x, x[index], total),
            (mappings.reduce_from_tensor_model_parallel_region, x, total, x[index]),
            (mappings.scatter_to_tensor_model_parallel_region, [total] * 4, part(total, -1), None),
            (mappings.gather_from_tensor_model_parallel_region, small, last(small), None),
            (mappings.scatter_to_sequence_parallel_region, [total] * 4, part(total, 0), None),
            (mappings.gather_from_sequence_parallel_region, small, first(small), None),
            (mappings.reduce_scatter_to_sequence_parallel_region, x, part(total, 0), None),
        ]
        for function, inputs, output, gradient in cases:
            mine = inputs[index].clone().requires_grad_()
            found = function(mine.transpose(0, 1).contiguous().transpose(0, 1))
            equal(found, output)
            equal(mine.detach(), inputs[index])  # not written to
            if gradient is not None:
                (dx,) = torch.autograd.grad(found, mine, x[index])
                equal(dx, gradient)
        _gradients_of_parts(x, small, total, index, first, last, part)
        return said(mappings.scatter_to_sequence_parallel_region, torch.ones(3, 2))


def _gradients_of_parts(x, small, total, index, first, last, part):
    def back(function, mine, dy):
        mine = mine.clone().requires_grad_()
        (dx,) = torch.autograd.grad(function(mine), mine, dy)
        return dx

    whole_last, whole_first = [last([t] * 4) for t in small], [first([t] * 4) for t in small]
    equal(back(mappings.scatter_to_tensor_model_parallel_region, total, x[index][..., :2]),
          last([t[..., :2] for t in x]))  # fmt: skip
    equal(back(mappings.gather_from_tensor_model_parallel_region, small[index], whole_last[index]),
          part(whole_last[index], -1))  # fmt: skip
    equal(back(mappings.scatter_to_sequence_parallel_region, total, x[index][:2]),
          first([t[:2] for t in x]))  # fmt: skip
    gather = mappings.gather_from_sequence_parallel_region
    equal(back(gather, small[index], whole_first[index]), part(sum(whole_first), 0))
    alone = functools.partial(gather, to_model_parallel=False)
    equal(back(alone, small[index], whole_first[index]), part(whole_first[index], 0))
    equal(back(mappings.reduce_scatter_to_sequence_parallel_region, x[index], x[index][:2]),
          first([t[:2] for t in x]))  # fmt: skip
    # the gradient of a gradient, of a square
    mine = x[index].clone().requires_grad_()
    y = mappings.reduce_from_tensor_model_parallel_region(mine)
    (dx,) = torch.autograd.grad((y * y).sum(), mine, create_graph=True)
    equal(dx, 2 * total)
    (ddx,) = torch.autograd.grad(dx.sum(), mine)
    equal(ddx, torch.full_like(mine, 2.0 * 4))  # each rank's sum has it


# -- layers ----------------------------------------------------------------------------------------


def _whole_numbers(weight):
    weight.copy_(tolerance.integers(*weight.shape))


def _gradients(output, dy, *tensors):
    return torch.autograd.grad(output, tensors, dy)


def linears(size, options, rank):
    """A column-parallel and a row-parallel layer with a square between them, beside two linears."""
    options = dict(options)
    sequence = options.get("sequence_parallel_enabled", False)
    whole_input = options.pop("whole", False)  # outputs gathered, inputs scattered again
    skip = options.pop("skip_bias_add", False)
    asynchronous = not options.pop("no_async", False)
    fused = options.get("gradient_accumulation_fusion", False)
    with parallel(size) as (index, ranks):
        common = {"use_cpu_initialization": True, "init_method": _whole_numbers, **options}
        common["config"] = object()  # Megatron's, of which the layers need nothing
        torch.manual_seed(3)
        up = tp.ColumnParallelLinear(
            6, 8, gather_output=whole_input, keep_master_weight_for_test=True,
            no_async_tensor_model_parallel_allreduce=not asynchronous, **common,
        )  # fmt: skip
        down = tp.RowParallelLinear(
            8, 6, input_is_parallel=not whole_input, skip_bias_add=skip,
            keep_master_weight_for_test=True, **common,
        )  # fmt: skip
        bias = tolerance.integers(8)
        with torch.no_grad():
            up.bias.copy_(bias.chunk(ranks)[index])
            down.bias.fill_(2.0)
        x, dy = tolerance.integers(8, 3, 6), tolerance.integers(8, 3, 6)

        w1, w2 = (layer.master_weight.clone().requires_grad_() for layer in (up, down))
        b1, b2 = bias.requires_grad_(), torch.full((6,), 2.0, requires_grad=True)
        plain = x.clone().requires_grad_()
        y = F.linear(F.linear(plain, w1, b1).square(), w2, None if skip else b2)
        wanted = _gradients(y, dy, plain, w1, b1, w2, *([] if skip else [b2]))

        part = (lambda t: t.chunk(ranks)[index]) if sequence and ranks > 1 else (lambda t: t)
        mine = part(x).clone().requires_grad_()
        for layer in (up, down):
            layer.weight.main_grad = torch.ones_like(layer.weight)
        hidden, none = up(mine)
        found, out_bias = down(hidden.square())
        assert none is None
        assert (out_bias is down.bias) if skip else (out_bias is None)
        equal(found, part(y))
        found.backward(part(dy))
        equal(mine.grad, part(wanted[0]))
        for layer, gradient, dim in ((up, wanted[1], 0), (down, wanted[3], 1)):
            gradient = gradient.chunk(ranks, dim)[index]
            if fused:
                equal(layer.weight.main_grad, gradient + 1)
                assert layer.weight.grad is None
            else:
                equal(layer.weight.grad, gradient)
                equal(layer.weight.main_grad, torch.ones_like(gradient))
        equal(up.bias.grad, wanted[2].chunk(ranks)[index])
        if not skip:
            if sequence:
                dist.all_reduce(down.bias.grad, group=state.get_tensor_model_parallel_group())
            equal(down.bias.grad, wanted[4])
        assert (up.weight.tensor_model_parallel, up.weight.partition_dim) == (True, 0)
        assert (down.weight.tensor_model_parallel, down.weight.partition_dim) == (True, 1)
        assert up.bias.tensor_model_parallel
        assert not hasattr(down.bias, "tensor_model_parallel")
        assert down.bias.sequence_parallel_enabled == sequence


def embedding(size, rank):
    with parallel(size) as (index, ranks):
        torch.manual_seed(3)
        layer = tp.VocabParallelEmbedding(
            12, 5, init_method=_whole_numbers, use_cpu_initialization=True
        )
        torch.manual_seed(3)
        plain = torch.nn.Embedding(12, 5, _weight=tolerance.integers(12, 5))
        ids = torch.tensor([[0, 11, 5], [5, 3, 6]])
        dy = tolerance.integers(2, 3, 5)
        found, wanted = layer(ids), plain(ids)
        equal(found, wanted)
        found.backward(dy)
        wanted.backward(dy)
        equal(layer.weight.grad, plain.weight.grad.chunk(ranks)[index])
        for wrong in (12, -1):
            with contextlib.suppress(IndexError):
                assert "0 to 11" in said(layer, torch.tensor([wrong])), "no error"


def initial(rank):
    """Parts of weights, from the CPU and from the tracker; marks that survive copies."""
    import copy

    found = []
    with parallel(2) as (index, ranks):
        torch.manual_seed(5)
        layer = tp.ColumnParallelLinear(
            3, 12, stride=3, use_cpu_initialization=True, keep_master_weight_for_test=True,
            params_dtype=torch.bfloat16,
        )  # fmt: skip
        torch.manual_seed(5)
        whole = torch.nn.init.xavier_normal_(torch.empty(12, 3)).bfloat16()
        equal(layer.master_weight, whole)
        rows = [r for block in range(3) for r in range(4 * block, 4 * block + 4)[2 * index :][:2]]
        equal(layer.weight.detach(), whole[rows])
        again = copy.deepcopy(layer)
        assert again.weight.partition_stride == 3
        assert layers.param_is_not_tensor_parallel_duplicate(again.weight)
        assert layers.param_is_not_tensor_parallel_duplicate(torch.ones(1)) == (index == 0)

        before = torch.get_rng_state()
        drawn = tp.RowParallelLinear(8, 3).weight.detach()
        equal(torch.get_rng_state(), before)
        tp.model_parallel_cuda_manual_seed(1)
        with tp.get_cuda_rng_tracker().fork():
            equal(drawn, torch.nn.init.xavier_normal_(torch.empty(3, 4)))
        found.append(drawn)

        wrong = functools.partial(layers.linear_with_grad_accumulation_and_async_allreduce)
        x, weight = torch.ones(4, 3), torch.nn.Parameter(torch.ones(2, 3))
        texts = [
            said(tp.ColumnParallelLinear, 3, 4, sequence_parallel_enabled=True),
            said(tp.RowParallelLinear, 4, 3, sequence_parallel_enabled=True),
            said(tp.ColumnParallelLinear, 3, 5),
            said(wrong, x, weight, None, False, True, True),
            said(wrong, torch.ones(4, 2), weight, None, False, False, False),
            said(wrong(x, weight, None, True, False, False).sum().backward),
        ]
        weight.main_grad = torch.zeros(2, 3, dtype=torch.float64)
        texts.append(said(wrong(x, weight, None, True, False, False).sum().backward))
        tp.get_cuda_rng_tracker().reset()
        texts.append(said(tp.RowParallelLinear, 8, 3))
        return found[0], texts


def autocast(rank):
    """Under autocast both layers compute in bfloat16, and main_grad of float32 is added to."""
    with parallel(2) as (index, ranks):
        layer = tp.ColumnParallelLinear(
            4, 4, init_method=_whole_numbers, gather_output=False, use_cpu_initialization=True,
            gradient_accumulation_fusion=True,
        )  # fmt: skip
        layer.weight.main_grad = torch.zeros_like(layer.weight)
        x = torch.ones(3, 4)
        with torch.autocast("cpu", torch.bfloat16):
            y, _ = layer(x)
        assert y.dtype == torch.bfloat16
        y.backward(torch.ones_like(y))
        equal(layer.weight.main_grad, torch.full((2, 4), 3.0))
        assert layer.bias.grad.dtype == torch.float32
        x = torch.full((3, 4), 257.0, requires_grad=True)  # which bfloat16 rounds to 256
        y, _ = layer(x)
        with torch.autocast("cpu", torch.bfloat16):  # the backward alone
            y.backward(torch.full_like(y, 257.0))
        equal(layer.weight.main_grad, torch.full((2, 4), 3.0 + 3 * 257.0**2))


# -- cross entropy ---------------------------------------------------------------------------------


def cross_entropy(dtype, smoothing, rank):
    with parallel(4) as (index, ranks):
        torch.manual_seed(2)
        logits = (4 * torch.randn(5, 3, 12)).to(dtype)
        target = torch.randint(12, (5, 3))
        dy = torch.rand(5, 3, dtype=torch.float64).to(dtype)
        exact = logits.double().requires_grad_()
        torchs = smoothing * 12 / 11  # the same share for the target
        wanted = F.cross_entropy(
            exact.view(-1, 12), target.view(-1), reduction="none", label_smoothing=torchs
        ).view(5, 3)
        (gradient,) = torch.autograd.grad(wanted, exact, dy.double())
        mine = logits.chunk(ranks, -1)[index].clone().requires_grad_()
        found = tp.vocab_parallel_cross_entropy(mine, target, smoothing)
        assert found.dtype == dtype
        (dx,) = torch.autograd.grad(found, mine, dy)
        gradient = gradient.chunk(ranks, -1)[index]
        if dtype == torch.float64:
            tolerance.assert_close_to_largest(found, wanted, tolerance.TORCH_IN_FLOAT64)
            tolerance.assert_close_to_largest(dx, gradient, tolerance.TORCH_IN_FLOAT64)
        else:
            tolerance.assert_one_rounding(found.detach(), wanted.detach())
            tolerance.assert_one_rounding(dx, gradient)


def wrong_targets(rank):
    """A target of padding gives a finite loss, and no gradient where the loss is masked."""
    with parallel(4):
        logits = torch.randn(2, 3, requires_grad=True)
        loss = tp.vocab_parallel_cross_entropy(logits, torch.tensor([-1, 12]))
        assert loss.isfinite().all()
        (loss * 0.0).sum().backward()
        equal(logits.grad, torch.zeros(2, 3))
        call = tp.vocab_parallel_cross_entropy
        return [
            said(call, logits, torch.zeros(3, dtype=torch.long)),
            said(call, logits, torch.zeros(2)),
            said(call, logits, torch.zeros(2, dtype=torch.long), 1.0),
        ]


# -- random numbers, recomputation, data -----------------------------------------------------------


def tracker(rank):
    with parallel(2, seed=7) as (index, _):
        inside, outside = [], [torch.rand(2)]
        for _ in range(2):
            with tp.get_cuda_rng_tracker().fork():
                inside.append(torch.rand(2))
            outside.append(torch.rand(2))
        torch.manual_seed(7)
        equal(torch.cat(outside), torch.rand(6))  # as if there had been no fork
        torch.manual_seed(7 + 2718 + index)
        equal(torch.cat(inside), torch.rand(4))
        with contextlib.suppress(ZeroDivisionError), tp.get_cuda_rng_tracker().fork():
            1 / 0  # noqa: B018
        states = tp.get_cuda_rng_tracker().get_states()
        with tp.get_cuda_rng_tracker().fork():
            one = torch.rand(3)
        tp.get_cuda_rng_tracker().set_states(states)
        with tp.get_cuda_rng_tracker().fork():
            equal(torch.rand(3), one)
        fresh = tp.random.CudaRNGStatesTracker()
        fresh.add("a", 1)
        with fresh.fork("a"):
            pass
        return [said(fresh.add, "a", 2), said(fresh.add, "b", 1), said(fresh.fork("c").__enter__)]


def _dropped(layer, x, factor, y):
    x = tp.copy_to_tensor_model_parallel_region(x)
    with tp.get_cuda_rng_tracker().fork():
        hidden = F.dropout(layer(x), 0.5)  # differs between ranks
    hidden = tp.reduce_from_tensor_model_parallel_region(hidden)
    return F.dropout(hidden * factor + y, 0.5).square()


def recomputed(distribute, buffered, rank):
    """Two recomputed calls with dropout, in and outside of the tensor-parallel state."""
    with parallel(2):
        torch.manual_seed(11)
        layer = torch.nn.Linear(4, 4)
        x, y = torch.randn(6, 4), torch.randn(6, 4)
        runs = []
        if buffered:
            tp.init_checkpointed_activations_memory_buffer(1, 6, 4, 2, 2, 1, False)
            again = tp.init_checkpointed_activations_memory_buffer
            assert "is allocated already" in said(again, 1, 6, 4, 2, 2, 1, False)
        function = functools.partial(_dropped, layer)
        for call in (function, functools.partial(tp.checkpoint, function, distribute)):
            tp.model_parallel_cuda_manual_seed(13)
            tp.reset_checkpointed_activations_memory_buffer()
            layer.zero_grad()
            a, b = x.clone().requires_grad_(), y.clone().requires_grad_()
            z = call(call(a, 2.0, b), 2.0, b)
            z.sum().backward()
            with tp.get_cuda_rng_tracker().fork():
                drawn = torch.rand(2)
            gradients = a.grad, b.grad, layer.weight.grad.clone()
            runs.append((z.detach(), *gradients, drawn, torch.rand(2)))
        for found, wanted in zip(*runs, strict=True):
            equal(found, wanted)
        if buffered:
            assert memory.get_mem_buff("checkpointed activations").numel_in_use() == 24
            memory._BUFFERS.clear()
            tp.random._buffers.clear()
        a = torch.ones(2, requires_grad=True)
        return [
            said(tp.checkpoint, torch.relu, True, torch.ones(3)),
            said(tp.checkpoint, torch.relu, True, "x"),
            said(torch.autograd.grad, tp.checkpoint(torch.square, False, a).sum(), a),
        ]


def kept(rank):
    """Bytes of storage that a recomputed call holds on to, whole and distributed."""
    with parallel(4):
        found = []
        for distribute in (False, True):
            x = torch.ones(64, 4, requires_grad=True)
            z = tp.checkpoint(torch.square, distribute, x * 1.0)
            found.append(sum(t.untyped_storage().nbytes() for t in z.grad_fn.saved_tensors))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with torch.no_grad():
                tp.checkpoint(torch.square, False, torch.ones(2))
            assert caught == []
            tp.checkpoint(torch.square, False, torch.ones(2))
        return found, str(caught[0].message)


def broadcast(rank):
    with parallel(2) as (index, _):
        batch = {"text": torch.arange(6).view(2, 3) + rank, "length": torch.tensor(rank)}
        found = tp.broadcast_data(["text", "length"], batch if index == 0 else None, torch.int64)
        source = rank - index
        equal(found["text"], torch.arange(6).view(2, 3) + source)
        equal(found["length"], torch.tensor(source))
        assert tp.broadcast_data([], batch, torch.int64) == {}
        return [
            said(tp.broadcast_data, ["more"], batch, torch.int64),
            said(tp.broadcast_data, ["text"], batch, torch.float32),
        ]

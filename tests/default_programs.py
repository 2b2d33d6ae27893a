"""Programs whose own tensors name device and dtype: what they compute follows no default of torch.

Each is a generator: up to its first ``yield`` it makes its data, then it yields tensors.
"""

import contextlib
import functools
import math
from unittest import mock

import torch
from torch import nn

import apex.optimizers
from apex import RNN, amp, debug, fp16_utils, reparameterization
from apex.amp import scaler
from apex.amp.gradients import overflow
from apex.catalogue.entry import DTYPES
from apex.catalogue.lists import LISTS
from apex.commands.selftest import optimizers as steps
from apex.commands.selftest.check import Setting
from apex.commands.selftest.ops import CHECKED
from apex.contrib import clip_grad, fmha, groupbn, sparsity, transducer
from apex.contrib import optimizers as older
from apex.contrib.bottleneck import Bottleneck
from apex.contrib.group_norm import GroupNorm
from apex.contrib.multihead_attn import SelfMultiheadAttn
from apex.contrib.optimizers.distributed_fused_adam import DistributedFusedAdam
from apex.contrib.optimizers.distributed_fused_lamb import DistributedFusedLAMB
from apex.normalization.fused_layer_norm import fused_rms_norm_affine
from apex.ops.lists import clip
from apex.ops.lists.tensor_norms import max_norms, square_sums
from apex.optimizers import FusedAdagrad, FusedAdam, FusedLAMB, FusedNovoGrad, FusedSGD
from apex.parallel import LARC, DistributedDataParallel, convert_syncbn_model
from apex.transformer import parallel_state, tensor_parallel
from apex.transformer._data import MegatronPretrainingRandomSampler
from apex.transformer.amp import GradScaler
from apex.transformer.enums import ModelType
from apex.transformer.pipeline_parallel import utils
from apex.transformer.pipeline_parallel.schedules import (
    fwd_bwd_pipelining_without_interleaving as pipelining,
)
from apex.transformer.testing import commons
from tests.amp.training import Delayed
from tests.ranks import alone

CPU = torch.device("cpu")
ON = {"device": CPU, "dtype": torch.float32}
PROGRAMS = {}


@contextlib.contextmanager
def default(other):
    """Torch's default device or dtype, or with None the usual ones."""
    dtype = torch.get_default_dtype()
    if isinstance(other, str):
        torch.set_default_device(other)
    elif other is not None:
        torch.set_default_dtype(other)
    try:
        yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(dtype)


def program(name, *arguments, **options):
    """Register a function, called with these arguments, as the program of this name."""

    def register(make):
        assert name not in PROGRAMS
        PROGRAMS[name] = functools.partial(make, *arguments, **options)
        return make

    return register


def drawn(*shape, seed=0, dtype=torch.float32):
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, **ON).to(dtype)


def network():
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(12, **ON)
    return nn.Sequential(nn.Linear(6, 12, **ON), norm, nn.ReLU(), nn.Linear(12, 2, **ON))


def loss_of(model, x, factor=1.0):
    return (model(x).float() * factor).square().mean()


def tensors_of(*objects):
    """All tensors of parameters, states, dictionaries and lists; numbers and texts as tensors."""
    found = []
    for one in objects:
        if isinstance(one, torch.Tensor):
            found.append(one.detach().clone())
        elif isinstance(one, nn.Module):
            found += tensors_of(one.state_dict(), *one.parameters())
        elif isinstance(one, torch.optim.Optimizer):
            found += tensors_of(one.param_groups, [*one.state.values()])
        elif isinstance(one, dict):
            found += tensors_of(*one.values())
        elif isinstance(one, list | tuple):
            found += tensors_of(*one)
        elif isinstance(one, int | float):
            found.append(torch.tensor(one, device="cpu", dtype=torch.float64))
        elif isinstance(one, str):
            found.append(torch.tensor([*one.encode()], device="cpu", dtype=torch.uint8))
    return found


# --- amp ------------------------------------------------------------------------------------------


def _adam(params):
    return FusedAdam(params, lr=0.01)


def _torchs_sgd(params):
    return torch.optim.SGD(params, lr=0.01, momentum=0.9)


@program("amp O0", "O0", _adam)
@program("amp O1", "O1", _torchs_sgd, clip=0.5)
@program("amp O1, fused_step", "O1", _adam, clip=0.5, fused_step=True)
@program("amp O2", "O2", _adam, clip=0.5)
@program("amp O2 of torch's SGD", "O2", _torchs_sgd)
@program("amp O2, fused_step", "O2", _adam, fused_step=True)
@program("amp O3", "O3", _torchs_sgd)
@program("amp O4", "O4", _adam)
@program("amp O5", "O5", _torchs_sgd, clip=0.5)
def with_amp(level, make, clip=0.0, **options):
    """Four steps, one of them with an overflow; a checkpoint; two more steps."""
    model, x = network(), drawn(4, 6)

    def step(model, optimizer, number):
        optimizer.zero_grad()
        loss = loss_of(model, x, math.inf if number == 2 else 1.0)
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        if clip:
            amp.clip_grad_norm_(optimizer, clip)
        optimizer.step()
        return loss.detach()

    yield
    made = amp.initialize(model, make(model.parameters()), opt_level=level, verbosity=0, **options)
    losses = [step(*made, number) for number in range(4)]
    saved = [part.state_dict() for part in (*made, amp)]
    for part, state in zip((*made, amp), saved, strict=True):
        part.load_state_dict(state)
    losses += [step(*made, number) for number in range(4, 6)]
    found = tensors_of(losses, *made, amp.state_dict(), [*amp.master_params(made[1])])
    outcome = [] if make is _torchs_sgd else amp.outcome(made[1])
    yield [*found, *tensors_of(outcome)]


@program("amp O2, on a device that runs behind")
def late():
    """The host learns of an overflow later, as from a GPU."""
    run = with_amp("O2", _adam, fused_step=True)
    yield next(run)
    with mock.patch.multiple(overflow, runs_behind=lambda device: True, AsyncCopy=Delayed):
        yield next(run)


@program("amp, gradients of no parameter")
def without_gradients():
    """What is clipped and measured where a loss reaches nothing that is stepped."""
    models, x = [network(), network()], drawn(4, 6)
    yield
    optimizer = FusedAdam(models[0].parameters(), lr=0.01)
    made, optimizer = amp.initialize(
        models[0], optimizer, opt_level="O2", verbosity=0, fused_step=True
    )
    loss = loss_of(models[1], x)
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    yield tensors_of(amp.clip_grad_norm_(optimizer, 1.0))


@program("the handle of 2018")
def handle():
    model, x = network(), drawn(4, 6)
    yield
    handle = amp.init()
    optimizer = handle.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        optimizer.zero_grad()
        with optimizer.scale_loss(loss_of(model, x)) as scaled:
            scaled.backward()
        optimizer.step()
    yield tensors_of(model)


@program("amp.scaler")
def scalers():
    """What old programs call of a scaler."""
    grads = [drawn(4, 3), drawn(5, dtype=torch.float16)]
    yield
    one = scaler.LossScaler("dynamic", init_scale=8.0, scale_window=2)
    found = [one.numbers, one._overflow_buf]
    masters = [grad.float() for grad in grads]
    one.unscale(grads, masters, 8.0)
    one.unscale_with_stashed_python(grads, [*masters], masters, 0.3, 0.7)
    one.update_scale()
    one._has_overflow = True
    found += [one._found, one._overflow_buf, one.numbers]
    one.update_scale()
    flags = scaler.scale_check_overflow(grads[0], 3.0)
    flags += scaler.scale_check_overflow_python(grads[0], masters[0], 1e-4, True)
    yield tensors_of(found, one.numbers, masters, grads, flags)


@program("GradScaler, float32", torch.float32)
@program("GradScaler, float16", torch.float16)
def grad_scaler(dtype):
    model, x = network().to(dtype), drawn(4, 6, dtype=dtype)
    yield
    optimizer, scaler = FusedAdam(model.parameters(), lr=0.01), amp.GradScaler("cpu", 256.0)
    norms = [amp.GradScaler("cpu", enabled=False).clip_grad_norm_(optimizer, 1.0)]
    for factor in (1.0, math.inf, 1.0):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, x, factor)).backward()
        norms.append(scaler.clip_grad_norm_(optimizer, 1.0))
        scaler.step(optimizer)
        scaler.update()
    outcome = scaler.outcome(optimizer)
    scaler.load_state_dict(scaler.state_dict())
    yield tensors_of(model, optimizer, norms, outcome, scaler.state_dict())


@program("fp16_utils")
def half_by_hand():
    model, x = network(), drawn(4, 6)
    yield
    half = fp16_utils.network_to_half(model)
    sgd = torch.optim.SGD(half.parameters(), lr=0.1)
    optimizer = fp16_utils.FP16_Optimizer(sgd, dynamic_loss_scale=True, verbose=False)
    norms = [optimizer.clip_master_grads(1.0)]
    for factor in (1.0, math.inf, 1.0):
        optimizer.zero_grad()
        optimizer.backward(loss_of(half, x.half(), factor))
        norms.append(optimizer.clip_master_grads(1.0))
        optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    yield tensors_of(half, norms, sgd)


@program("debug.watch")
def watched():
    model, x = network(), drawn(4, 6)
    yield
    made = torch.optim.Adam(model.parameters(), lr=0.01)
    model_, optimizer = amp.initialize(model, made, opt_level="O2", verbosity=0)
    with debug.watch(model_, optimizer):
        for _ in range(2):
            optimizer.zero_grad()
            with amp.scale_loss(loss_of(model_, x), optimizer) as scaled:
                scaled.backward()
            optimizer.step()
    yield tensors_of(model)


@program("debug.watch explains a nan of the data", math.nan)
@program("debug.watch explains an eps of 0 in float16", 1.0)
def explained(factor):
    torch.manual_seed(0)
    model, x = nn.Linear(4, 3, device=CPU, dtype=torch.float16), drawn(5, 4, dtype=torch.float16)
    x[2, 3] *= factor
    yield
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-8)
    with debug.watch(model, optimizer, on_fault="keep") as watch:
        for _ in range(3):
            optimizer.zero_grad()
            (loss_of(model, x) * 1e-4).backward()
            optimizer.step()
            if watch.fault:
                yield tensors_of(str(watch.explain()))
                return
    raise AssertionError("there is a fault in each of these programs")


@program("debug.watch of a jump")
def drifting():
    model, x = network(), drawn(4, 6)
    yield
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with debug.watch(model, optimizer, every=1) as watch:
        for number in range(32):
            optimizer.zero_grad()
            loss_of(model, x, 100.0 if number == 31 else 1.0).backward()
            optimizer.step()
    assert watch.drifts
    yield tensors_of([str(one) for one in watch.drifts])


# --- optimizers -----------------------------------------------------------------------------------


def one_optimizer(entry, variant):
    """Three steps with a scale, one that is skipped, a checkpoint, a step; torch's state dict."""
    setting = Setting(CPU, "as called")
    params = steps.parameters(setting, DTYPES[variant.dtypes[0]], variant)
    grads = [steps.gradients(params, setting, number) for number in range(5)]
    yield
    torch.manual_seed(0)  # stochastic rounding draws
    optimizer = steps.made(entry, variant, params)
    for number, some in enumerate(grads):
        steps.give(params, some)
        if not variant.larc:
            steps.tell(optimizer, float(number == 2), setting)
        if number == 4:
            optimizer.load_state_dict(optimizer.state_dict())
        optimizer.step()
    yield tensors_of(params, getattr(optimizer, "optim", optimizer))


for entry, variant in steps.EVERY:
    program(entry.called(variant), entry, variant)(one_optimizer)


@program("FusedAdam for torch.optim", FusedAdam)
@program("FusedAdagrad for torch.optim", FusedAdagrad)
@program("FusedSGD for torch.optim", FusedSGD, momentum=0.9)
def for_torch(make, **options):
    params = [nn.Parameter(drawn(4, 3)), nn.Parameter(drawn(5))]
    yield
    optimizer = make(params, lr=0.01, **options)
    params[0].grad = torch.ones_like(params[0])
    optimizer.step()
    saved = optimizer.torch_state_dict()
    optimizer.load_state_dict(saved)
    yield tensors_of(saved, optimizer)


@program("LARC")
def larc():
    params = [nn.Parameter(drawn(4, 3, seed=1)), nn.Parameter(drawn(5))]
    yield
    sgd = torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=1e-9)
    optimizer = LARC(sgd, trust_coefficient=0.3)
    for _ in range(2):
        for param in params:
            param.grad = torch.full_like(param, 1e-3)
        optimizer.step()
    yield tensors_of(params, sgd)


@program("older optimizers")
def older_optimizers():
    params = [nn.Parameter(drawn(4, 3)), nn.Parameter(drawn(5))]
    halves = [drawn(4, 3, dtype=torch.float16), drawn(5, dtype=torch.float16)]
    yield
    adam = older.FusedAdam(params, lr=0.01, max_grad_norm=0.5)
    grads = [torch.full_like(param, 3.0) for param in params]
    adam.step(grads=grads, scale=2.0, grad_norms=[torch.tensor(8.0, **ON)])
    adam.step(grads=grads, scale=torch.tensor(2.0, **ON), grad_norms=[8.0])
    lamb = older.FusedLAMB(params, lr=0.01)
    for param in params:
        param.grad = torch.ones_like(param)
    lamb.step()
    model = [nn.Parameter(half) for half in halves]
    optimizer = older.FP16_Optimizer(older.FusedAdam(model, lr=0.01), dynamic_loss_scale=True)
    for param in model:
        param.grad = torch.ones_like(param)
    optimizer.update_master_grads()
    optimizer.step()
    yield tensors_of(params, adam, lamb, model)


@program("clipping, no gradients", None, 2.0)
@program("clipping", torch.float32, 2.0)
@program("clipping by the third norm", torch.bfloat16, 3.0)
@program("clipping by the largest", torch.float16, math.inf)
def clipped(dtype, norm_type):
    params = [nn.Parameter(drawn(4, 3)), nn.Parameter(drawn(5))]
    for param in params if dtype else ():
        param.data = param.data.to(dtype)
        param.grad = param.data.clone()
    yield
    norm = clip_grad.clip_grad_norm_(params, 0.1, norm_type)
    grads = [param.grad for param in params if param.grad is not None]
    yield tensors_of(norm, clip.clip_(grads, 0.05, norm_type), grads)


# --- operations -----------------------------------------------------------------------------------


def one_op(op):
    inputs = [op.inputs(op.checked.small[0], DTYPES[dtype], CPU) for dtype in op.dtypes]
    yield
    found = []
    for leaves, rest in inputs:
        leaves = [leaf.detach().requires_grad_() for leaf in leaves]
        y = op.ours(*leaves, *rest)
        found += [y, *torch.autograd.grad(y, leaves, torch.ones_like(y))]
    yield tensors_of(found)


for checked in CHECKED:
    program(checked.title, checked)(one_op)


def one_list_op(op):
    shapes = ((7,), (33, 5), ())
    lists = [[drawn(*shape, seed=seed) for shape in shapes] for seed in range(op.lists)]
    flag = torch.zeros(1, dtype=torch.int32, device=CPU)
    yield
    found = op.ours(flag, *lists)
    yield tensors_of(found.rounded, found.norms, flag, lists)


for listed in LISTS:
    program(listed.name, listed)(one_list_op)


@program("norms of nothing")
def of_nothing():
    empty = torch.empty(0, **ON)
    yield
    yield tensors_of(square_sums([]), max_norms([]), square_sums([empty]))


@program("memory-efficient norms with tiny weights")
def with_tiny_weights():
    x, weight = drawn(3, 4), torch.tensor([0.0, -1e-9, 1.0, 1e-6], **ON)
    yield
    leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    y = fused_rms_norm_affine(*leaves, (4,), 1e-5, memory_efficient=True)
    yield tensors_of(y, torch.autograd.grad(y, leaves, torch.ones_like(y)))


@program("transducer")
def transduced():
    f, g, labels = drawn(2, 4, 5), drawn(2, 3, 5), torch.tensor([[1, 2], [2, 0]], device=CPU)
    lengths, counts = torch.tensor([4, 3], device=CPU), torch.tensor([3, 2], device=CPU)
    yield
    joint = transducer.TransducerJoint(relu=True)
    leaves = [f.clone().requires_grad_(), g.clone().requires_grad_()]
    h = joint(*leaves, lengths, counts)
    losses = transducer.TransducerLoss()(h, labels, lengths, counts - 1, 0)
    yield tensors_of(losses, torch.autograd.grad(losses.sum(), leaves))


@program("sparsity")
def pruned():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32, **ON), nn.Linear(32, 16, **ON))
    masks = [(drawn(8, 8), pattern) for pattern in ("m4n2_1d", "m4n2_2d_best", "m4n2_2d_greedy")]
    yield
    optimizer = FusedAdam(model.parameters(), lr=0.01)
    sparsity.ASP.init_model_for_pruning(
        model, "m4n2_1d", verbosity=0, whitelist=[nn.Linear], allow_recompute_mask=True
    )
    try:
        sparsity.ASP.init_optimizer_for_pruning(optimizer)
        sparsity.ASP.compute_sparse_masks()
        model(drawn(4, 32)).sum().backward()
        optimizer.step()
        found = tensors_of(model)
        sparsity.ASP.restore_pruned_weights()
    finally:
        sparsity.ASP.reset()
    yield [*found, *tensors_of([sparsity.create_mask(*given) for given in masks])]


# --- modules --------------------------------------------------------------------------------------


def _images(*shape):
    return drawn(*(shape or (2, 4, 4, 4)))


MODULES = {  # how each is made, and what it is applied to
    "MLP": (lambda: apex.mlp.MLP([4, 8, 3]), lambda: [drawn(5, 4)]),
    "FusedDense": (lambda: apex.fused_dense.FusedDense(4, 3), lambda: [drawn(5, 4)]),
    "FusedDenseGeluDense": (
        lambda: apex.fused_dense.FusedDenseGeluDense(4, 8, 3), lambda: [drawn(5, 4)],
    ),
    "FusedLayerNorm": (lambda: apex.normalization.FusedLayerNorm(4), lambda: [drawn(5, 4)]),
    "MixedFusedRMSNorm": (lambda: apex.normalization.MixedFusedRMSNorm(4), lambda: [drawn(5, 4)]),
    "FastLayerNorm": (lambda: apex.contrib.layer_norm.FastLayerNorm(4), lambda: [drawn(5, 4)]),
    "GroupNorm": (lambda: GroupNorm(2, 4), lambda: [_images()]),
    "SyncBatchNorm": (lambda: apex.parallel.SyncBatchNorm(4), lambda: [_images()]),
    "BatchNorm2d_NHWC": (lambda: groupbn.BatchNorm2d_NHWC(4, True), lambda: [_images(), _images()]),
    "Bottleneck": (lambda: Bottleneck(4, 2, 4), lambda: [_images()]),
    "SelfMultiheadAttn": (
        lambda: SelfMultiheadAttn(4, 2, bias=True, include_norm_add=True),
        lambda: [drawn(3, 2, 4)] * 3,
    ),
    "LSTM": (lambda: RNN.LSTM(4, 3, 2, bidirectional=True), lambda: [drawn(5, 2, 4)]),
    "GRU": (lambda: RNN.GRU(4, 3, 1), lambda: [drawn(5, 2, 4)]),
    "mLSTM": (lambda: RNN.mLSTM(4, 3, 1), lambda: [drawn(5, 2, 4)]),
    "LinearCrossEntropyLoss": (
        lambda: apex.contrib.xentropy.LinearCrossEntropyLoss(4, 9),
        lambda: [drawn(5, 4), torch.arange(5, device=CPU)],
    ),
}  # fmt: skip


def one_module(make, inputs):
    torch.manual_seed(0)
    module, given = make(), inputs()
    yield
    found = module(*given)
    found = found[0] if isinstance(found, tuple) else found
    found.sum().backward()
    yield tensors_of(found, [p.grad for p in module.parameters() if p.grad is not None])


for title, (make, inputs) in MODULES.items():
    program(title, make, inputs)(one_module)


@program("weight norm")
def weight_norm():
    torch.manual_seed(0)
    module, x = nn.Linear(4, 3, **ON), drawn(5, 4)
    yield
    normed = reparameterization.apply_weight_norm(module)
    normed(x).sum().backward()
    yield tensors_of(normed, [p.grad for p in normed.parameters()])


@program("fmha")
def attended():
    qkv, ends = drawn(8, 3, 2, 4), torch.tensor([0, 5, 8], dtype=torch.int32, device=CPU)
    yield
    yield tensors_of(fmha.FMHAFun.apply(qkv, ends, 0.0, 5, True))


# --- ranks and transformers -----------------------------------------------------------------------


def in_a_group(make):
    @functools.wraps(make)
    def made(*arguments):
        run = make(*arguments)
        yield next(run)
        with alone():
            try:
                yield next(run)
            finally:
                parallel_state.destroy_model_parallel()

    return made


@program("DistributedDataParallel")
@in_a_group
def data_parallel():
    model, x = network(), drawn(4, 6)
    yield
    synced = convert_syncbn_model(model)
    made = amp.initialize(synced, FusedAdam(synced.parameters()), opt_level="O2", verbosity=0)
    wrapped, optimizer = DistributedDataParallel(made[0]), made[1]
    for _ in range(2):
        optimizer.zero_grad()
        with amp.scale_loss(loss_of(wrapped, x), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    yield tensors_of(synced)


@program("DistributedFusedAdam", DistributedFusedAdam)
@program("DistributedFusedLAMB", DistributedFusedLAMB)
@in_a_group
def sharded(make):
    model, x = network(), 300 * drawn(4, 6)
    yield
    optimizer, scaler = make(model.parameters(), lr=0.01), amp.GradScaler("cpu")
    norms = []
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, x, 100.0)).backward()
        scaler.unscale_(optimizer)
        if make is DistributedFusedAdam:
            norms.append(optimizer.clip_grad_norm(1.0))
        scaler.step(optimizer)
        scaler.update()
    yield tensors_of(norms, model, scaler.outcome(optimizer), optimizer.state_dict())


@program("parameters placed over a mesh, FusedLAMB", FusedLAMB)
@program("parameters placed over a mesh, FusedNovoGrad", FusedNovoGrad)
@in_a_group
def placed(make):
    weights = [drawn(4, 3), drawn(6, 2, seed=1), drawn(5, seed=2)]
    yield
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    params = [nn.Parameter(distribute_tensor(one, mesh, [Shard(0)])) for one in weights]
    optimizer = make(params, lr=0.01)
    norms = [clip_grad.clip_grad_norm_(params, 1.0)]
    for some in (params[1:], params):
        for param in some:
            param.grad = torch.ones_like(param)
        norms.append(clip_grad.clip_grad_norm_(params, 1.0))
        optimizer.step()
    yield tensors_of([one.to_local() for one in params], norms)


@program("transformer")
@in_a_group
def transformer():
    x, target = drawn(3, 2, 4), torch.tensor([[0, 1], [2, 3], [1, 0]], device=CPU)
    text = torch.tensor([[1, 0, 2, 3], [0, 1, 2, 0]], device=CPU)
    yield
    parallel_state.initialize_model_parallel(1, 1)
    commons.set_random_seed(0)
    stage = commons.ToyParallelMLP(4)
    embedding = tensor_parallel.VocabParallelEmbedding(8, 4, use_cpu_initialization=True)
    y = stage(x)
    losses = tensor_parallel.vocab_parallel_cross_entropy(y, target, 0.1)
    losses.sum().backward()
    found = [y, losses, stage, embedding(target), utils.calc_params_l2_norm(stage, False)]
    found += [[*utils.get_ltor_masks_and_position_ids(text, 0, True, True, True)]]
    found += list(MegatronPretrainingRandomSampler(32, 0, 2, 0, 1))
    yield tensors_of(found, [p.grad for p in stage.parameters()])


@program("a pipeline of one stage")
@in_a_group
def pipeline():
    torch.manual_seed(0)
    batch, model = [drawn(4, 3)], commons.MyModel(3)
    model.model_type = ModelType.encoder_or_decoder
    yield
    parallel_state.initialize_model_parallel(1, 1)
    utils.setup_microbatch_calculator(0, None, 4, 2, 1)
    scaler = GradScaler(8.0)
    try:
        found = pipelining.forward_backward_pipelining_without_interleaving(
            commons.fwd_step_func, batch, model, forward_only=False, tensor_shape=(2, 3),
            grad_scaler=scaler,
        )  # fmt: skip
    finally:
        utils._GLOBAL_NUM_MICROBATCHES_CALCULATOR = None
    yield tensors_of(found, [p.grad for p in model.parameters()], scaler.state_dict())

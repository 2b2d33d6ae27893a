"""Small programs that use the private names of torch, one for each family of names.

Each returns numbers, the same in each process. ``tests/test_missing_private_names.py`` runs them in
processes in which one name is hidden.
"""

import contextlib
import functools
import io
import tempfile
import warnings
from types import SimpleNamespace

import torch
from torch import nn

from tests.ranks import alone


def _model(*more):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), *more, nn.ReLU(), nn.Linear(16, 4))


def _batch():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(6, 8, generator=generator), torch.arange(6) % 4


def _loss(model):
    x, labels = _batch()
    return nn.functional.cross_entropy(model(x).float(), labels)


def _numbers(*tensors):
    """The first elements of each tensor."""
    return [x for one in tensors for x in one.detach().double().flatten()[:100].tolist()]


def _normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# -- operations ------------------------------------------------------------------------------------


def operations():
    """Forward and backward of operations, small and large, float32 and float64."""
    from apex.ops.layers.scaled_softmax import scaled_softmax
    from apex.ops.layers.swiglu import swiglu
    from apex.ops.losses.cross_entropy import cross_entropy
    from apex.ops.norms.group_norm import group_norm

    found = []
    for dtype in (torch.float32, torch.float64):
        x = _normal(64, 64).to(dtype).requires_grad_()
        image = _normal(2, 8, 4, 4).to(dtype).requires_grad_()
        wide = _normal(8, 8, 48, 48).to(dtype).requires_grad_()
        for leaf, y in (
            (x, swiglu(x, x * 2)),
            (x, cross_entropy(x, torch.arange(64))),
            (x, scaled_softmax(x, None, 0.5, causal=True, name="softmax")),
            (wide, scaled_softmax(wide, None, 0.5, causal=True, name="softmax")),
            (image, group_norm(image, 2, act="silu")),
        ):
            (gradient,) = torch.autograd.grad((y * y).sum(), leaf, create_graph=True)
            found += [y[:1], gradient[:1], torch.autograd.grad(gradient.sum(), leaf)[0][:1]]
    with torch.autocast("cpu", torch.bfloat16):
        found.append(swiglu(x, x))
    return _numbers(*found)


def many_gradients():
    """Backward passes under vmap, and a forward-mode derivative."""
    from apex.contrib.xentropy import linear_log_probs
    from apex.ops.layers.scaled_softmax import scaled_softmax

    x = _normal(8, 8, 48, 48).requires_grad_()
    y = scaled_softmax(x, None, 0.5, causal=True, name="softmax")
    dy = torch.stack([torch.ones_like(y), y.detach()])
    found = torch.autograd.grad(y, x, dy, is_grads_batched=True, retain_graph=True)
    found += torch.func.vmap(lambda v: torch.autograd.grad(y, x, v, retain_graph=True))(dy)
    hidden, weight = _normal(4, 8).requires_grad_(), _normal(5, 8)
    entropy = linear_log_probs(hidden, weight, torch.arange(4)).entropy
    one = torch.func.vmap(lambda v: torch.autograd.grad(entropy, hidden, v, retain_graph=True))
    found += one(torch.eye(4))
    with torch.autograd.forward_ad.dual_level(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's decompositions are scripts
        dual = torch.autograd.forward_ad.make_dual(x.detach(), y.detach())
        dual_y = scaled_softmax(dual, None, 0.5, causal=True, name="softmax")
        tangent = torch.autograd.forward_ad.unpack_dual(dual_y).tangent
    return _numbers(*found, tangent)


def operators():
    """The backward of an operator that is a node of a graph, by its definition."""
    from apex.ops.layers.swiglu import OP

    x = _normal(16, 16).requires_grad_()
    y = OP.operator(x, x * 2)
    return _numbers(y, *torch.autograd.grad((y * y).sum(), x))


def embedding_in_parallel():
    """An embedding of which another rank has half, of a tensor-parallel group of one."""
    from apex.transformer import parallel_state, tensor_parallel

    with alone():
        parallel_state.initialize_model_parallel()
        layer = tensor_parallel.VocabParallelEmbedding(8, 4, use_cpu_initialization=True)
        layer.num_embeddings_per_partition = layer.vocab_end_index = 4
        with torch.no_grad():
            layer.weight.copy_(_normal(8, 4))
        y = layer(torch.arange(8))
        parallel_state.destroy_model_parallel()
    return _numbers(y)


def parallel_checkpoint():
    """Recomputation of tensor-parallel layers."""
    from apex.transformer import parallel_state, tensor_parallel

    with alone():
        parallel_state.initialize_model_parallel()
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        model, x = _model(), _batch()[0].requires_grad_()
        tensor_parallel.checkpoint(model, False, x).sum().backward()
        parallel_state.destroy_model_parallel()
    return _numbers(x.grad)


# -- optimizers ------------------------------------------------------------------------------------


def optimizers():
    """Three steps of each optimizer, in each of its ways with float32 weights and states."""
    from apex.catalogue.optimizers import OPTIMIZERS

    found = []
    for entry in OPTIMIZERS:
        for variant in entry.variants:
            if "state" in variant.options or "fp32" not in variant.dtypes:
                continue
            options = {"lr": 0.01, "weight_decay": 0.1, **entry.options, **variant.options}
            params = [nn.Parameter(_normal(5, 3, seed=n)) for n in range(3)]
            optimizer = entry.make(params, **options)
            for step in range(3):
                for n, param in enumerate(params):
                    param.grad = _normal(5, 3, seed=10 * step + n)
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
            found += params
    return _numbers(*found)


def scaled_step():
    """A capturable optimizer under torch's GradScaler."""
    from apex.optimizers import FusedAdam

    params = [nn.Parameter(_normal(5, 3, seed=n)) for n in range(3)]
    optimizer = FusedAdam(params, lr=0.01, capturable=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(2):
        loss = sum((param * _normal(5, 3, seed=step)).sum() for param in params)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return _numbers(*params)


def peers():
    """What the report times optimizers beside."""
    from apex.catalogue.peers import foreach_lamb, foreach_novograd

    params = [_normal(5, 3, seed=n) for n in range(3)]
    steps = (
        foreach_lamb(params, lr=0.01, weight_decay=0.1),
        foreach_novograd(params, lr=0.01, betas=(0.9, 0.98), weight_decay=0.1),
    )
    for number, step in enumerate((*steps, *steps)):
        for n, param in enumerate(params):
            param.grad = _normal(5, 3, seed=10 * number + n)
        step()
    return _numbers(*params)


def unscaling():
    """Unscale gradients of each kind in place."""
    from apex.ops.lists.unscale import multiply_, unscale_

    grads = [_normal(4, 3), _normal(4, 3, seed=1).half()]
    sparse = torch.sparse_coo_tensor(
        [[0, 2]], [[1.0, 2.0], [3.0, 4.0]], (3, 2), check_invariants=True
    )
    sparse = sparse.coalesce()
    flag = unscale_([*grads, sparse], torch.tensor(4.0))
    multiply_(grads, 3.0)
    bad = unscale_([torch.tensor([1.0, torch.inf])], torch.tensor(4.0))
    return _numbers(*grads, sparse.values(), flag, bad)


def negative_gradients():
    """Unscale a gradient that is a negative view."""
    from apex.ops.lists.unscale import unscale_

    grad = torch._neg_view(_normal(4, 3))
    unscale_([grad], torch.tensor(4.0))
    return _numbers(grad)


def flat_lists():
    """Lists of tensors as one."""
    from apex.ops.lists.flat import flatten, unflatten

    tensors = [_normal(4, 3), _normal(5), _normal(0, 2)]
    return _numbers(*unflatten(flatten(tensors) * 2, tensors), flatten(tensors[:1]))


# -- amp -------------------------------------------------------------------------------------------


def _trained(level, model, optimizer, steps=3, **options):
    from apex import amp

    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
    for _ in range(steps):
        optimizer.zero_grad()
        with amp.scale_loss(_loss(model), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    return model


def _at(levels, make, more=lambda: ()):
    from apex import amp

    found = []
    for level in levels:
        model = _model(*more())
        model = _trained(level, model, make(model.parameters()))
        with torch.no_grad():
            found += [*model.parameters(), model(_batch()[0]).cpu()]
        amp.reset()
    return _numbers(*found)


def levels():
    """Steps at O1, O2 and O4, a batch norm, a layer that computes in float32, and Tensor.cpu."""
    make = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    return _at(("O1", "O2", "O4"), make, lambda: (nn.BatchNorm1d(16), nn.GELU()))


def fused_levels():
    """Steps at O1 and O2 of an optimizer that unscales by itself."""
    from apex.optimizers import FusedAdam

    return _at(("O1", "O2"), functools.partial(FusedAdam, lr=0.01))


def launched():
    """Where kernels are launched."""
    from apex.kernels._launching import current_device

    return [current_device() is None]


def saved_on_the_cpu():
    """O1 with activations that are kept on the CPU."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.autograd.graph.save_on_cpu():
        model = _trained("O1", model, optimizer)
    return _numbers(*model.parameters())


def recurrent():
    """An LSTM at O1 and O4."""
    from apex import amp

    found = []
    for level in ("O1", "O4"):
        torch.manual_seed(0)
        layer = nn.LSTM(4, 8)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        layer, _ = amp.initialize(layer, optimizer, opt_level=level, verbosity=0)
        found.append(layer(_normal(5, 2, 4))[0])
        amp.reset()
    return _numbers(*found)


def logged_casts():
    """Log casts, and stop while another function mode is on top."""
    from torch.overrides import TorchFunctionMode

    from apex import amp

    class Mode(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    handle = amp.init(verbose=True)
    with Mode():
        y = torch.ones(2, 2) @ torch.ones(2, 2)
        handle._deactivate()
    return _numbers(y)


def capture():
    """A step that would be a CUDA graph on a GPU, with the checks for that."""
    from apex import amp

    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)

    def step(x):
        optimizer.zero_grad()
        loss = model(x).float().square().mean()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        return loss

    captured = amp.capture(step)
    losses = [captured(_batch()[0]) for _ in range(8)]
    return _numbers(*losses)


def compiled():
    """A compiled model at O1, and compiled functions of the library."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = _trained("O1", torch.compile(model, backend="eager"), optimizer)
    return _numbers(*model.parameters())


# -- debugging -------------------------------------------------------------------------------------


class _Broken(nn.Linear):
    def forward(self, x):
        return torch.sqrt(super().forward(x).tanh() - 2)


def watched():
    """Find the operation that made a NaN, from a step of a model."""
    from apex import debug

    torch.manual_seed(0)
    model = _Broken(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with debug.watch(model, optimizer, on_fault="keep") as watch:
        model(_batch()[0]).sum().backward()
        optimizer.step()
        report = watch.explain()
    return [report.operation, report.cause, report.module]


def debugged_script():
    """``apex debug`` of a script whose loss is NaN outside of the model."""
    from apex.commands.command_line import main

    program = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
model = nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, in DataLoader(TensorDataset(torch.randn(8, 8)), batch_size=4):
    loss = (model(x).tanh() - 2).sqrt().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/train.py"
        with open(path, "w", encoding="utf-8") as file:
            file.write(program)
        said = io.StringIO()
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            code = main(["debug", "--out", folder, path])
    text = said.getvalue()
    return [code, "as with --no-lines" in text or "sqrt" in text]


def what_if():
    """Which formats a model can be trained in."""
    from apex import debug

    class Named(nn.Linear):
        def forward(self, x):
            return nn.functional.linear(input=x, weight=self.weight, bias=self.bias)

    batches = [_normal(6, 8, seed=n) for n in range(8)]
    model = _model(Named(16, 16))
    result = debug.what_if(model, lambda model, x: model(x).square().mean(), batches)
    return [str(result).splitlines()[0]]


def waiting_together():
    """Ranks that wait for each other to explain a fault."""
    from apex.debug.ranks import Together

    with alone():
        together = Together([_model()], None, "name")
        together.is_parallel = True
        return [together.are_here()]


# -- distributed -----------------------------------------------------------------------------------


def wrappers():
    """Both DistributedDataParallel around a model at O2."""
    from apex import amp
    from apex.parallel import DistributedDataParallel

    found = []
    for wrap in (nn.parallel.DistributedDataParallel, DistributedDataParallel):
        with alone():
            model = _model()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
            wrapped = wrap(model)
            for _ in range(2):
                with amp.scale_loss(_loss(wrapped), optimizer) as scaled:
                    scaled.backward()
                optimizer.step()
                optimizer.zero_grad()
            found += list(model.parameters())
            amp.reset()
    return _numbers(*found)


def mesh():
    """The mesh that a part of one belongs to."""
    from torch.distributed.device_mesh import init_device_mesh

    from apex import _compat

    with alone():
        whole = init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b"))
        return [list(_compat.root_mesh(whole["a"]).mesh.shape)]


def _overlapped():
    from apex.contrib.optimizers.distributed_fused_adam import DistributedFusedAdam

    model = _model()
    optimizer = DistributedFusedAdam(
        model.parameters(), lr=0.01, overlap_param_sync=True, bucket_cap_mb=1e-4
    )
    return model, optimizer


def _stepped(model, optimizer):
    _loss(model).backward()
    optimizer.step()
    optimizer.zero_grad()


def overlapped():
    """Parameters that are read while they are on their way."""
    with alone():
        model, optimizer = _overlapped()
        for _ in range(2):
            _stepped(model, optimizer)
        optimizer.param_sync()
    return _numbers(*model.parameters())


def _overlapped_while(read):
    """What ``read(model, optimizer)`` returns, behind a step."""
    with alone(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, optimizer = _overlapped()
        _stepped(model, optimizer)
        return _numbers(*read(model, optimizer))


def overlapped_in_a_mode():
    """The same where a dispatch mode is on."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    def read(model, optimizer):
        with Mode():
            return [model(_batch()[0])]

    return _overlapped_while(read)


def overlapped_in_a_transform():
    """The same under ``torch.func.vmap``."""
    return _overlapped_while(lambda model, optimizer: [torch.func.vmap(model)(_batch()[0])])


def overlapped_in_a_trace():
    """The same under ``torch.jit.trace``."""
    x = _batch()[0]
    return _overlapped_while(lambda model, optimizer: [torch.jit.trace(model[0], x)(x)])


def overlapped_and_compiled():
    """The same in a function that is compiled meanwhile."""

    def read(model, optimizer):
        function = torch.compile(lambda x: x @ model[0].weight.t(), backend="eager")
        found = [function(_batch()[0])]
        model.compile(backend="eager")
        _stepped(model, optimizer)
        return [*found, model(_batch()[0])]

    return _overlapped_while(read)


# -- the report ------------------------------------------------------------------------------------


def timed_models():
    """What the report compiles models with."""
    from apex.commands.bench.training import turns

    cells = [SimpleNamespace(compile=True)]
    kept, turns.Turns = turns.Turns, lambda *_: SimpleNamespace(run=lambda: [1])
    found = turns.train(cells, None, torch.device("cpu"))
    turns.Turns = kept
    return found

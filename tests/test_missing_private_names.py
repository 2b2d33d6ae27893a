"""What apex does where torch lacks a private name: another way, or an error that names it."""

import ast
import functools
import inspect
import multiprocessing
import pathlib
import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.torch_version import TorchVersion

from apex._compat import names, private
from tests import missing_names
from tests.ranks import processes
from tests.tolerance import ANOTHER_WAY
from tests.trees import SRC

# -- a name that torch lacks -----------------------------------------------------------------------

FEATURES = {  # of tests/private_features.py -> names in apex._compat.private that it uses
    "operations": "is_any_autocast_enabled are_functorch_transforms_active forward_ad compiler "
    "is_functorch_wrapped_tensor len_torch_dispatch_stack silu "
    "cross_entropy_loss softmax_backward_data",
    "many_gradients": "is_legacy_batchedtensor is_batchedtensor get_tracing_state",
    "operators": "SetExcludeDispatchKeyGuard AutoDispatchBelowAutograd after_autograd_keyset "
    "any_requires_grad",
    "launched": "cuda_getDevice",
    "embedding_in_parallel": "assert_async",
    "parallel_checkpoint": "is_checkpoint_valid",
    "optimizers": "disable_dynamo get_eval_frame_callback TensorGuards fused_adam_ fused_adamw_ "
    "fused_sgd_ fused_adagrad_ foreach_add_ foreach_addcdiv_ foreach_addcmul_ foreach_clamp_max_ "
    "foreach_clamp_min_ foreach_copy_ foreach_div foreach_lerp_ foreach_mul foreach_mul_ "
    "foreach_zero_",
    "peers": "foreach_div_ foreach_norm foreach_sqrt",
    "unscaling": "amp_foreach_non_finite_check_and_unscale_",
    "negative_gradients": "neg_view",
    "flat_lists": "flatten_dense_tensors unflatten_dense_tensors",
    "levels": "current_graph_task_id DispatchKey DispatchKeySet ExcludeDispatchKeyGuard BatchNorm "
    "dispatch_has_kernel_for_dispatch_key storage_Use_Count set_code_exec_strategy "
    "FrameExecStrategy FrameAction",
    "fused_levels": "global_optimizer_pre_hooks global_optimizer_post_hooks",
    "saved_on_the_cpu": "top_saved_tensors_default_hooks",
    "recurrent": "is_mkldnn_bf16_supported is_mkldnn_fp16_supported",
    "logged_casts": "pop_mode push_mode",
    "capture": "expired TorchDispatchMode tree_leaves",
    "compiled": "graph_break TracingContext",
    "watched": "maybe_current_level tree_flatten tree_map current_autograd_node get_sequence_nr",
    "debugged_script": "len_torch_function_stack get_function_stack_at global_forward_pre_hooks "
    "global_forward_hooks BaseDataLoaderIter",
    "what_if": "DisableTorchFunction tree_map_only tree_unflatten",
    "waiting_together": "get_default_store",
    "mesh": "get_root_mesh mesh_resources",
    "wrappers": "execution_engine get_active_ddp_module get_backend",
    "overlapped": "DisableTorchFunctionSubclass",
    "overlapped_in_a_mode": "disable_current_modes",
    "overlapped_in_a_transform": "temporarily_clear_interpreter_stack",
    "overlapped_in_a_trace": "set_tracing_state",
    "overlapped_and_compiled": "CallbackTrigger callback_handler OptimizedModule",
    "timed_models": "dynamo_config",
}
QUICK = {"forward_ad", "foreach_lerp_", "neg_view", "DispatchKey", "tree_map"}  # one of each kind
FEATURE_OF = {name: feature for feature, uses in FEATURES.items() for name in uses.split()}


CASES = [
    pytest.param(row, id=row.name, marks=[] if row.name in QUICK else [pytest.mark.slow])
    for row in names.NAMES
]


def _in_a_process(function, *args):
    """What a function of `missing_names` returns in a process that has no module of apex yet."""
    found = None
    for context in (processes(), multiprocessing.get_context("spawn")):
        if found is None:
            ours, theirs = context.Pipe()
            words = theirs, function, *args
            process = context.Process(target=missing_names.answer, args=words)
            process.start()
            theirs.close()
            try:
                found = ours.recv() if ours.poll(120) else "no answer in 120 s"
            except EOFError:
                found = "it has ended without an answer"
            process.terminate()
            process.join()
    assert not isinstance(found, str), found
    return found


@functools.cache
def _expected(feature):
    return _in_a_process("run", feature)


@pytest.mark.dist
@pytest.mark.parametrize("row", CASES)
def test_what_uses_a_missing_name_goes_another_way_or_names_it(row):
    """In a process of its own."""
    if row.before and TorchVersion(torch.__version__) >= row.before:
        pytest.skip(f"for torch before {row.before}")
    if row.name == "cuda_getDevice" and torch.version.cuda and not torch.cuda.is_available():
        pytest.skip("without the name torch.cuda.device is used, which needs a GPU in this build")
    feature = FEATURE_OF[row.name]
    found, calls = _in_a_process("run_without", row.path, feature)
    if not row.effect:
        assert isinstance(found, str)
        assert found.startswith(f"torch {torch.__version__} has no {row.path}. ")
        assert row.purpose in found
        assert names.TESTED[-1] in found
        return
    assert calls != 0
    expected = _expected(feature)
    if not isinstance(found[0], float):
        assert found == expected
        return
    errors = [abs(a - b) for a, b in zip(found, expected, strict=True)]
    assert max(errors) <= ANOTHER_WAY * max(map(abs, expected))


@pytest.mark.dist
def test_everything_can_be_imported_where_all_names_are_missing():
    assert _in_a_process("import_everything", str(SRC)) > 200


def _linear():
    model = nn.Linear(4, 4)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def _initialize():
    from apex import amp

    amp.initialize(*_linear(), opt_level="O1", verbosity=0)


def _capture():
    from apex import amp

    amp.capture(lambda: None)


def _scaler():
    from apex import amp

    amp.GradScaler("cpu")


def _fused():
    from apex.optimizers import FusedAdam

    FusedAdam(nn.Linear(4, 4).parameters())


def _sharded():
    from apex.contrib.optimizers.distributed_fused_adam import DistributedFusedAdam

    DistributedFusedAdam(nn.Linear(4, 4).parameters())


def _sparse():
    from apex.ops.lists.unscale import unscale_

    unscale_([torch.eye(2).to_sparse()], torch.tensor(2.0))


def _watch():
    from apex import debug

    debug.watch(*_linear())


def _prune():
    from apex.contrib.sparsity import ASP

    ASP.init_model_for_pruning(nn.Linear(4, 4))


def _recurrent():
    from apex.RNN import LSTM

    LSTM(4, 4, 1)


def _reparameterized():
    from apex.reparameterization import apply_weight_norm

    apply_weight_norm(nn.Linear(4, 4))


def _parallel_layer():
    from apex.transformer.tensor_parallel import ColumnParallelLinear

    ColumnParallelLinear(4, 4)


def _synced():
    from apex.parallel import convert_syncbn_model

    convert_syncbn_model(nn.BatchNorm1d(4))


def _pool():
    from apex.contrib import nccl_allocator

    nccl_allocator.create_nccl_mem_pool()


def _saved():
    import torch.distributed.checkpoint.state_dict as of_torch

    from apex import amp

    model, optimizer = _linear()
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    try:
        of_torch.get_state_dict(model, optimizer)
    finally:
        amp.reset()


BEGIN = {
    "ASP": _prune,
    "DistributedFusedOptimizer": _sharded,
    "FusedOptimizer": _fused,
    "GradScaler": _scaler,
    "SyncBatchNorm": _synced,
    "amp.GradScaler": _scaler,
    "amp.capture": _capture,
    "amp.initialize": _initialize,
    "apex.RNN": _recurrent,
    "apex.debug": _watch,
    "apex.reparameterization": _reparameterized,
    "convert_syncbn_model": _synced,
    "nccl_allocator": _pool,
    "sparse gradients": _sparse,
    "tensor_parallel": _parallel_layer,
    "torch.distributed.checkpoint.state_dict": _saved,
}
REFUSED = [
    (row.owner, name, feature)
    for row in names.ATTRIBUTES
    for name in row.names.split()
    for feature in row.features
]


@pytest.fixture
def _asked_again():
    private.need.cache_clear()
    yield
    private.need.cache_clear()


@pytest.mark.dist
@pytest.mark.usefixtures("_asked_again")
@pytest.mark.parametrize(("owner", "name", "feature"), REFUSED)
def test_a_feature_refuses_to_begin_where_an_attribute_is_missing(
    owner, name, feature, monkeypatch
):
    found, _ = private._find(owner)  # imported, else there are no objects of it
    has = private.has
    monkeypatch.setattr(private, "has", lambda o, n: (o is not found or n != name) and has(o, n))
    if inspect.ismodule(found):
        monkeypatch.delattr(found, name)
    if feature == "nccl_allocator":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    message = f"torch {torch.__version__} has no {owner}.{name}. apex uses this private name"
    with pytest.raises(private.PrivateNameError, match=re.escape(message)):
        BEGIN[feature]()
    monkeypatch.undo()


# -- one that torch does not look up ---------------------------------------------------------------


def _trained_at_o1(checkpointed=False):
    from apex import amp

    torch.manual_seed(0)
    model, optimizer = amp.initialize(*_linear(), opt_level="O1", verbosity=0)
    yield
    x = torch.ones(2, 4)
    call = functools.partial(torch.utils.checkpoint.checkpoint, model, use_reentrant=False)
    with amp.scale_loss((call if checkpointed else model)(x).float().sum(), optimizer) as loss:
        loss.backward()
    yield model.weight.grad.clone()
    amp.reset()


@pytest.mark.parametrize("is_hidden", [True, False])
def test_checkpoints_work_without_the_function_that_amp_wraps(is_hidden, monkeypatch):
    training = _trained_at_o1(checkpointed=True)
    if is_hidden:
        monkeypatch.delattr(torch.utils.checkpoint, "_checkpoint_without_reentrant_generator")
    next(training)
    monkeypatch.undo()
    found = list(training)[0]
    plain = _trained_at_o1()
    next(plain)
    assert torch.equal(found, list(plain)[0])


@pytest.mark.parametrize("name", [
    "_nested_tensor_from_mask_left_aligned",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
])  # fmt: skip
def test_operators_that_torch_lacks_are_left_out(name, monkeypatch):
    from apex import amp
    from apex.amp.casting import cpu_float16, dispatcher

    amp.reset()
    cpu_float16.remove()
    asked, operator = [], dispatcher.operator

    def find(wanted):
        asked.append(wanted)
        return None if wanted == name else operator(wanted)

    monkeypatch.setattr(dispatcher, "operator", find)
    monkeypatch.setattr(cpu_float16, "operator", find)
    list(_trained_at_o1())
    cpu_float16.remove()
    assert name in asked


@pytest.mark.parametrize("options", [SimpleNamespace(), SimpleNamespace(_timeout=1)])
def test_a_group_without_a_known_time_out_has_torchs(options, monkeypatch):
    from apex.ops.lists import collectives

    made = []
    monkeypatch.setattr(
        torch.distributed, "new_group", lambda *_, timeout, **__: made.append(timeout)
    )
    monkeypatch.setattr(torch.distributed, "get_process_group_ranks", lambda group: [0])
    monkeypatch.setattr(torch.distributed, "get_backend", lambda group: "gloo")
    backend = SimpleNamespace(options=options)
    monkeypatch.setattr(private, "get_backend", lambda group, device: backend)
    collectives.new_gradient_group(object(), torch.device("cpu"))
    assert made == [getattr(options, "_timeout", None)]


# -- what apex says --------------------------------------------------------------------------------


class _Owner:
    of_class = 1

    def __init__(self):
        self._made = 1

    def _reads(self):
        return self._read


def _mentions(one):
    return getattr(one, "_asked", one._had)


@pytest.mark.parametrize(("owner", "name", "expected"), [
    (_Owner, "of_class", True), (_Owner, "_made", True), (_Owner, "_read", True),
    (_Owner, "_reads", True), (_Owner, "_other", False), (_mentions, "_asked", True),
    (_mentions, "_had", True), (_mentions, "_other", False), (ast, "AST", True),
    (ast, "_other", False),
])  # fmt: skip
def test_what_an_owner_has_is_found(owner, name, expected):
    assert private.has(owner, name) is expected


def test_this_torch_has_all_names():
    """Each release that the suite passes on does; look at a failure before all others."""
    for row in names.ATTRIBUTES:
        private._find(row.owner)  # imports it
    assert private.missing() == {}


def test_missing_names_are_listed_with_what_happens(monkeypatch):
    hidden = {"torch._foreach_add_", "torch._assert_async", "torch.overrides._push_mode"}
    find, has = private._find, private.has
    monkeypatch.setattr(
        private, "_find", lambda path: (private._MISSING, None) if path in hidden else find(path)
    )
    monkeypatch.setattr(private, "has", lambda owner, name: name != "_cdata" and has(owner, name))
    assert private.missing() == {
        "torch.overrides._push_mode": "an error where apex uses it to put a function mode back",
        "torch._foreach_add_": "the tensors of a list are computed one by one: slower",
        "torch._assert_async": "it waits for the device",
        "torch.UntypedStorage._cdata": "an error from amp.initialize, amp.capture, apex.debug",
    }


def test_the_tested_releases_are_those_of_the_page():
    *others, last = names.TESTED
    line = f"We ran the whole suite with torch {', '.join(others)} and {last}"
    page = (pathlib.Path(__file__).parents[1] / "docs" / "versions.md").read_text()
    assert line in page
    assert all(f"| torch {release} (" in page for release in names.TESTED)


def test_a_name_that_is_not_listed_is_an_ordinary_error():
    with pytest.raises(AttributeError, match="no attribute 'other'"):
        _ = private.other

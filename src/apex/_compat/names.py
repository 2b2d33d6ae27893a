"""The private names of torch that apex uses, and what happens where a torch lacks one.

torch may rename or drop them in any release. :mod:`apex._compat.private` looks them up;
``tests/test_private_names.py`` finds every use in ``src/apex`` and compares it with these lists.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from apex._compat import instead

TESTED = ("2.9.1", "2.13.0", "2.14.1")  #: The releases of torch on which the whole suite was run.


class Name(NamedTuple):
    """A function, a class or another object of a module of torch.

    Attributes:
        path: Where torch has it. ``apex._compat.private`` has it under the last part of the path,
            without an underscore in front.
        purpose: What apex uses it for; completes "apex uses it to ...".
        effect: What happens without it; empty: whoever uses it gets an error.
        without: What is used instead; ``None``: something that raises the error, which whoever
            uses it expects if there is an ``effect``.
        features: What raises the error when it begins, where an error on the way would be caught.
        alias: Its name in ``apex._compat.private``, if not that.
        before: It is for releases of torch before this one, and not looked for in later ones.
        holder: Whether ``private`` has the module that holds it: the value changes.
    """

    path: str
    purpose: str
    effect: str = ""
    without: Any = None
    features: tuple[str, ...] = ()
    alias: str = ""
    before: str = ""
    holder: bool = False

    @property
    def name(self) -> str:
        """What it is called in ``apex._compat.private``."""
        return self.alias or self.path.rpartition(".")[2].lstrip("_")


class Attributes(NamedTuple):
    """Attributes of torch's objects, which apex reads and writes where they are.

    Attributes:
        owner: The class; or a function of torch's that reads them from the program's objects.
        names: The attributes.
        purpose: What apex uses them for; completes "apex uses it to ...".
        features: What raises an error when it is first used, if one of them is missing.
        effect: What happens instead where there are no ``features``.
    """

    owner: str
    names: str
    purpose: str
    features: tuple[str, ...] = ()
    effect: str = ""


def _foreach(method: str) -> Name:
    return Name(
        f"torch._foreach_{method}",
        "compute on lists of tensors in one call",
        "the tensors of a list are computed one by one: slower",
        instead.each(method),
    )


_SLOWER_OP = "operations take a slower way: their definition, or the dispatcher"
_MODES = "call torch.compile, vmap and other transforms the way they need"
_OPERATORS = "compute an operator of torch.ops.apex below autograd"
_LAYER_CASTS = "cast functions that torch.autocast does not cast"
_COMPILED = "tell torch.compile what not to trace"
_OWN_GRAPHS = "torch.compile may compile the functions that cast as graphs of their own"
_TREES = "walk nested lists and dicts"
_DEBUG = "find the operation that made the first NaN"
_WATCHES, _SCRIPTS = ("apex.debug",), ("apex debug",)
_LOGS = (*_SCRIPTS, "amp.init(verbose=True)")
_NO_LINES = "apex debug looks only at the model, as with --no-lines"
_CAPTURE = "notice what a replay of a graph would not see"

NAMES = (
    # -- what runs now -----------------------------------------------------------------------------
    Name("torch._C._is_any_autocast_enabled", "ask in one call whether autocast is on",
         "it asks for each type of device: slower", instead.is_any_autocast_enabled),
    Name("torch._C._are_functorch_transforms_active", _MODES, _SLOWER_OP, instead.yes),
    Name("torch._C._functorch.is_functorch_wrapped_tensor", _MODES, _SLOWER_OP, instead.yes),
    Name("torch._C._functorch.is_legacy_batchedtensor", _MODES, _SLOWER_OP, instead.yes),
    Name("torch._C._functorch.is_batchedtensor", _MODES, _SLOWER_OP, instead.yes),
    Name("torch._C._len_torch_dispatch_stack", _MODES, _SLOWER_OP, instead.yes),
    Name("torch.autograd.forward_ad._current_level", _MODES, _SLOWER_OP, instead.ForwardAD,
         alias="forward_ad", holder=True),
    Name("torch.compiler._is_compiling_flag", "ask whether torch.export runs, in no frame",
         "it calls torch.compiler.is_compiling: slower", instead.COMPILER,
         alias="compiler", holder=True),
    Name("torch._C._get_tracing_state", "ask whether torch.jit.trace runs",
         "it calls torch.jit.is_tracing: slower", instead.get_tracing_state),
    Name("torch._C._set_tracing_state", "wait for a parameter in the middle of torch.jit.trace"),
    Name("torch._C._current_graph_task_id", "know in which backward pass a function is called"),
    Name("torch._C._cuda_getDevice", "ask which GPU is the current one",
         "kernels are launched inside torch.cuda.device: slower", instead.nothing),
    # -- the dispatcher ----------------------------------------------------------------------------
    Name("torch._C.DispatchKey", _LAYER_CASTS),
    Name("torch._C.DispatchKeySet", _LAYER_CASTS),
    Name("torch._C._ExcludeDispatchKeyGuard", _LAYER_CASTS),
    Name("torch._C._dispatch_has_kernel_for_dispatch_key", _LAYER_CASTS),
    Name("torch._C._SetExcludeDispatchKeyGuard",
         "differentiate an operation's definition under a dispatch mode or torch.export"),
    Name("torch._C._AutoDispatchBelowAutograd", _OPERATORS),
    Name("torch._C._after_autograd_keyset", _OPERATORS),
    Name("torch._C._any_requires_grad", "ask in one call whether a tensor requires a gradient",
         "it asks each tensor: slower", instead.any_requires_grad),
    Name("torch._C._functorch.maybe_current_level", "see that a transform runs a model",
         features=_WATCHES),
    Name("torch._C.DisableTorchFunction", "call torch's functions without the modes around them"),
    Name("torch._C.DisableTorchFunctionSubclass", "use parameters that are still being gathered"),
    Name("torch.ops.mkldnn._is_mkldnn_bf16_supported", "ask whether an LSTM can be bfloat16",
         "an LSTM is cast as for a CPU that has no bfloat16", instead.no),
    Name("torch.ops.mkldnn._is_mkldnn_fp16_supported", "ask whether this CPU has float16 products",
         "float16 products on a CPU are computed in float32", instead.no),
    Name("torch._C._autograd._top_saved_tensors_default_hooks",
         "see whether save_on_cpu calls Tensor.cpu",
         "with gradients off Tensor.cpu keeps its type at O1", instead.some_hooks),
    # -- the compiler ------------------------------------------------------------------------------
    Name("torch._compile._disable_dynamo", _COMPILED,
         "torch.compiler.disable is called instead, which imports the compiler",
         instead.disable_dynamo),
    Name("torch._C._dynamo.eval_frame.get_eval_frame_callback", _COMPILED,
         "each call is protected from torch.compile: 3 us slower", instead.yes),
    Name("torch._C._dynamo.eval_frame.set_code_exec_strategy", _COMPILED, _OWN_GRAPHS),
    Name("torch._C._dynamo.eval_frame._FrameExecStrategy", _COMPILED, _OWN_GRAPHS),
    Name("torch._C._dynamo.eval_frame._FrameAction", _COMPILED, _OWN_GRAPHS),
    Name("torch._C._dynamo.guards.TensorGuards", "see that lists of tensors are as before",
         "lists are looked at in each step: slower", instead.ABSENT),
    Name("torch._dynamo.callback.CallbackTrigger", "wait for parameters before a compilation"),
    Name("torch._dynamo.callback.callback_handler", "wait for parameters before a compilation"),
    Name("torch._dynamo.eval_frame.OptimizedModule", "see whether a compiled module runs",
         "overlap_param_sync waits in step() from the first compilation on", instead.Nothing),
    Name("torch._dynamo.config", "time compiled models", alias="dynamo_config"),
    Name("torch._dynamo.graph_break", "change autocast in a compiled model", before="2.13"),
    Name("torch._guards.TracingContext", "see that AOTAutograd traces", before="2.13"),
    # -- modes, trees ------------------------------------------------------------------------------
    Name("torch.utils._python_dispatch.TorchDispatchMode", "see each operation of a program",
         features=_WATCHES),
    Name("torch.utils._python_dispatch._disable_current_modes", "wait for a parameter in a mode"),
    Name("torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack",
         "wait for a parameter in a transform"),
    Name("torch.overrides._push_mode", "put a function mode back", features=_LOGS),
    Name("torch.overrides._pop_mode", "take a function mode off that is not on top",
         features=_LOGS),
    Name("torch.overrides._len_torch_function_stack", _DEBUG, _NO_LINES, features=_SCRIPTS),
    Name("torch.overrides._get_function_stack_at", _DEBUG, _NO_LINES, features=_SCRIPTS),
    Name("torch.utils._pytree.tree_flatten", _TREES, features=_WATCHES),
    Name("torch.utils._pytree.tree_leaves", _TREES, features=_WATCHES),
    Name("torch.utils._pytree.tree_map", _TREES, features=_WATCHES),
    Name("torch.utils._pytree.tree_map_only", _TREES),
    Name("torch.utils._pytree.tree_unflatten", _TREES),
    # -- autograd, modules, storages ---------------------------------------------------------------
    Name("torch._C._current_autograd_node", _DEBUG, features=_WATCHES),
    Name("torch._C._autograd._get_sequence_nr", _DEBUG, features=_WATCHES),
    Name("torch.autograd._is_checkpoint_valid", "refuse a backward that leaves weights out"),
    Name("torch.autograd.Variable._execution_engine", "reduce gradients at the end of a backward"),
    Name("torch.nn.modules.batchnorm._BatchNorm", "know batch norms of all kinds",
         "the base class of torch.nn.BatchNorm1d is taken", torch.nn.BatchNorm1d.__base__),
    Name("torch.nn.modules.module._global_forward_pre_hooks", _DEBUG, _NO_LINES, features=_SCRIPTS),
    Name("torch.nn.modules.module._global_forward_hooks", _DEBUG, _NO_LINES, features=_SCRIPTS),
    Name("torch.optim.optimizer._global_optimizer_pre_hooks", "see whether steps have hooks",
         "gradients are unscaled before each step, as for hooks: slower", ("perhaps one",)),
    Name("torch.optim.optimizer._global_optimizer_post_hooks", "see whether steps have hooks",
         "each step is watched, as with hooks: slower", ("perhaps one",)),
    Name("torch.utils.data.dataloader._BaseDataLoaderIter", _DEBUG, _NO_LINES, features=_SCRIPTS),
    Name("torch.UntypedStorage._expired", _CAPTURE,
         "it calls StorageWeakRef.expired: slower", instead.ABSENT),
    Name("torch._C._storage_Use_Count", "see whether a weight has its memory alone",
         "float32 weights are copied to be masters: more memory", instead.ABSENT),
    # -- distributed -------------------------------------------------------------------------------
    Name("torch.distributed.distributed_c10d._get_default_store", "wait for other ranks"),
    Name("torch.distributed.ProcessGroup._get_backend", "read a process group's time-out",
         "new groups have torch's time-out; nccl_allocator raises an error"),
    Name("torch.distributed.device_mesh.DeviceMesh._get_root_mesh",
         "find the ranks that share a model"),
    Name("torch.distributed.device_mesh._mesh_resources", "find the ranks that share a model",
         before="2.13"),
    Name("torch.nn.parallel.DistributedDataParallel._get_active_ddp_module",
         "find the wrapper around a model"),
    # -- arithmetic --------------------------------------------------------------------------------
    Name("torch._C._nn.silu", "compute SiLU", "it calls F.silu: slower", torch.nn.functional.silu),
    Name("torch._C._nn.cross_entropy_loss", "compute the cross entropy",
         "it calls F.cross_entropy: slower", instead.cross_entropy_loss),
    Name("torch._C._nn.flatten_dense_tensors", "copy tensors into one",
         "it calls torch.cat: slower", instead.flatten_dense_tensors),
    Name("torch._utils._unflatten_dense_tensors", "view one tensor as several",
         "it views them one by one: slower", instead.unflatten_dense_tensors),
    Name("torch._softmax_backward_data", "compute the gradient of a softmax",
         "it is written out: slower", instead.softmax_backward_data),
    Name("torch._assert_async", "refuse token ids out of range without waiting for the device",
         "it waits for the device", instead.assert_async),
    Name("torch._neg_view", "unscale gradients that are negative views"),
    Name("torch._amp_foreach_non_finite_check_and_unscale_", "unscale gradients in one call",
         "gradients are unscaled one by one: slower", instead.check_and_unscale_),
    Name("torch._fused_adam_", "step on a CPU in one call",
         "weights are stepped one by one: slower", instead.fused_adam_),
    Name("torch._fused_adamw_", "step on a CPU in one call",
         "weights are stepped one by one: slower", instead.fused_adamw_),
    Name("torch._fused_sgd_", "step on a CPU in one call",
         "weights are stepped one by one: slower", instead.fused_sgd_),
    Name("torch._fused_adagrad_", "step on a CPU in one call",
         "weights are stepped one by one: slower", instead.fused_adagrad_),
    *map(_foreach, (
        "add_", "addcdiv_", "addcmul_", "clamp_max_", "clamp_min_", "copy_", "div", "div_",
        "lerp_", "mul", "mul_", "norm", "sqrt", "zero_",
    )),
)  # fmt: skip


_MODULE = "torch.nn.Module"
_SCALER = "torch.amp.GradScaler"
_OPERATOR = "torch._ops.OpOverload"
_WRAPPER = "torch.nn.parallel.DistributedDataParallel"
_STATE_DICT = "torch.distributed.checkpoint.state_dict"

ATTRIBUTES = (
    Attributes("torch.Tensor", "_version", "see that a tensor was written to",
               ("amp.initialize", "amp.capture", "FusedOptimizer", "DistributedFusedOptimizer",
                "apex.debug")),
    Attributes("torch.Tensor", "_values", "reach the values of a sparse gradient",
               ("sparse gradients", "apex.debug")),
    Attributes("torch.Tensor", "_backward_hooks _post_accumulate_grad_hooks", _CAPTURE,
               ("amp.capture",)),
    Attributes("torch.UntypedStorage", "_cdata", "tell storages apart",
               ("amp.initialize", "amp.capture", "apex.debug")),
    Attributes("torch.distributed.tensor.DTensor", "_local_tensor", "reach this rank's part",
               ("apex.debug",)),
    # -- modules -----------------------------------------------------------------------------------
    Attributes(_MODULE, "_parameters _buffers", "go over the tensors of a module",
               ("amp.initialize", "amp.capture", "DistributedFusedOptimizer", "apex.debug", "ASP")),
    Attributes(_MODULE, "_modules", "go over the parts of a module",
               ("amp.initialize", "apex.debug")),
    Attributes(_MODULE, "_forward_pre_hooks _forward_hooks",
               "see whether modules have hooks, and take its own off",
               ("amp.initialize", "amp.capture", "apex.RNN", "ASP")),
    Attributes(_MODULE, "_backward_pre_hooks _backward_hooks", "see whether modules have hooks",
               ("amp.capture", "apex.RNN", "ASP")),
    Attributes(_MODULE, "_forward_pre_hooks_with_kwargs _forward_hooks_always_called "
               "_state_dict_hooks _load_state_dict_pre_hooks _load_state_dict_post_hooks",
               "take its hooks off a model", ("amp.initialize",)),
    Attributes(_MODULE, "_call_impl", "watch the calls of a model", ("apex.debug",)),
    Attributes(_MODULE, "_compiled_call_impl", "see that a module was compiled",
               ("DistributedFusedOptimizer", "apex.debug", "convert_syncbn_model")),
    Attributes(_MODULE, "_apply", "notice that a module is moved or cast",
               ("apex.RNN", "tensor_parallel")),
    Attributes(_MODULE, "_load_from_state_dict", "take part in load_state_dict",
               ("apex.reparameterization", "tensor_parallel")),
    Attributes("torch.nn.modules.batchnorm._BatchNorm", "_check_input_dim",
               "check inputs where torch's batch norms do", ("SyncBatchNorm",)),
    Attributes(_MODULE + "._replicate_for_data_parallel", "_is_replica",
               "know the copies that torch.nn.DataParallel makes", ("amp.initialize",)),
    Attributes("torch._dynamo.eval_frame.OptimizedModule", "_orig_mod", "find a compiled model",
               ("amp.initialize", "DistributedFusedOptimizer", "apex.debug")),
    Attributes("torch.nn.modules.module", "_global_forward_pre_hooks _global_forward_hooks "
               "_global_backward_pre_hooks _global_backward_hooks", _CAPTURE, ("amp.capture",)),
    # -- optimizers and scalers --------------------------------------------------------------------
    Attributes("torch.optim.Optimizer", "_optimizer_step_pre_hooks", "call its hooks",
               ("amp.initialize", "amp.capture", "apex.debug")),
    Attributes("torch.optim.Optimizer", "_optimizer_step_post_hooks", "call its hooks",
               ("amp.initialize", "amp.capture")),
    Attributes("torch.optim.optimizer", "_global_optimizer_pre_hooks _global_optimizer_post_hooks",
               _CAPTURE, ("amp.capture",)),
    Attributes("torch.optim.lr_scheduler.LRScheduler", "_initial_step _last_lr",
               "tell a schedule's own calls and states from others",
               effect="apex check may report by mistake that a schedule was called early"),
    Attributes("torch.optim.lr_scheduler.LRScheduler.step", "_opt_called",
               "tell a schedule that a skipped step was a step",
               effect="a schedule may warn that it was called before its optimizer"),
    Attributes(_SCALER, "_per_optimizer_states _get_scale_async _check_inf_per_device",
               "share the scale and the overflow with torch's GradScaler", ("GradScaler",)),
    Attributes(_SCALER, "_check_scale_growth_tracker _enabled",
               "add to torch's GradScaler", ("amp.GradScaler",)),
    Attributes(_SCALER, "_unscale_grads_", "unscale as apex does", ("amp.GradScaler",)),
    Attributes(_SCALER + ".step", "_step_supports_amp_scaling",
               "step without waiting for the overflow, and refuse torch's scaler beside masters",
               effect="torch.amp.GradScaler unscales and waits itself, and amp cannot refuse it"),
    # -- the dispatcher ----------------------------------------------------------------------------
    Attributes(_OPERATOR, "_schema", "know what an operator writes to",
               ("amp.capture", "apex.debug")),
    Attributes(_OPERATOR, "_op_dk", _LAYER_CASTS, ("amp.initialize",)),
    Attributes("torch.library.Library", "_destroy", "take its kernels off", ("amp.initialize",)),
    Attributes("torch.ops.aten", "_nested_tensor_from_mask_left_aligned",
               "keep TransformerEncoder from making nested tensors",
               effect="nn.TransformerEncoder under bfloat16 on a CPU may raise torch's own error"),
    Attributes("torch.ops.aten", "_scaled_dot_product_flash_attention_for_cpu "
               "_scaled_dot_product_flash_attention_for_cpu_backward",
               "compute float16 attention on a CPU in float32",
               effect="float16 attention on a CPU is torch's"),
    Attributes("torch.autograd", "_engine_run_backward", "see what hooks of gradients do",
               effect="apex check does not see gradients that a hook clips"),
    Attributes("torch.autograd.function.BackwardCFunction", "_forward_cls",
               "know autograd functions that a program wrote",
               effect="where apex check measures it calls them twice"),
    Attributes("torch.amp.autocast_mode.autocast", "_cache_enabled",
               "see whether autocast keeps the weights that it casts",
               effect="apex check does not see stale copies of weights"),
    Attributes("torch.autograd.graph.Node", "_sequence_nr", _DEBUG, ("apex.debug",)),
    Attributes("torch.utils.checkpoint", "_checkpoint_without_reentrant_generator",
               "recompute with the casts of the forward",
               effect="checkpoints recompute with the newest casts of their type"),
    # -- distributed -------------------------------------------------------------------------------
    Attributes(_WRAPPER, "_comm_hooks _join_config", "know what a wrapper does",
               ("amp.initialize",)),
    Attributes("torch.distributed.ProcessGroup", "_device_types", "find NCCL's allocator",
               ("nccl_allocator",)),
    Attributes("torch._C._distributed_c10d.Backend.Options", "_timeout",
               "read a process group's time-out", effect="new groups have torch's time-out"),
    Attributes(_STATE_DICT, "_get_optim_state_dict _split_optim_state_dict "
               "_unflatten_optim_state_dict _init_optim_state",
               "save and load masters with torch.distributed.checkpoint.state_dict",
               ("torch.distributed.checkpoint.state_dict",)),
)  # fmt: skip

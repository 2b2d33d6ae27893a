"""Names of NVIDIA's Apex that this package does not have, and what to use instead.

``NOT_YET`` and ``OUT_OF_SCOPE`` are the table. A key is a module, or a name in a package that
exists; where a whole package is missing, its own name is enough. ``COMPILED`` has the compiled
modules, which were at the top level; the advice for one is that of the package that used it.
Whoever adds a module removes its line here and in ``docs/compatibility.md``.

The text of the table is in the error of each way to ask for a name, once ``apex`` is imported:

====================================  ============================  =============================
statement                             error                         who raises it
====================================  ============================  =============================
``import apex.pyprof, bnp``           ``ModuleNotFoundError``       :class:`MissingNames`
``from apex.pyprof.nvtx import nop``  ``ModuleNotFoundError``       :class:`MissingNames`
``from apex import pyprof``           ``ImportError``, as Python's  :class:`MissingNames`
``apex.pyprof``                       ``AttributeError``            the package's ``__getattr__``
====================================  ============================  =============================

``hasattr`` returns False and ``importlib.util.find_spec`` returns None for these names, as usual in
Python, because programs check before they import. Names that are not in the table get Python's own
errors.
"""

import sys
from types import FrameType
from typing import NoReturn

NOT_YET = {
    "apex.transformer.context": "torch.distributed.tensor.experimental.context_parallel",
}

_SHARDED_ADAM = "apex.contrib.optimizers.distributed_fused_adam"
_MHA = "apex.contrib.multihead_attn"
_PERMUTATION = "apex.contrib.sparsity.ASP, which permutes channels itself"
_BLOCK = "apex.transformer.tensor_parallel; examples/tensor_parallel has a transformer block"

OUT_OF_SCOPE = {
    "apex.amp.__version__": "apex.__version__",
    "apex.amp._process_optimizer": "apex.amp.initialize, which prepares the optimizer",
    "apex.amp.build": "apex.amp.init",
    "apex.amp.compat": "torch.autocast",
    "apex.amp.enable": "apex.amp.init",
    "apex.amp.register_float": "apex.amp.register_float_function",
    "apex.amp.register_half": "apex.amp.register_half_function",
    "apex.amp.rnn_compat": "torch.autocast",
    "apex.amp.utils": "torch.autocast",
    "apex.amp.wrap": "torch.autocast",
    "apex.contrib.bottleneck.halo_exchangers": "torch.distributed.batch_isend_irecv",
    "apex.contrib.gpu_direct_storage": "torch.cuda.gds",
    # earlier versions, of 2019 and 2020
    "apex.contrib.optimizers.distributed_fused_adam_v2": _SHARDED_ADAM,
    "apex.contrib.optimizers.distributed_fused_adam_v3": _SHARDED_ADAM,
    "apex.contrib.peer_memory": "torch.distributed.batch_isend_irecv",
    "apex.contrib.sparsity.permutation_lib": _PERMUTATION,
    "apex.contrib.sparsity.permutation_search_kernels": _PERMUTATION,
    "apex.contrib.torchsched": "torch.compile",
    "apex.distributed_testing": "torch.multiprocessing.spawn",
    "apex.parallel.optimized_sync_batchnorm_kernel": "apex.parallel.SyncBatchNorm",
    "apex.parallel.sync_batchnorm_kernel": "apex.parallel.SyncBatchNorm",
    "apex.pyprof": "torch.profiler",
    "apex.testing": "unittest.skipIf with torch.version.hip",
    "apex.transformer.pipeline_parallel._timers": "torch.profiler.record_function",
    "apex.transformer.testing.arguments": "argparse",
    "apex.transformer.testing.global_vars": "apex.transformer.pipeline_parallel.utils",
    "apex.transformer.testing.standalone_bert": _BLOCK,
    "apex.transformer.testing.standalone_gpt": _BLOCK,
    "apex.transformer.testing.standalone_transformer_lm": _BLOCK,
    "fused_adam_cuda": "apex.optimizers.FusedAdam. It is missing on purpose, because fairseq would "
    "then use fused_adam_cuda and call it once for each tensor",
}

# A compiled module -> the part of Apex that used it, which is here, or in the tables above.
COMPILED = {
    "_apex_gpu_direct_storage": "apex.contrib.gpu_direct_storage",
    "_apex_nccl_allocator": "apex.contrib.nccl_allocator",
    "bnp": "apex.contrib.groupbn",
    "cudnn_gbn_lib": "apex.contrib.cudnn_gbn",
    "distributed_lamb_cuda": "apex.contrib.optimizers.distributed_fused_lamb",
    "fast_additive_mask_softmax_dropout": f"{_MHA}.fast_mask_softmax_dropout_func",
    "fast_bottleneck": "apex.contrib.bottleneck",
    "fast_encdec_multihead_attn": f"{_MHA}.EncdecMultiheadAttn",
    "fast_encdec_multihead_attn_norm_add": f"{_MHA}.EncdecMultiheadAttn",
    "fast_mask_softmax_dropout": f"{_MHA}.fast_mask_softmax_dropout_func",
    "fast_multihead_attn": _MHA,
    "fast_self_multihead_attn": f"{_MHA}.SelfMultiheadAttn",
    "fast_self_multihead_attn_bias": f"{_MHA}.SelfMultiheadAttn",
    "fast_self_multihead_attn_bias_additive_mask": f"{_MHA}.SelfMultiheadAttn",
    "fast_self_multihead_attn_norm_add": f"{_MHA}.SelfMultiheadAttn",
    "group_norm_v2_cuda": "apex.contrib.group_norm.GroupNorm",
    "nccl_p2p_cuda": "apex.contrib.peer_memory",
    "peer_memory_cuda": "apex.contrib.peer_memory",
    "permutation_search_cuda": "apex.contrib.sparsity.permutation_search_kernels",
}


class MissingNames:
    """A finder for ``sys.meta_path`` that finds nothing, and says why for names of the table.

    It stands last, so that Python asks it only about modules that are not there.
    """

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        """Return None, unless an ``import`` statement asks for a name of the table.

        Raises:
            ModuleNotFoundError: The name is imported; also by ``importlib.import_module``.
            ImportError: The name is imported from its package: ``from apex import pyprof``.
                Python raises this very class there, and drops a ModuleNotFoundError with its text.
        """
        text = _explain(name)
        if text is None:
            return
        callers = _import_functions(sys._getframe(1))
        if "_handle_fromlist" in callers:
            raise ImportError(text, name=name.rpartition(".")[0])
        if "_find_and_load" in callers:  # importlib.util.find_spec does not load
            raise ModuleNotFoundError(text, name=name)


def install() -> None:
    """Let Python's imports see the table; a second call, after a reload, changes nothing."""
    if not any(getattr(finder, "__module__", "") == __name__ for finder in sys.meta_path):
        sys.meta_path.append(MissingNames)


def explain_attributes(module: str) -> None:
    """Give a module a ``__getattr__`` whose error is that of the table.

    It is set here and not written in the module because type checkers stop reporting misspelled
    names of a module in which they see one.
    """

    def __getattr__(name: str) -> NoReturn:
        raise attribute_error(module, name)

    vars(sys.modules[module])["__getattr__"] = __getattr__


def attribute_error(module: str, name: str) -> AttributeError:
    """Return the error for a name that a module lacks: the table's, or else Python's own."""
    text = _explain(f"{module}.{name}")
    return AttributeError(text or f"module {module!r} has no attribute {name!r}")


def _explain(name: str) -> str | None:
    """Return what an error says about a name of the table, and None for any other name."""
    part = COMPILED.get(name, name)
    use = NOT_YET.get(part) or OUT_OF_SCOPE.get(part) or COMPILED.get(name)
    if use is None:
        return None
    from apex import __version__

    return f"{name} is not in apex {__version__}{' yet' if part in NOT_YET else ''}; use {use}"


def _import_functions(frame: FrameType | None) -> set[str]:
    """Return the names of the functions of Python's import system at the top of the stack.

    A finder is not told whether a module will be loaded or was only asked for, nor by which form
    of the statement, so its callers tell. Where a Python names them differently, its own errors
    remain.
    """
    names = set()
    while frame is not None and frame.f_globals.get("__name__") == "importlib._bootstrap":
        names.add(frame.f_code.co_name)
        frame = frame.f_back
    return names

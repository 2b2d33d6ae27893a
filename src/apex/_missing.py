"""Names of NVIDIA's Apex that this package does not have, and what to use instead.

``NOT_YET`` and ``OUT_OF_SCOPE`` are the table. A key is a module, or a name in a module that
exists; where a whole package is missing, its own name is enough. Whoever adds a module removes its
line here and in ``docs/compatibility.md``; ``tests/test_missing_names.py`` asks for both.

The text of the table is in the error of each way to ask for a name:

======================================  ============================  =============================
statement                               error                         who raises it
======================================  ============================  =============================
``import apex.contrib.fmha``            ``ModuleNotFoundError``       :class:`MissingNames`
``from apex.contrib.fmha import FMHA``  ``ModuleNotFoundError``       :class:`MissingNames`
``from apex.contrib import fmha``       ``ImportError``, as Python's  :class:`MissingNames`
``apex.contrib.fmha``                   ``AttributeError``            the package's ``__getattr__``
======================================  ============================  =============================

``hasattr`` returns False and ``importlib.util.find_spec`` returns None for these names, as usual in
Python, because programs check before they import. Names that are not in the table get Python's own
errors. So do missing modules at the top level. ``fused_adam_cuda`` stays one of them: fairseq takes
it, if it can be imported, before ``apex.optimizers.FusedAdam``, and calls it once for each tensor.
"""

import sys
from types import FrameType
from typing import NoReturn

NOT_YET = {
    "apex.transformer.context": "torch.distributed.tensor.experimental.context_parallel",
    "apex.transformer.parallel_state": "torch.distributed.device_mesh.init_device_mesh",
    "apex.transformer.pipeline_parallel": "torch.distributed.pipelining",
    "apex.transformer.tensor_parallel": "torch.distributed.tensor.parallel",
    "apex.transformer.testing": "torch.multiprocessing.spawn",
    "apex.contrib.bottleneck": "torch.nn.Conv2d and torch.nn.BatchNorm2d with torch.compile",
    "apex.contrib.conv_bias_relu": "torch.nn.Conv2d and torch.nn.ReLU with torch.compile",
    "apex.contrib.cudnn_gbn": "torch.nn.SyncBatchNorm",
    "apex.contrib.fmha": "torch.nn.attention.varlen.varlen_attn (torch 2.9 lacks it)",
    "apex.contrib.groupbn": "torch.nn.BatchNorm2d or torch.nn.SyncBatchNorm, with "
    "model.to(memory_format=torch.channels_last)",
    "apex.contrib.optimizers.distributed_fused_adam": "torch.distributed.fsdp.fully_shard with "
    "torch.optim.AdamW(fused=True)",
    "apex.contrib.optimizers.distributed_fused_lamb": "torch.distributed.fsdp.fully_shard with "
    "torch.optim.AdamW(fused=True)",
    "apex.contrib.transducer": "torchaudio.functional.rnnt_loss",
}

# Modules of 2020 with the autograd functions inside of the two layers.
_ENCDEC_FUNCTIONS = (
    "apex.contrib.multihead_attn.encdec_multihead_attn_func",
    "apex.contrib.multihead_attn.fast_encdec_multihead_attn_func",
    "apex.contrib.multihead_attn.fast_encdec_multihead_attn_norm_add_func",
)
_SELF_FUNCTIONS = (
    "apex.contrib.multihead_attn.fast_self_multihead_attn_func",
    "apex.contrib.multihead_attn.fast_self_multihead_attn_norm_add_func",
    "apex.contrib.multihead_attn.self_multihead_attn_func",
)

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
    "apex.contrib.gpu_direct_storage": "torch.cuda.gds",
    **dict.fromkeys(_ENCDEC_FUNCTIONS, "apex.contrib.multihead_attn.EncdecMultiheadAttn"),
    **dict.fromkeys(_SELF_FUNCTIONS, "apex.contrib.multihead_attn.SelfMultiheadAttn"),
    "apex.contrib.nccl_allocator": "torch.cuda.MemPool and torch.cuda.use_mem_pool",
    "apex.contrib.openfold_triton": "torch.nn.functional.scaled_dot_product_attention and "
    "torch.compile",
    "apex.contrib.peer_memory": "torch.distributed.batch_isend_irecv",
    "apex.contrib.torchsched": "torch.compile",
    "apex.distributed_testing": "torch.multiprocessing.spawn",
    "apex.pyprof": "torch.profiler",
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
            ImportError: The name is imported from its package: ``from apex.contrib import fmha``.
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
    if name in NOT_YET:
        yet, use = " yet", NOT_YET[name]
    elif name in OUT_OF_SCOPE:
        yet, use = "", OUT_OF_SCOPE[name]
    else:
        return None
    from apex import __version__

    return f"{name} is not in apex {__version__}{yet}; use {use}"


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

"""What NVIDIA's ``apex.transformer`` has and this one leaves out on purpose, with what to use.

A refused name can be imported, because programs import it beside names that they need. Calling it,
or passing a refused argument, raises ``NotImplementedError`` with the text of the table.
"""

from collections.abc import Sequence
from typing import Any, NoReturn

_NCCL = "the variables NCCL_NET and NCCL_IB_HCA, set before the program starts"
_SPLIT = "torch.distributed.pipelining.ScheduleInterleaved1F1B"

REFUSED = {
    "parallel_state.initialize_model_parallel(init_mpi_proc_group=True)": "torch.distributed."
    'new_group(backend="mpi")',
    "parallel_state.init_nccl_net": _NCCL,
    "parallel_state.new_nccl_ib_group": _NCCL,
    "parallel_state.new_nccl_socket_group": _NCCL,
    "parallel_state.set_nccl_ib_envs": _NCCL,
    "parallel_state.set_nccl_socket_envs": _NCCL,
    "pipeline_parallel.build_model(virtual_pipeline_model_parallel_size=...)": _SPLIT,
    "pipeline_parallel.get_forward_backward_func(virtual_pipeline_model_parallel_size=...)": _SPLIT,
    "pipeline_parallel.schedules.fwd_bwd_pipelining_with_interleaving."
    "_forward_backward_pipelining_with_interleaving": _SPLIT,
    "pipeline_parallel.p2p_communication(overlap_p2p_comm=True)": "async_comm=True, or "
    "torch.distributed.pipelining",
    "pipeline_parallel.utils.get_timers": "torch.profiler.record_function",
}


def refuse(name: str) -> NoReturn:
    """Raise ``NotImplementedError`` for a name of the table ``REFUSED``."""
    from apex import __version__

    text = f"apex.transformer.{name} is not in apex {__version__}; use {REFUSED[name]} instead."
    raise NotImplementedError(text)


def set_nccl_socket_envs() -> NoReturn:
    """Raise ``NotImplementedError``; it says what to use."""
    refuse("parallel_state.set_nccl_socket_envs")


def set_nccl_ib_envs() -> NoReturn:
    """Raise ``NotImplementedError``; it says what to use."""
    refuse("parallel_state.set_nccl_ib_envs")


def init_nccl_net(group: Any) -> NoReturn:
    """Raise ``NotImplementedError``; it says what to use."""
    refuse("parallel_state.init_nccl_net")


def new_nccl_socket_group(ranks: Sequence[int]) -> NoReturn:
    """Raise ``NotImplementedError``; it says what to use."""
    refuse("parallel_state.new_nccl_socket_group")


def new_nccl_ib_group(ranks: Sequence[int]) -> NoReturn:
    """Raise ``NotImplementedError``; it says what to use."""
    refuse("parallel_state.new_nccl_ib_group")


def _forward_backward_pipelining_with_interleaving(*args: Any, **kwargs: Any) -> NoReturn:
    """Raise ``NotImplementedError``; it says what to use."""
    refuse(
        "pipeline_parallel.schedules.fwd_bwd_pipelining_with_interleaving."
        "_forward_backward_pipelining_with_interleaving"
    )

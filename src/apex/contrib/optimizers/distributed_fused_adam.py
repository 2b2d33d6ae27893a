"""``DistributedFusedAdam``: Adam with gradients and state sharded over ranks (ZeRO stage 2).

Source: Rajbhandari et al., arXiv:1910.02054, section 5.2.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from apex._compat import private
from apex.contrib.optimizers._pending import PendingParameter
from apex.contrib.optimizers._sharded_gradients import Sharding, listed
from apex.contrib.optimizers._sharded_state import SavedShards
from apex.ops.updates.adam import Adam, adam_

__all__ = ["DistributedFusedAdam"]

_REFUSED = {
    "amsgrad": "leave it out",
    "nccl_ub": "use torch.cuda.MemPool with NCCL's allocator",
}


@torch.no_grad()
def _multi_tensor_copy(
    buffers_in: Sequence[torch.Tensor],
    buffers_out: Sequence[torch.Tensor],
    dummy_overflow_buf: Any = None,
) -> None:
    """Copy tensors to others of as many elements each, of any dtypes; the third has no effect."""
    pairs = zip(buffers_in, buffers_out, strict=True)
    some = [(x, out) for x, out in pairs if x.data_ptr() != out.data_ptr() and x.numel()]
    if some:
        private.foreach_copy_([out for _, out in some], [x.view(out.shape) for x, out in some])


@contextlib.contextmanager
def _disable_pre_forward_hook(param: torch.Tensor) -> Iterator[None]:
    """Read a parameter as it is, in a ``with`` block: old while its new value is on its way."""
    with (
        param._gather.unwatched(param)
        if isinstance(param, PendingParameter)
        else contextlib.nullcontext()
    ):
        yield


class DistributedFusedAdam(SavedShards):
    """Adam or AdamW whose gradients and state are sharded over ranks.

    Every rank keeps all parameters. During the backward pass gradients are averaged over ranks, and
    each rank receives those of its shard. Afterwards ``param.grad`` is ``None``. ``step`` steps the
    shards and gathers the parameters. The results equal those of ``FusedAdam`` in one process with
    the mean gradients. All ranks must construct, step, save and load together.

    See :class:`~apex.optimizers._base.FusedOptimizer` for the other arguments.

    Args:
        params: Parameters or groups, on one device. Rank 0 sends their values at construction.
        adam_w_mode: Decoupled weight decay (AdamW) instead of an L2 penalty (Adam).
        dtype: dtype of the moments and the stored parameters. A warning tells you if it rounds
            them.
        grad_sync_dtype: dtype in which gradients are summed; by default ``dtype``.
        param_sync_dtype: dtype in which parameters are gathered; by default their own. With an
            integer type their bytes are sent.
        device: Has no effect: the state is on the parameters' device.
        process_group: All ranks; by default those of the program.
        distributed_process_group: The ranks that share a state; by default all ranks.
        redundant_process_group: The ranks that keep equal shards; by default none do.
        average_grad_sync: Average gradients over ranks instead of summing them.
        overlap_grad_sync: Send gradients during the backward pass.
        overlap_param_sync: Gather parameters during the next forward pass. Each module waits for
            its own parameters, and so does other code that reads them; see :meth:`param_sync`.
        bucket_cap_mb: Size at which a bucket of gradients is full, in MiB.
        pipeline_size: Number of buckets whose parameters are gathered at the same time.
        contiguous_param_buffer: Make the parameters of a bucket views of one buffer.
        contiguous_grad_buffer: Keep a persistent buffer for the gradients of a bucket; see
            :meth:`grad_buffer_view`.
        store_params: Keep the parameters of a shard in ``dtype`` too. Without it the step uses the
            model's own parameters, and loses what their dtype rounds away.
        store_param_remainders: For bfloat16 parameters keep only the 16 low bits of the float32
            values. Needs ``store_params=False``.
        with_scaled_states: Keep the moments of each fragment in float16 with a scale. Needs
            ``dtype=torch.float16``.
        nccl_ub: Not supported.
        capturable: Keep ``lr`` and ``step`` on the device.

    Raises:
        RuntimeError: There is no process group, or options exclude each other or do not suit the
            parameters.
        ValueError: A number is out of range, or this process is not in a group.

    Example:
        >>> optimizer = DistributedFusedAdam(model.parameters(), lr=1e-3)  # doctest: +SKIP
        >>> model(x).sum().backward()  # doctest: +SKIP
        >>> optimizer.step()  # doctest: +SKIP
        >>> optimizer.zero_grad()  # doctest: +SKIP
    """

    _algorithm, _numbers = staticmethod(adam_), Adam

    adam_w_mode, eps_inside_sqrt, capturable = True, False, False
    dtype, device = torch.float32, "cuda"

    def __init__(  # noqa: PLR0913 - the original's signature
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float | torch.Tensor = 0.0,
        amsgrad: bool = False,
        dtype: torch.dtype = torch.float32,
        grad_sync_dtype: torch.dtype | None = None,
        param_sync_dtype: torch.dtype | None = None,
        device: Any = "cuda",
        process_group: Any = None,
        distributed_process_group: Any = None,
        redundant_process_group: Any = None,
        average_grad_sync: bool = True,
        overlap_grad_sync: bool = True,
        overlap_param_sync: bool = False,
        bucket_cap_mb: float = 100.0,
        pipeline_size: int = 2,
        contiguous_param_buffer: bool = False,
        contiguous_grad_buffer: bool = False,
        store_params: bool = True,
        store_param_remainders: bool = False,
        with_scaled_states: bool = False,
        nccl_ub: bool = False,
        capturable: bool = False,
    ) -> None:
        given = locals()
        for name, remedy in _REFUSED.items():
            if given[name]:
                raise RuntimeError(f"DistributedFusedAdam does not support {name}=True: {remedy}.")
        if store_params and store_param_remainders:
            raise RuntimeError(
                "DistributedFusedAdam: store_param_remainders=True stores what bfloat16 parameters "
                "round away, so store_params=True is not needed. Pass store_params=False."
            )
        for name, kind in {"bucket_cap_mb": int | float, "pipeline_size": int}.items():
            number = given[name]
            if isinstance(number, bool) or not isinstance(number, kind) or not number > 0:
                raise ValueError(
                    f"DistributedFusedAdam: {name} was {number!r}; it must be a number above 0."
                )
        self.adam_w_mode, self.eps_inside_sqrt = bool(adam_w_mode), False
        self.capturable = capturable
        self.dtype, self.device = dtype, device
        if capturable and not isinstance(lr, torch.Tensor):
            lr = torch.tensor(lr, dtype=torch.float32, device="cpu")
        defaults = {
            "lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps,
            "weight_decay": weight_decay,
        }  # fmt: skip
        options = Sharding(**{name: given[name] for name in Sharding._fields})
        super().__init__(params, defaults, options)

    @property
    def _on_device(self) -> bool:  # type: ignore[override]
        return self.capturable

    # -- parameters and buckets --------------------------------------------------------------------

    def parameters(self) -> Iterator[torch.Tensor]:
        """Iterate over all parameters, group by group."""
        yield from self._params()

    def parameter(self, *args: int) -> torch.Tensor:
        """Return a parameter by two numbers: of its group, and of the parameter in the group."""
        if len(args) != 2 or not all(isinstance(arg, int) for arg in args):
            raise TypeError(
                f"DistributedFusedAdam.parameter got {args}; pass two numbers, of a group and of a "
                "parameter in it."
            )
        found: torch.Tensor = self.param_groups[args[0]]["params"][args[1]]
        return found

    def init_params(
        self,
        params: Iterable[torch.Tensor] | torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
        grad_sync_dtype: torch.dtype | None = None,
        param_sync_dtype: torch.dtype | None = None,
    ) -> None:
        """Put parameters into buckets now instead of in the first backward pass.

        Parameters that have a bucket keep it. All ranks must make the same calls.

        Args:
            params: Parameters of this optimizer; by default all that are trained, in reverse order.
            dtype: dtype of their state. The defaults of the three dtypes are the constructor's.
            grad_sync_dtype: dtype in which their gradients are summed.
            param_sync_dtype: dtype in which they are gathered.
        """
        some = self._trained() if params is None else listed(params)
        dtypes = dtype, grad_sync_dtype, param_sync_dtype
        self._make_buckets(some, dtypes, self._options.bucket_cap_mb)

    def init_params_bucket(
        self,
        params: Iterable[torch.Tensor] | torch.Tensor,
        dtype: torch.dtype | None = None,
        grad_sync_dtype: torch.dtype | None = None,
        param_sync_dtype: torch.dtype | None = None,
    ) -> None:
        """Put parameters into a separate bucket of any size; see :meth:`init_params`."""
        dtypes = dtype, grad_sync_dtype, param_sync_dtype
        self._make_buckets(listed(params), dtypes, float("inf"))

    def init_param_buffer(self) -> None:
        """Make the parameters of each bucket views of one buffer.

        Raises:
            RuntimeError: ``contiguous_param_buffer`` was not set.
        """
        if not self._options.contiguous_param_buffer:
            raise RuntimeError(
                "DistributedFusedAdam.init_param_buffer needs contiguous_param_buffer=True."
            )
        self._prepare_buckets()

    def grad_buffer_view(self, param: torch.Tensor) -> torch.Tensor:
        """Return the memory for a parameter's gradient, in the parameter's shape.

        You can add gradients to it until the backward pass ends. The parameter then has a gradient
        in every step. Run all passes of a step except the last one under :meth:`no_sync`, because
        the buffer is sent as soon as it is full.

        Raises:
            RuntimeError: ``contiguous_grad_buffer`` was not set.
            ValueError: No group contains ``param``.
        """
        if not self._options.contiguous_grad_buffer:
            raise RuntimeError(
                "DistributedFusedAdam.grad_buffer_view needs contiguous_grad_buffer=True."
            )
        self._prepare_buckets()
        if id(param) not in self._places:
            raise ValueError("DistributedFusedAdam: the parameter is in none of the groups.")
        bucket, place = self._places[id(param)]
        bucket.viewed.add(place)
        assert bucket.grad_buffer is not None
        return bucket.views(bucket.grad_buffer)[place]

"""Weight normalization as a reparameterization."""

from __future__ import annotations

from typing import Any

import torch

from apex.ops.norms.weight_norm import norm_except, weight_norm
from apex.reparameterization.reparameterization import Reparameterization


class WeightNorm(Reparameterization):
    """Weight norm: ``weight = g * v / ||v||``, with one norm for each index of ``dim``.

    There are two new parameters:

    * ``<name>_g``: the length for each index of ``dim``, in the weight's shape with ones in the
      other dimensions. It is 0-dim if ``dim`` is None. For 16-bit weights it is float32.
    * ``<name>_v``: a tensor of the weight's shape, which starts as the weight.

    For 16-bit parameters norm and weight are computed in float32. The weight has the dtype of
    ``v``. ``dim`` may be any dimension, a negative one, or None. Where a norm is 0, the weight is
    NaN.

    Source: Salimans and Kingma, arXiv:1602.07868.

    Example:
        >>> layer = torch.nn.Linear(4, 2)
        >>> norm = Reparameterization.apply(layer, "weight", 0, WeightNorm)
        >>> list(layer.state_dict()), list(layer.weight_g.shape)
        (['bias', 'weight_g', 'weight_v'], [2, 1])
    """

    def compute_weight(self, module: torch.nn.Module | None = None, name: str | None = None) -> Any:
        """Compute the weight; see the base class."""
        module = self.module if module is None else module
        owner, leaf = self.get_module_and_name(module, self.name if name is None else name)
        return weight_norm(getattr(owner, f"{leaf}_v"), getattr(owner, f"{leaf}_g"), self.dim)

    def reparameterize(
        self, name: str, weight: torch.Tensor, dim: int | None
    ) -> tuple[list[str], list[Any]]:
        """Return the names and first values of ``g`` and ``v``."""
        v = weight.detach()
        return [f"{name}_g", f"{name}_v"], [norm_except(v, dim), v]

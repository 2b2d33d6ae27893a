"""Cross-entropy of a linear layer whose outputs are never all in memory."""

import torch

from apex.ops.losses.linear_cross_entropy import (
    AccPolicy,
    Reduction,
    linear_cross_entropy,
    linear_log_probs,
)
from apex.ops.norms._scripted import left_to_python

__all__ = ["LinearCrossEntropyLoss", "linear_cross_entropy", "linear_log_probs"]

_MEAN: Reduction = "mean"
_BALANCED: AccPolicy = "balanced"


class LinearCrossEntropyLoss(torch.nn.Module):
    """A classifier's last layer together with its loss.

    The attribute ``linear`` is an ordinary ``torch.nn.Linear`` with the weights; call it if you
    need the logits. The arguments are those of torch's class of this name. See
    :func:`linear_cross_entropy` for arguments that are not listed.

    Args:
        in_features: Size of the input's last dimension.
        num_classes: Number of classes.
        bias: Whether the layer has a bias.
        device: Device of the weights.
        dtype: dtype of the weights.
    """

    # What modules that an older Apex pickled whole may lack.
    reduction = _MEAN  # not annotated in the class: TorchScript knows no Literal
    ignore_index, label_smoothing = -100, 0.0
    chunk_size: int | None = None
    acc_policy = _BALANCED
    acc_dtype: torch.dtype | None = None
    softcap: float | None = None
    temperature, z_loss = 1.0, 0.0

    def __init__(  # noqa: PLR0913  # the layer's arguments, and the function's
        self,
        in_features: int,
        num_classes: int,
        *,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        reduction: Reduction = "mean",
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        chunk_size: int | None = None,
        acc_policy: AccPolicy = "balanced",
        acc_dtype: torch.dtype | None = None,
        softcap: float | None = None,
        temperature: float = 1.0,
        z_loss: float = 0.0,
    ) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(
            in_features, num_classes, bias=bias, device=device, dtype=dtype
        )
        self.reduction = reduction
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing
        self.chunk_size = chunk_size
        self.acc_policy, self.acc_dtype = acc_policy, acc_dtype
        self.softcap, self.temperature, self.z_loss = softcap, temperature, z_loss

    @left_to_python
    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Compute the loss of an input ``(..., in_features)`` and targets ``(...)``."""
        return linear_cross_entropy(
            input,
            self.linear.weight,
            target,
            self.linear.bias,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            reduction=self.reduction,
            chunk_size=self.chunk_size,
            acc_policy=self.acc_policy,
            acc_dtype=self.acc_dtype,
            softcap=self.softcap,
            temperature=self.temperature,
            z_loss=self.z_loss,
        )

    def extra_repr(self) -> str:
        """Show the options in ``print(model)``."""
        shown = (
            f"reduction={self.reduction!r}, ignore_index={self.ignore_index}, "
            f"label_smoothing={self.label_smoothing}, chunk_size={self.chunk_size}"
        )
        if self.acc_policy != "balanced":
            shown += f", acc_policy={self.acc_policy!r}, acc_dtype={self.acc_dtype}"
        for name, usual in (("softcap", None), ("temperature", 1.0), ("z_loss", 0.0)):
            if (value := getattr(self, name)) != usual:
                shown += f", {name}={value}"
        return shown

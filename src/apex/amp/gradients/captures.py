"""What the capture of a CUDA graph is refused for: its replays run no code of the host.

A step that the host decides would be taken or skipped as in the capture for ever, so this raises
before the read does, which CUDA forbids in a capture in words that do not help.
"""

from __future__ import annotations

from typing import Any

import torch

_BEGIN_WITH_ZEROS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
hooks = 0  # of all steps, by which amp.capture counts: they are no code of the program
_SEE = "(docs/optimizers.md, CUDA graphs)."


def refuse_read(optimizer: Any, *, takes_flag: bool, is_watched: bool) -> None:
    """Refuse a step that the host decides."""
    name = type(optimizer).__name__
    if is_watched:
        cause = f"apex.debug watches {name} and looks at each step. Close the watch first"
    elif takes_flag:
        cause = (
            f"{name} has no state yet, so the host still decides whether to skip. Make a step that "
            "is "
        )
        cause += "not skipped before capturing"
    else:
        cause = (
            f"with {name} the host decides whether to skip it. Under a dynamic loss scale a graph "
            "needs an optimizer that decides on the device. Use one of apex.optimizers, one of "
            "torch with fused=True, capturable=True (SGD: fused=True), or a static loss_scale"
        )
    raise RuntimeError(f"amp: step() was captured in a CUDA graph, and {cause} {_SEE}")


def refuse_part(optimizer: Any, *, block: bool) -> None:
    """Refuse a block without its step, or a step without its block."""
    name = type(optimizer).__name__
    inside, outside = (
        ("the scale_loss block", f"step() of {name}")
        if block
        else (f"step() of {name}", "its scale_loss block")
    )
    raise RuntimeError(
        f"amp: {inside} was captured in a CUDA graph without {outside}. Replays run no Python "
        "code, so amp would not see their overflows, nor copy gradients to the masters. Capture "
        f"both {_SEE}"
    )


def refuse_check(optimizer: Any) -> None:
    """Refuse a step after which amp looks whether it has changed anything."""
    raise RuntimeError(
        f"amp: a first step of {type(optimizer).__name__} was captured in a CUDA graph. After a "
        "first step amp checks on the host whether the weights changed. Make some steps before "
        f"capturing, at least one of which is not skipped {_SEE}"
    )


def may_leave_uninitialized(optimizer: Any) -> bool:
    """Whether a step that a device skips may leave state of the optimizer uninitialised.

    ``torch.optim.SGD(fused=True)`` makes its momentum by ``empty_like`` and has the kernel fill it,
    which a skipped step does not; the next step takes it for a momentum. torch's other fused
    optimizers begin with zeros. Of others nothing is known until they have a state.
    """
    if isinstance(optimizer, _BEGIN_WITH_ZEROS):
        return False
    has_state = {id(param) for param, kept in getattr(optimizer, "state", {}).items() if kept}
    return any(
        [
            param.grad is not None and id(param) not in has_state
            for group in optimizer.param_groups
            if group.get("momentum") != 0  # without one SGD has no state
            for param in group["params"]
        ]
    )

"""The process group of a ``GradScaler`` that is copied or pickled."""

from __future__ import annotations

from typing import Any

import torch

from apex.amp.checks import group_of_several


class PickledGroup:
    """A process group, or ``None``: a copy keeps it; only the default group can be pickled."""

    def __init__(self, group: Any) -> None:
        self.group = group

    def __deepcopy__(self, memo: dict[int, Any]) -> PickledGroup:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        if self.group is None:
            return PickledGroup, (None,)
        if self.group is not torch.distributed.group.WORLD:
            raise RuntimeError(
                "apex.amp.GradScaler: a scaler with a process_group other than the default cannot "
                "be pickled. Save its state_dict()."
            )
        return _default_group, ()


def _default_group() -> PickledGroup:
    if not torch.distributed.is_initialized():
        raise RuntimeError(
            "apex.amp.GradScaler: the pickled scaler uses the default process group. Call "
            "torch.distributed.init_process_group() before unpickling it."
        )
    return PickledGroup(group_of_several("apex.amp.GradScaler", torch.distributed.group.WORLD))

"""Order among the CUDA streams on which autograd calls the hooks of parameters.

autograd calls the hook of a parameter on the stream on which a forward first used that parameter.
A model whose forward uses several streams has hooks on several, and these do not wait for each
other before the backward pass ends. torch's DistributedDataParallel has all its hooks on one stream
instead, that on which it was made, and autograd lets that wait for the others: it keeps the graph's
node of each parameter. A kept node does not survive a cast of its parameter, so ours do not.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["HookOrder"]


class HookOrder:
    """Lets the stream of a hook wait for those of the hooks before it.

    What a hook launches then comes after all gradients that arrived so far, and after what earlier
    hooks have launched. Where all hooks are on one stream nothing waits.
    """

    def __init__(self) -> None:
        self._last: Any = None

    def follow(self, device: torch.device) -> None:
        """Begin a hook of a parameter on ``device``; all are on one."""
        stream = _current_stream(device)
        if self._last is not None and stream != self._last:
            stream.wait_stream(self._last)
        self._last = stream


def _current_stream(device: torch.device) -> Any:
    return torch.cuda.current_stream(device) if device.type == "cuda" else None

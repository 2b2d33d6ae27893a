"""The interleaved schedule, which is refused; programs import its name."""

from apex.transformer._refused import _forward_backward_pipelining_with_interleaving

__all__ = ["_forward_backward_pipelining_with_interleaving"]

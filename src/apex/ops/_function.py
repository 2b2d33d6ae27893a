"""Public autograd functions whose ``apply`` leaves the choice of a path to an operation."""

from typing import Any, ClassVar

import torch


class Chosen(torch.autograd.Function):
    """``apply`` calls ``function``: torch's own functions are cheaper on a CPU and for few numbers.

    ``forward`` and ``backward`` are what the compiler traces, and what a subclass inherits.
    TorchScript would compile ``apply`` if it were in the class itself.
    """

    function: ClassVar[Any] = None

    def __init_subclass__(cls) -> None:
        if "function" not in vars(cls):  # it has a forward of its own
            cls.function = None

    @classmethod
    def apply(cls, *args: Any, **kwargs: Any) -> Any:
        """Compute; arguments as those of ``forward`` after ``ctx``."""
        if cls.function is None:
            return super().apply(*args, **kwargs)  # type: ignore[no-untyped-call]
        return cls.function(*args, **kwargs)

    # TorchScript would not take a list of any length.
    apply.__func__.__annotations__.clear()  # type: ignore[attr-defined]

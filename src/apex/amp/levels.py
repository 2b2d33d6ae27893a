"""The optimization levels, as data.

A level is a named set of seven options. After ``initialize`` has parsed the string no code asks
which level it was: the options say what to do. ``Properties`` checks each option as it is set,
so a level's defaults and a user's overrides are checked alike.

O0 to O3 are NVIDIA's; O4 and O5 are O1 and O2 in bfloat16, whose range is float32's, so they
need no loss scaling.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch

from apex.amp.newest import warn_or_err

HALF_TYPES = (torch.float16, torch.bfloat16)


class Properties:
    """The options in force, each checked when it is set.

    Reading or writing an option uses plain attribute syntax. Writing any other name is ignored,
    as it always was; reading one raises ``AttributeError``.
    """

    options: dict[str, Any]

    def __init__(self) -> None:
        object.__setattr__(
            self,
            "options",
            {
                "enabled": False,
                "opt_level": None,
                "cast_model_type": None,
                "patch_torch_functions": False,
                "keep_batchnorm_fp32": None,
                "master_weights": None,
                "loss_scale": 1.0,
            },
        )

    def __getattr__(self, name: str) -> Any:
        options = self.__dict__.get("options", {})
        if name in options:
            return options[name]
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.options:
            by_list, allowed, why = _MISPLACED.get(name, (None, (), ""))
            if by_list is self.by_list and value not in allowed:
                others = "O0, O2, O3 or O5" if by_list else "O1 or O4"
                warn_or_err(
                    f"{name}={value!r} at {self.opt_level}: {why}. Allowed: "
                    f"{', '.join(map(str, allowed))}; leave the option out, or use {others}."
                )
            self.options[name] = _checked(name, value)

    def _update_options_dict(self, new_options: Iterable[tuple[str, Any]]) -> None:
        """Store ``(name, value)`` pairs unchecked; an unknown name raises ``ValueError``."""
        for name, value in dict(new_options).items():
            if name not in self.options:
                raise ValueError(f"Tried to set unexpected option {name}")
            self.options[name] = value

    @property
    def casts_functions(self) -> bool:
        """Whether torch functions are cast by list (O1 and O4)."""
        return bool(self.patch_torch_functions)

    @property
    def by_list(self) -> bool:
        """Whether the level is one that casts functions, not the model."""
        return self.opt_level in ("O1", "O4")

    @property
    def half_dtype(self) -> torch.dtype:
        """The 16-bit type of the level: what functions, or the model, are cast to."""
        if self.cast_model_type in HALF_TYPES:
            dtype: torch.dtype = self.cast_model_type
            return dtype
        return torch.bfloat16 if self.opt_level in ("O4", "O5") else torch.float16

    @property
    def casts_anything(self) -> bool:
        """Whether anything at all is to compute in 16 bits."""
        return bool(self.enabled) and (self.casts_functions or self.cast_model_type in HALF_TYPES)


# Options that have no meaning at some levels: whether these are O1 and O4 or the others, what is
# allowed there, and why nothing else is.
_MISPLACED: dict[str, tuple[bool, tuple[Any, ...], str]] = {
    "cast_model_type": (True, (None, False, torch.float32), "O1 and O4 cast functions, not models"),
    "patch_torch_functions": (False, (None, False), "only O1 and O4 cast torch functions"),
    "keep_batchnorm_fp32": (True, (None,), "batchnorm's weights are float32 at this level anyway"),
    "master_weights": (True, (None,), "weights are float32 at this level, so there are no masters"),
}


def _checked(name: str, value: Any) -> Any:
    """The ``value`` of an option as it is kept."""
    if name == "loss_scale" and value != "dynamic":
        try:
            return float(value)
        except (TypeError, ValueError) as error:
            raise type(error)(
                f"loss_scale was {value!r}; allowed are 'dynamic' and a number above 0."
            ) from None
    if name in ("keep_batchnorm_fp32", "master_weights") and value in ("True", "False"):
        return value == "True"
    if name == "keep_batchnorm_fp32" and not any(value is one for one in (True, False, None)):
        raise AssertionError(
            f"keep_batchnorm_fp32 was {value!r}; allowed are True, False, None and the strings "
            "'True' and 'False'."
        )
    if name == "cast_model_type" and value not in (None, False, torch.float32, *HALF_TYPES):
        raise ValueError(
            f"cast_model_type was {value!r}; allowed are torch.float16, torch.bfloat16, "
            "torch.float32, None and False."
        )
    return value


class _Level:
    """A named set of options; calling it writes them into a ``Properties``.

    ``defaults`` are of the options behind ``opt_level``; ``more`` is the docstring.
    """

    brief: str
    more: str
    defaults: tuple[Any, ...]

    def __init_subclass__(cls) -> None:
        cls.more = inspect.cleandoc(cls.__doc__ or "")

    def __call__(self, properties: Properties) -> Properties:
        properties.enabled = True
        properties.opt_level = type(self).__name__
        for option, value in zip(list(properties.options)[2:], self.defaults, strict=True):
            setattr(properties, option, value)
        return properties


class O0(_Level):
    """The model computes in float32: the baseline for accuracy."""

    brief = "O0:  Pure FP32 training.\n"
    defaults = (torch.float32, False, None, False, 1.0)


class O1(_Level):
    """Matrix products and convolutions run in float16, what needs range or precision in float32.

    Weights stay float32.
    """

    brief = "O1:  Insert automatic casts around PyTorch functions and Tensor methods.\n"
    defaults = (None, True, None, None, "dynamic")


class O2(_Level):
    """The model computes in float16 except batchnorm; the optimizer steps float32 masters."""

    brief = "O2:  FP16 training with FP32 batchnorm and FP32 master weights.\n"
    defaults = (torch.float16, False, True, True, "dynamic")


class O3(_Level):
    """The model and the optimizer work in float16: the baseline for speed, often unstable."""

    brief = "O3:  Pure FP16 training."
    defaults = (torch.float16, False, False, False, 1.0)


class O4(_Level):
    """O1 with bfloat16, whose range is float32's: no loss scaling is needed."""

    brief = "O4:  Insert automatic casts to BFLOAT16 around PyTorch functions and Tensor methods.\n"
    defaults = (None, True, None, None, 1.0)


class O5(_Level):
    """O2 with bfloat16, whose range is float32's: no loss scaling is needed."""

    brief = "O5:  BFLOAT16 training with FP32 batchnorm and FP32 master weights.\n"
    defaults = (torch.bfloat16, False, True, True, 1.0)


opt_levels: dict[str, _Level] = {level.__name__: level() for level in (O3, O2, O1, O0, O4, O5)}

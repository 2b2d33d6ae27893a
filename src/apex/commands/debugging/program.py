"""The watch of ``apex debug`` on a program: on its modules and optimizers, as they come."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from apex._compat import private
from apex.amp import scaling
from apex.commands.command_line import UsageError
from apex.commands.debugging.script import say
from apex.commands.options import check_folder
from apex.debug import ranks
from apex.debug.attaching import after_init, around
from apex.debug.growth import Growth
from apex.debug.lines import Lines
from apex.debug.report import Report
from apex.debug.tensors import params_of
from apex.debug.watch import Watch


class Program:
    """One watch on all modules and optimizers of a program.

    Attributes:
        watch: The watch.
    """

    def __init__(self, folder: Path, *, skip: bool, lines: bool = True) -> None:
        private.need("apex.debug")
        if lines:
            try:
                private.need("apex debug")
            except private.PrivateNameError as error:
                say(f"continuing as with --no-lines: {error}")
                lines = False
        self._folder, self._skip = folder, skip
        self._lines = Lines() if lines else None
        more: Any = {"warn": say, "growth": Growth(), "lines": self._lines}
        self.watch = Watch([], [], None, None, self._write, skip=skip, **more)
        self._optimizers: list[Any] = []  # made, and not watched yet
        self._unseen: set[int] = set()  # their parameters without a module that was called
        self._looked_at: WeakSet[torch.nn.Module] = WeakSet()  # modules without any of these
        self._call = torch.nn.Module.__call__
        self._is_in_backward = self._has_closure = self._has_ended = False
        self._counts_steps = self._counts_losses = True  # not what follows from a reported fault
        self._losses = 0  # how many were looked at
        self._bad_losses: list[torch.Tensor] = []  # of each device one count
        self._undo = [
            around(torch.Tensor, "backward", self._backward),
            around(torch.autograd, "backward", self._backward),
            self._stop_looking,
            register_optimizer_step_pre_hook(self._begins).remove,
            after_init(torch.optim.Optimizer, self._made),
            after_init(torch.amp.GradScaler, self.watch.attach_scaler),
        ]
        if self._lines is not None:
            self._undo += [self._lines.stop, *_follow(self._lines)]

    def close(self) -> None:
        """Take everything off."""
        while self._undo:
            self._undo.pop()()
        self.watch.close()

    def _backward(self, inner: Callable[..., Any], roots: Any, *args: Any, **kwargs: Any) -> Any:
        """Have the watch look at the loss that a backward begins with: its gradient is 1."""
        if self._is_in_backward or torch.compiler.is_compiling():
            return inner(roots, *args, **kwargs)
        first = args[0] if args else kwargs.get("gradient", kwargs.get("grad_tensors"))
        for one in [roots] if isinstance(roots, torch.Tensor) else [*roots]:
            if first is None and one.numel() == 1 and one.is_floating_point() and not one.is_meta:
                self.watch.loss(one)
                self._count(one.detach())
        self._is_in_backward = True
        try:
            return inner(roots, *args, **kwargs)
        finally:
            self._is_in_backward = False

    def _count(self, loss: torch.Tensor) -> None:
        """Count one that is not finite; a GPU is not waited for.

        In float16 its scale may have made it infinite.
        """
        self._losses += 1
        bad = (loss.isnan() if loss.dtype is torch.float16 else ~loss.isfinite()).sum()
        for count in self._bad_losses:
            if count.device == bad.device:
                count.add_(bad)
                return
        self._bad_losses.append(bad)

    def end(self, *, failed: bool) -> str:
        """Report what patience has held back; return one line on the run, or nothing to add."""
        self._has_ended = True
        self.watch.tell_at_end()
        watch, bad = self.watch, sum(int(one) for one in self._bad_losses)
        is_told = watch.report is not None
        parts = []
        if watch.skipped and self._counts_steps:
            parts.append(f"{watch.skipped} of {watch.steps} steps were skipped")
        if bad and self._counts_losses:
            parts.append(f"{bad} of {self._losses} losses were not finite")
        if is_told or bad or not watch.steps:
            return " and ".join(parts)
        if not ranks.is_first():
            return ""
        if parts:
            finite = ", and all losses were finite" if self._losses else ""
            return f"{parts[0]} because gradients were not finite{finite}"
        what = "all losses and gradients" if self._losses else "all gradients"
        unit = "call of a closure" if self._has_closure else "optimizer step"
        if watch.steps > 1:
            unit = "calls of a closure" if self._has_closure else "optimizer steps"
        before = "before the script stopped, " if failed else ""
        return f"{before}{what} of {watch.steps} {unit} were finite"

    def _made(self, optimizer: Any) -> None:
        self._optimizers.append(optimizer)
        self._unseen |= set(map(id, params_of(optimizer)))
        self._looked_at.clear()
        if self._lines is not None:
            self._lines.on()
        called, call = self._called, self._call

        @functools.wraps(call)
        def look(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            called(module)
            return call(module, *args, **kwargs)

        # Not a hook for all modules, of which torch.compile warns: nothing while all are seen.
        torch.nn.Module.__call__ = look  # type: ignore[method-assign]

    def _stop_looking(self) -> None:
        torch.nn.Module.__call__ = self._call  # type: ignore[method-assign]

    def _begins(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Watch a step from its start on where the model's first call is in its closure."""
        if self._lines is not None:
            self._lines.off()
        if len(args) > 1 or kwargs.get("closure") is not None:
            self._has_closure = True
            self._attach(optimizer)

    def _called(self, module: torch.nn.Module) -> None:
        """Watch a module that has parameters of an optimizer, from this call on."""
        if module in self._looked_at or isinstance(module, torch.jit.ScriptModule):
            return
        own = {id(param) for param in module.parameters()}
        if own.isdisjoint(self._unseen):
            self._looked_at.add(module)
            return
        self._unseen -= own
        if not self._unseen:
            self._stop_looking()
        self.watch.attach(module)
        for optimizer in list(self._optimizers):
            if not own.isdisjoint(map(id, params_of(optimizer))):
                self._attach(optimizer)

    def _attach(self, optimizer: Any) -> None:
        if optimizer in self._optimizers:
            self._optimizers.remove(optimizer)
            self.watch.attach_optimizer(optimizer)

    def _write(self, report: Report) -> None:
        fault = self.watch.fault
        self._counts_losses = fault is not None and (fault.bad_loss or fault.is_skipped)
        self._counts_steps = self._skip or self._has_ended
        say(report.text(), front="")
        rank = f"-rank{report.rank}" if report.rank else ""
        try:
            check_folder("--out", self._folder)
            (self._folder / f"report{rank}.txt").write_text(report.text() + "\n", "utf-8")
            (self._folder / f"report{rank}.json").write_text(report.to_json() + "\n", "utf-8")
            say(f"wrote {self._folder}")
            if report.call is not None:
                file = report.save(self._folder / f"nan{rank}.pt")
                say(f"apex debug repro {file} runs the operation again", front="")
        except ValueError as error:
            say(f"did not save the operation: {error}")
        except (OSError, RuntimeError, UsageError) as error:  # the script goes on
            say(f"could not write all files: {error}")
        if not self._counts_steps:
            self.watch.stop()  # what comes next follows from this fault


def _follow(lines: Lines) -> list[Callable[[], None]]:
    """Turn lines on and off with what a program does; return what undoes that."""
    loader = private.BaseDataLoaderIter

    def quietly(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        lines.off()
        result = inner(*args, **kwargs)
        lines.on()
        return result

    def batch(inner: Callable[..., Any], *args: Any) -> Any:
        lines.off()
        result = inner(*args)
        if not lines.tape.has_begun():
            lines.begin_step()  # what came before the batch has not made it
        lines.on()
        return result

    def scale(inner: Callable[..., Any], block: Any) -> Any:
        lines.off()  # amp calls up to 60 functions
        scaled = inner(block)
        lines.on()
        lines.scaled(block.loss, scaled, 1.0 if block._pass is None else block._pass.scale)
        return scaled

    def backward(inner: Callable[..., Any], tensors: Any, *args: Any, **kwargs: Any) -> Any:
        one = isinstance(tensors, torch.Tensor)
        is_plain = not args and not any(v is not None and v is not False for v in kwargs.values())
        lines.backward(tensors if one else None, is_plain=is_plain)
        return inner(tensors, *args, **kwargs)

    apply: Any = vars(torch.autograd.Function)["apply"]

    @functools.wraps(apply.__func__)
    def applied(function: Any, *args: Any, **kwargs: Any) -> Any:
        return lines.apply(functools.partial(apply.__func__, function), args, kwargs)

    def put_back() -> None:
        torch.autograd.Function.apply = apply  # type: ignore[method-assign]

    torch.autograd.Function.apply = classmethod(applied)  # type: ignore[assignment, method-assign]

    def compiled(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        lines.stop()
        return inner(*args, **kwargs)

    return [
        put_back,
        around(torch, "compile", compiled),
        register_optimizer_step_post_hook(lambda *_: lines.on()).remove,
        around(torch.optim.Optimizer, "zero_grad", quietly),
        around(torch.nn.Module, "zero_grad", quietly),
        around(loader, "__next__", batch),
        around(scaling._ScaledLoss, "__enter__", scale),
        around(torch.Tensor, "backward", backward),
        around(torch.autograd, "backward", backward),
    ]

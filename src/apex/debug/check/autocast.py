"""Rules of autocast blocks: where they begin and end, and what is inside."""

from __future__ import annotations

import dis
import inspect
import statistics
from typing import Any

import torch

from apex.debug.check.facts import CheckRule, Facts, distance, walk
from apex.debug.check.finding import Place
from apex.debug.check.values import FunctionCall, has_values
from apex.debug.undisturbed import undisturbed

_TRIES = 3  # steps in which backward runs more than once
_SCALE = 1024.0
_WRITERS = {"append", "add", "update", "print", "distributed", "extend", "write"}
_STORES = ("STORE_ATTR", "STORE_GLOBAL", "STORE_SUBSCR", "DELETE", "INPLACE", "MAKE")
_OFF = "computes gradients in float16 without a loss scale, because the GradScaler is not enabled"
_LEAST_LOST, _LEAST_APART = 0.01, 0.001


class Region:
    """An autocast block that is entered.

    Attributes:
        low: How many functions in it had 16-bit results.
        stepped: How many steps were made in it.
    """

    def __init__(self, block: Any, place: Place | None) -> None:
        self.dtype, self.enabled = block.fast_dtype, torch.is_autocast_enabled(block.device)
        self.cached, self.place = block._cache_enabled, place
        self.low = self.stepped = 0


class Regions(CheckRule):
    """Blocks around nothing, and blocks that outlive a step.

    Sees the functions and forwards in each block. Prints how many forwards ran in float32, or how
    many steps had no effect. Silent with compiled code, whose functions are not seen; for blocks
    without gradients; and where the cache is off or was cleared.
    """

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._entered: dict[Place, int] = {}
        self._outside = self._low = 0  # forwards; functions with 16-bit results in blocks

    def function(self, call: FunctionCall) -> None:
        """Count results in 16 bits."""
        regions = self.facts.regions
        if call.low and regions and regions[-1].enabled:
            regions[-1].low += 1
        if call.low and not self.facts.low:
            low = [one for one in call.got if one.dtype == torch.float16]
            self.facts.low = any(one.requires_grad for one in low)
        if call.name == "clear_autocast_cache":
            for region in regions:
                region.low = 0

    def network_ends(self, tensors: list[torch.Tensor]) -> None:
        """Count a network whose functions are not seen (TorchScript)."""
        self._low += any(one.dtype in (torch.float16, torch.bfloat16) for one in tensors)

    def module_begins(self, module: torch.nn.Module, args: Any, depth: int) -> None:
        """Look where a trained module is called."""
        trained = [] if depth else [one for one in module.parameters() if one.requires_grad]
        if not trained or not torch.is_grad_enabled():
            return
        regions = self.facts.regions
        self._outside += not any(region.enabled for region in regions)
        for outer in regions[:1]:
            is_stale = outer.stepped and outer.cached and outer.low
            if is_stale and any(one.dtype == torch.float32 for one in trained):
                text = (
                    f"{outer.stepped} steps had no effect on this forward; the autocast block "
                    "opens at "
                )
                text += str(outer.place).partition(" in ")[0]
                self.facts.tell("stale-autocast-cache", text, size=outer.stepped)

    def attempt_ends(self, optimizer: Any, *, skipped: bool) -> None:
        """Count steps in the blocks that are open."""
        for region in self.facts.regions:
            region.stepped += not skipped

    def leaves(self, region: Region) -> None:
        """Take the counts of a block."""
        self._low += region.low
        for outer in self.facts.regions[-1:]:
            outer.low += region.low
        if region.enabled and region.place and torch.is_grad_enabled() and not self.facts.quiet:
            self._entered[region.place] = self._entered.get(region.place, 0) + 1

    def ends(self) -> None:
        """Tell of a block around nothing."""
        often = [(at, times) for at, times in self._entered.items() if times >= 2]
        if self._outside >= 2 and not self.facts.is_blind and not self._low:
            for at, times in often[:1]:
                text = f"{self._outside} forwards ran in float32; the block was entered {times} "
                text += "times, and nothing in it ran in 16 bits"
                self.facts.tell("autocast-around-nothing", text, at, step=0)


class Backwards(CheckRule):
    """Backward inside of a block, and float16 without a loss scale.

    Sees where backward is called. In the first three steps it computes the gradients twice, by
    ``torch.autograd.grad``: inside and outside of the block, or at scales of 1 and 1024. Prints the
    difference, or the share of elements that are 0 at 1 alone. Silent below 0.1 % and 1 % (the
    median), and where the program has hooks on gradients, or autograd functions of its own that may
    do more than compute.
    """

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._place: Place | None = None  # of a float16 block since the last step
        self._lost: list[tuple[int, float, Place]] = []

    def leaves(self, region: Region) -> None:
        """Note float16 blocks."""
        if region.low and region.enabled and region.dtype == torch.float16:
            self._place = self._place or region.place

    def attempt_ends(self, optimizer: Any, *, skipped: bool) -> None:
        """Begin again."""
        self._place = None

    def backward_begins(self, roots: list[Any], scales: set[float | None], at: Place) -> None:
        """Compute the gradients again."""
        facts = self.facts
        params = [one for one in facts.params() if one.requires_grad and one.is_leaf]
        if len(roots) != 1 or facts.steps >= _TRIES or facts.has_hooks or not params:
            return
        root = roots[0]
        if not has_values(root):
            return
        device = root.device.type
        is_inside = torch.is_autocast_enabled(device)
        for region in facts.regions:
            self.leaves(region)
        is_managed = any(hasattr(one, "_amp_stash") for one in facts.optimizers)
        is_bare = scales == {None} and self._place and not facts.scalers and not is_managed
        if not (is_inside or is_bare) or not root.requires_grad or _has_own_functions(root):
            return
        if is_inside:
            inside = _gradients(root, params)
            with torch.autocast(device, enabled=False):
                apart = distance(zip(inside, _gradients(root, params), strict=False))
            if apart >= _LEAST_APART:
                text = f"gradients differ by {100 * apart:.2g} % (norm of the difference)"
                facts.tell("backward-in-autocast", text, at, size=apart)
        if is_bare and self._place:
            both = zip(_gradients(root, params), _gradients(root, params, _SCALE), strict=False)
            pairs = [(a, b) for a, b in both if a is not None and b is not None]
            there = sum(int((torch.isfinite(b) & (b != 0)).sum()) for _, b in pairs)
            gone = sum(int((torch.isfinite(b) & (b != 0) & (a == 0)).sum()) for a, b in pairs)
            place = at if facts.is_off else self._place
            self._lost.append((facts.now(), gone / max(1, there), place))

    def ends(self) -> None:
        """Tell of gradients that are too small for float16."""
        median = statistics.median(share for _, share, _ in self._lost) if self._lost else 0.0
        for step, share, at in self._lost if median >= _LEAST_LOST else ():
            text = (
                f"{100 * share:.3g} % of the gradients' elements were 0 and would not be at a "
                "scale "
            )
            text += f"of {_SCALE:g}"
            self.facts.tell(
                "float16-without-scaler", text, at, share, step, _OFF * self.facts.is_off
            )


def _gradients(root: torch.Tensor, params: list[Any], scale: float = 1.0) -> list[Any]:
    """The gradients of ``scale * root``; none where it cannot run twice."""
    seed, options = torch.full_like(root, scale), {"retain_graph": True, "allow_unused": True}
    try:
        with undisturbed():
            found = torch.autograd.grad(root, params, seed, **options)
            return [None if one is None or one.is_sparse else one for one in found]
    except RuntimeError:  # such as of a reentrant checkpoint
        return []


def _has_own_functions(root: torch.Tensor) -> bool:
    """Whether the graph has a ``torch.autograd.Function`` that may do more than compute."""
    forwards = {getattr(node, "_forward_cls", None) for node in walk(root)}
    others = [one for one in forwards if one and not one.__module__.startswith(("torch.", "apex."))]
    return not all(_only_computes(inspect.unwrap(one.backward)) for one in others)


def _only_computes(function: Any) -> bool:
    """Whether a function writes nothing and calls nothing of the program: it may run twice."""
    code = getattr(function, "__code__", None)
    if code is None:
        return False
    used = [function.__globals__.get(name) for name in code.co_names]
    names = [getattr(one, "__name__", "") for one in used if one is not None]
    known = all(name.startswith(("torch", "math")) for name in names)
    writes = any(name.endswith("_") or name in _WRITERS for name in code.co_names)
    steps = [f"{one.opname} {one.argrepr}" for one in dis.get_instructions(code)]
    stores = any(one.startswith(_STORES) or one.endswith("=") for one in steps)
    inner = code.co_freevars or any(map(inspect.iscode, code.co_consts))
    return known and not (writes or stores or inner)


RULES = (Regions, Backwards)

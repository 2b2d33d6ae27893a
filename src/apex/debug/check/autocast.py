"""Rules of autocast blocks: where they begin and end, and what is inside."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

import torch

from apex.debug.check.facts import Facts, Rule, distance
from apex.debug.check.finding import Place
from apex.debug.check.values import Call
from apex.debug.undisturbed import undisturbed

_TRIES = 3  # steps in which backward runs more than once
_SCALE = 1024.0
_LEAST_LOST, _LEAST_APART = 0.01, 0.001


@dataclass
class Region:
    """An autocast block that is entered.

    Attributes:
        low: How many functions in it had 16-bit results.
        stepped: How many steps were made in it.
    """

    dtype: torch.dtype
    enabled: bool
    place: Place | None
    cached: bool
    low: int = 0
    stepped: int = 0


class Regions(Rule):
    """Blocks around nothing, and blocks that outlive a step.

    Sees the functions and forwards in each block. Prints how many forwards ran in float32, or how
    many steps had no effect. Silent with compiled code, whose functions are not seen; for blocks
    without gradients; and where the cache is off or was cleared.
    """

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._blocks: dict[tuple[str, int], list[Any]] = {}  # place, how often, functions
        self._outside = 0  # forwards

    def function(self, call: Call) -> None:
        """Count results in 16 bits."""
        regions = self.facts.regions
        if call.low:
            if regions and regions[-1].enabled:
                regions[-1].low += 1
            if not self.facts.low:
                low = [t for t in call.got if t.dtype == torch.float16]
                self.facts.low = any(t.requires_grad for t in low)
        if call.name == "clear_autocast_cache":
            for region in regions:
                region.low = 0

    def module_begins(self, module: torch.nn.Module, args: Any, depth: int) -> None:
        """Look where a trained module is called."""
        if depth or not torch.is_grad_enabled():
            return
        trained = [p for p in module.parameters() if p.requires_grad]
        if not trained:
            return
        regions = self.facts.regions
        if not any(region.enabled for region in regions):
            self._outside += 1
        outer = regions[0] if regions else None
        is_stale = outer is not None and outer.stepped and outer.cached and outer.low
        if is_stale and any(p.dtype == torch.float32 for p in trained):
            where = str(outer.place).partition(" in ")[0]
            text = (
                f"{outer.stepped} steps had no effect on this forward, since the block at {where}"
            )
            self.facts.tell("stale-autocast-cache", text, size=outer.stepped)

    def attempt_ends(self, optimizer: Any, *, skipped: bool) -> None:
        """Count steps in the blocks that are open."""
        for region in self.facts.regions:
            region.stepped += not skipped

    def leaves(self, region: Region) -> None:
        """Take the counts of a block."""
        if self.facts.regions:
            self.facts.regions[-1].low += region.low
        place = region.place
        if region.enabled and place and torch.is_grad_enabled() and not self.facts.quiet:
            block = self._blocks.setdefault((place.file, place.line), [place, 0, 0])
            block[1] += 1
            block[2] += region.low

    def network_ends(self, module: torch.nn.Module, output: Any) -> None:
        """Count a network whose functions are not seen (TorchScript)."""

    def ends(self) -> None:
        """Tell of a block around nothing."""
        blocks = [one for one in self._blocks.values() if one[1] >= 2]
        if (
            self._outside < 2
            or self.facts.is_blind
            or any(low for *_, low in self._blocks.values())
        ):
            return
        for place, times, _ in blocks[:1]:
            text = f"{self._outside} forwards ran in float32; the block was entered {times} times, "
            text += "and nothing in it ran in 16 bits"
            self.facts.tell("autocast-around-nothing", text, place=place, at_step=False)


class Backwards(Rule):
    """Backward inside of a block, and float16 without a loss scale.

    Sees where backward is called. In the first three steps it computes the gradients twice, by
    ``torch.autograd.grad``: inside and outside of the block, or at scales of 1 and 1024. Prints the
    difference, or the share of elements that are 0 at 1 alone. Silent below 0.1 % and 1 % (the
    median), and where the program has hooks on gradients or functions of its own in the graph.
    """

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._place: Place | None = None  # of a float16 block since the last step
        self._lost: list[tuple[int, float]] = []
        self._lost_at: Place | None = None

    def leaves(self, region: Region) -> None:
        """Note float16 blocks."""
        if region.low and region.enabled and region.dtype == torch.float16:
            self._place = self._place or region.place

    def attempt_ends(self, optimizer: Any, *, skipped: bool) -> None:
        """Begin again."""
        self._place = None

    def backward_begins(self, roots: list[Any], scales: set[float | None], place: Place) -> None:
        """Compute the gradients again."""
        facts = self.facts
        if len(roots) != 1 or facts.steps >= _TRIES or facts.has_hooks:
            return
        root = roots[0]
        device = root.device.type
        params = [p for p in facts.params() if p.requires_grad and p.is_leaf]
        if not root.requires_grad or not params or _has_own_functions(root):
            return
        if torch.is_autocast_enabled(device):
            inside = _gradients(root, params)
            with torch.autocast(device, enabled=False):
                outside = _gradients(root, params)
            both = [(a, b) for a, b in zip(inside, outside, strict=False) if a is not None]
            apart = distance([a for a, _ in both], [b for _, b in both]) if both else 0.0
            if apart >= _LEAST_APART:
                text = f"gradients differ by {100 * apart:.2g} % (norm of the difference)"
                facts.tell("backward-in-autocast", text, place=place, size=apart)
        open_blocks = [r.place for r in facts.regions if r.low and r.dtype == torch.float16]
        block = next((one for one in [self._place, *open_blocks] if one), None)
        managed = any(hasattr(one, "_amp_stash") for one in facts.optimizers)
        if scales == {None} and block and not facts.scalers and not managed:
            self._count_zeros(root, params, block)

    def _count_zeros(self, root: torch.Tensor, params: list[Any], place: Place) -> None:
        low, high = _gradients(root, params), _gradients(root, params, _SCALE)
        there = gone = 0
        for a, b in zip(low, high, strict=False):
            if a is not None and b is not None:
                counts = torch.isfinite(b) & (b != 0)
                there += int(counts.sum())
                gone += int((counts & (a == 0)).sum())
        if there:
            self._lost.append((self.facts.now(), gone / there))
            self._lost_at = place

    def ends(self) -> None:
        """Tell of gradients that are too small for float16."""
        median = statistics.median(share for _, share in self._lost) if self._lost else 0.0
        for step, share in self._lost if median >= _LEAST_LOST else ():
            text = f"{100 * share:.3g} % of the gradients' elements were 0 that are not at a scale "
            text += f"of {_SCALE:g}"
            place = self._lost_at
            self.facts.tell("float16-without-scaler", text, place=place, size=share, step=step)


def _gradients(root: torch.Tensor, params: list[Any], scale: float = 1.0) -> list[Any]:
    """The gradients of ``scale * root``; none where it cannot run twice."""
    seed = torch.full_like(root, scale)
    options: Any = {"retain_graph": True, "allow_unused": True}
    try:
        with undisturbed():
            return list(torch.autograd.grad(root, params, seed, **options))
    except RuntimeError:  # such as of a reentrant checkpoint
        return []


def _has_own_functions(root: torch.Tensor) -> bool:
    """Whether the graph has a ``torch.autograd.Function`` that is not torch's or apex's."""
    nodes, seen = [root.grad_fn], set()
    for node in nodes:
        if node is None or node in seen:
            continue
        seen.add(node)
        module = type(node).__module__
        forward = getattr(type(node), "_forward_cls", None)
        if forward is not None and not forward.__module__.startswith(("torch.", "apex.")):
            return True
        if module == "torch.utils.checkpoint":
            return True
        nodes += [one for one, _ in node.next_functions]
    return False


RULES = (Regions, Backwards)

"""Mixed precision written out by hand in plain torch: what the engine is compared with.

``Hand`` does for one model what amp's levels do, in the least code: casts by the bare torch
calls, a dynamic scale, masters, skipping. It shares nothing with the library.
"""

import copy

import torch
import torch.nn.functional as F
from torch import nn


def net(seed=0, batchnorm=True):
    torch.manual_seed(seed)
    layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4) if batchnorm else nn.Identity(), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * 16, 5))


def batches(count, seed=1):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        x = torch.randn(8, 1, 6, 6, generator=generator)
        yield x, torch.randint(0, 5, (8,), generator=generator)


class Scale:
    """The scale rule in one place: the reference of the state machine."""

    def __init__(self, value=2.0**16, window=2000, floor=2.0**-126, ceiling=2.0**24):
        self.value, self.window, self.floor, self.ceiling = value, window, floor, ceiling
        self.clean, self.counted = 0, True
        self.passes, self.steps = 0, 0  # finished and counted ever

    def finish_pass(self, overflow):
        self.passes += 1
        if overflow:
            self.value, self.clean = max(self.value / 2, self.floor), 0
        else:
            self.counted = False

    def land(self):
        if not self.counted:
            self.count()

    def count(self):
        self.counted, self.clean, self.steps = True, self.clean + 1, self.steps + 1
        if self.clean >= self.window:
            self.value, self.clean = min(self.value * 2, self.ceiling), 0


class Hand:
    """One model, one optimizer, one dynamic scale, at O0, O1, O2, O4 or O5."""

    def __init__(self, model, make_optimizer, level, window=2000):
        self.level, self.model = level, copy.deepcopy(model)
        self.dtype = torch.bfloat16 if level in ("O4", "O5") else torch.float16
        self.scale = Scale(window=window) if level in ("O1", "O2") else None
        self.pairs = []
        params = list(self.model.parameters())
        if level in ("O2", "O5"):
            masters = []
            norms = {
                p
                for m in self.model.modules()
                if isinstance(m, nn.BatchNorm2d)
                for p in m.parameters()
            }
            for p in params:
                if p in norms:
                    masters.append(p)
                    continue
                master = p.detach().clone().requires_grad_()
                p.data = p.data.to(self.dtype)
                masters.append(master)
                self.pairs.append((p, master))
            params = masters
        self.params, self.optimizer = params, make_optimizer(params)
        self.bad, self.kept = False, {}

    def loss(self, x, y):
        if self.level in ("O2", "O5"):
            return F.cross_entropy(self.model(x.to(self.dtype)).float(), y)
        if self.level in ("O1", "O4"):
            with torch.autocast("cpu", self.dtype):
                out = self.model(x)
            return F.cross_entropy(out.float(), y)
        return F.cross_entropy(self.model(x), y)

    def backward(self, loss, poison=None):
        """One pass; ``poison`` may write into the scaled gradients of the model."""
        kept = {p: p.grad for p in self.params if p.grad is not None}
        for p in [*self.params, *self.model.parameters()]:
            p.grad = None
        scale = self.scale.value if self.scale else 1.0
        (loss * scale).backward()
        if poison:
            poison(self.model)
        for p, master in self.pairs:
            master.grad = None if p.grad is None else p.grad.float()
        grads = [p.grad for p in self.params if p.grad is not None]
        overflow = bool(self.scale) and not all(bool(g.isfinite().all()) for g in grads)
        for p in self.params:
            if p.grad is not None:
                p.grad.mul_(1.0 / scale)
        for p, grad in kept.items():
            p.grad = grad if p.grad is None else p.grad.add_(grad)
        if self.scale:
            self.scale.finish_pass(overflow)
        self.bad |= overflow

    def step(self):
        skip, self.bad = self.bad, False
        if not skip:
            self.optimizer.step()
            if self.scale:
                self.scale.land()
            with torch.no_grad():
                for p, master in self.pairs:
                    p.copy_(master)
        return skip

    def zero_grad(self):
        for p in [*self.params, *self.model.parameters()]:
            p.grad = None

    def weights(self):
        """float32 weights in the model's order."""
        by_model = dict(self.pairs)
        return [by_model.get(p, p).detach() for p in self.model.parameters()]


def same(left, right):
    """Whether two sequences of tensors are equal bit for bit."""
    left, right = list(left), list(right)
    return len(left) == len(right) and all(map(torch.equal, left, right))


class Static(Scale):
    """A scale that never changes, for which nothing is checked."""

    def finish_pass(self, overflow):
        pass


class Hands:
    """Several models, optimizers and losses, at any level but O3.

    Args:
        models: In float32; copied.
        optimizers: For each one a pair: what makes it of param groups, and the groups as
            ``(model number, name of a submodule, options)``.
        level: Which level.
        scales: A ``Scale`` for each ``loss_id``.

    What passes with ``delay`` leave adds up in ``scaled``, in the weight's own type. The ``grad``
    of what is stepped, the weight itself or its master, is always unscaled.
    """

    def __init__(self, models, optimizers, level, scales):
        self.level, self.models, self.scales = level, copy.deepcopy(models), scales
        self.dtype = torch.bfloat16 if level in ("O4", "O5") else torch.float16
        self.masters, self.scaled = {}, {}
        if level in ("O2", "O5"):
            for module in (m for model in self.models for m in model.modules()):
                self._halve(module)
        self.owned = [[] for _ in optimizers]  # model weights
        self.optimizers = [
            make([self._group(number, *group) for group in groups])
            for number, (make, groups) in enumerate(optimizers)
        ]
        self.delayed = [None for _ in optimizers]  # whose gradients are scaled: how, and with whom
        self.bad = [False for _ in optimizers]
        self.passes = [set() for _ in optimizers]  # since the last step: scale, its count then

    def _halve(self, module):
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            return
        for weight in module.parameters(recurse=False):
            if weight.requires_grad:
                self.masters[weight] = weight.detach().clone().requires_grad_()
            weight.data = weight.data.to(self.dtype)

    def _group(self, number, model, name, options):
        weights = list(self.models[model].get_submodule(name).parameters())
        self.owned[number] += weights
        return {"params": [self.wide(weight) for weight in weights], **options}

    def wide(self, weight):
        """What is stepped for a model weight."""
        return self.masters.get(weight, weight)

    def add_group(self, number, model, name, options):
        """Unfreeze a submodule and train it; its masters start from the rounded weights."""
        for weight in self.models[model].get_submodule(name).parameters():
            weight.requires_grad_()
            if weight.dtype != torch.float32:
                self.masters[weight] = weight.detach().float().requires_grad_()
        self.optimizers[number].add_param_group(self._group(number, model, name, options))

    def out(self, model, x):
        """The output in float32."""
        if self.level in ("O2", "O5"):
            return self.models[model](x.to(self.dtype)).float()
        if self.level in ("O1", "O4"):
            with torch.autocast("cpu", self.dtype):
                return self.models[model](x).float()
        return self.models[model](x)

    def _weights(self, who):
        return list(dict.fromkeys(weight for number in who for weight in self.owned[number]))

    def open(self, loss_id, who):
        """Begin a pass: it continues delayed ones of its kind, at their scale, or unscales them."""
        scale, who = self.scales[loss_id], tuple(sorted(who))
        before = self.delayed[who[0]]
        if before and before[0] is scale and before[2] == who:
            return before
        for number in who:
            self.collect(number)
            if all(self.wide(weight).grad is None for weight in self.owned[number]):
                self.bad[number], self.passes[number] = False, set()  # cleared by the program
        return scale, scale.value, who

    def backward(self, loss, loss_id=0, who=(0,), delay=False, poison=None):
        """One pass of a loss that feeds the optimizers ``who``.

        ``poison`` may write into the gradients of this pass.
        """
        this = self.open(loss_id, who)
        weights = self._weights(who)
        before = {weight: weight.grad for weight in weights}
        for weight in weights:
            weight.grad = None
        (loss * torch.tensor(this[1])).backward()
        if poison:
            poison(self.models)
        for weight in weights:
            new, weight.grad = weight.grad, before[weight]
            if new is not None:
                old = self.scaled.get(weight)
                self.scaled[weight] = new if old is None else old + new
        for number in who:
            self.delayed[number] = this
        is_one = isinstance(this[0], Static) and this[1] == 1.0
        if not delay or (is_one and self.level not in ("O2", "O5")):  # unscaled as it is
            self.unscale(this)

    def unscale(self, this):
        """Unscale, check and add up what passes of one scale and set of optimizers left."""
        scale, value, who = this
        grads = {weight: self.scaled.pop(weight, None) for weight in self._weights(who)}
        grads = {weight: grad for weight, grad in grads.items() if grad is not None}
        finite = all(bool(grad.isfinite().all()) for grad in grads.values())
        for weight, grad in grads.items():
            wide, grad = self.wide(weight), grad.float() * torch.tensor(1.0 / value)
            wide.grad = grad if wide.grad is None else wide.grad + grad
        scale.finish_pass(not finite)
        for number in who:
            self.delayed[number] = None
            if not isinstance(scale, Static):
                self.bad[number] |= not finite
                self.passes[number].add((scale, scale.steps))

    def collect(self, number):
        """Unscale what is still scaled, as clipping and the step must."""
        if self.delayed[number]:
            self.unscale(self.delayed[number])

    def step(self, number):
        """Step, or return True if the step is to be skipped."""
        self.collect(number)
        skip, self.bad[number] = self.bad[number], False
        passes, self.passes[number] = self.passes[number], set()
        if not skip:
            self.optimizers[number].step()
            for scale, steps in passes:
                if scale.steps == steps:  # no other optimizer has landed on these passes
                    scale.count()
        with torch.no_grad():
            for weight in self.owned[number]:
                if weight in self.masters:
                    weight.copy_(self.masters[weight])
                    self.masters[weight].grad = None
        return skip

    def zero_grad(self, number, set_to_none=True):
        self.collect(number)  # optimizers listed with this one have to know what it finds
        for weight in self.owned[number]:
            wide = self.wide(weight)
            if wide.grad is not None:
                wide.grad = None if set_to_none else torch.zeros_like(wide)
        self.bad[number], self.passes[number] = False, set()

    def zero_models(self):
        """``model.zero_grad()``, which cannot reach masters."""
        for model in self.models:
            model.zero_grad()


def slots(optimizer):
    """Every tensor in an optimizer's state, in the order of its parameters."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            for _, value in sorted(optimizer.state.get(param, {}).items()):
                if value is not None:
                    yield torch.as_tensor(value)

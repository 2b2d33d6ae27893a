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

    def finish_pass(self, overflow):
        if overflow:
            self.value, self.clean = max(self.value / 2, self.floor), 0
        else:
            self.counted = False

    def land(self):
        if self.counted:
            return
        self.counted, self.clean = True, self.clean + 1
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

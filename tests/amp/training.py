"""Small trainings that several tests of amp share, and the same written in plain torch."""

import contextlib
import copy
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn

from apex import amp

MASTERED = ["O2", "O5"]


# -- a convolution, a batchnorm and a linear layer -------------------------------------------------


def net(seed=0, batchnorm=True):
    torch.manual_seed(seed)
    layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4) if batchnorm else nn.Identity(), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * 16, 5))


def batches(count, seed=1):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        x = torch.randn(8, 1, 6, 6, generator=generator)
        yield x, torch.randint(0, 5, (8,), generator=generator)


def scaled_backward(loss, optimizers, **options):
    with amp.scale_loss(loss, optimizers, **options) as scaled:
        scaled.backward()


def sgd(params, lr=0.1, **options):
    return torch.optim.SGD(params, lr=lr, **options)


def started(level, model=None, optimizer=sgd, verbosity=0, **options):
    """A model, by default the net, and its optimizer, initialised.

    ``optimizer`` is one, several, or a function that makes one from the model's parameters.
    """
    model = net() if model is None else model
    if callable(optimizer):
        optimizer = optimizer(model.parameters())
    return amp.initialize(model, optimizer, opt_level=level, verbosity=verbosity, **options)


def backward(model, optimizer, batch, spoil=None, **options):
    """One pass; ``spoil`` may write into the scaled gradients of the model."""
    x, y = batch
    with amp.scale_loss(F.cross_entropy(model(x).float(), y), optimizer, **options) as scaled:
        scaled.backward()
        if spoil:
            spoil(model)


def train(model, optimizer, data, spoiled=None, treat=None):
    """A step for each batch; the gradients of step number ``spoiled`` overflow."""
    for number, batch in enumerate(data):
        optimizer.zero_grad()
        backward(model, optimizer, batch, spoil if number == spoiled else None)
        if treat:
            treat(optimizer)
        optimizer.step()


def spoil(model):
    """Write an inf into the last gradient, of a bias."""
    list(model.parameters())[-1].grad[-1] = torch.inf


class Plain:
    """The weights, float32 masters and dynamic scale of a training written in plain torch."""

    def __init__(self, model, make, level, window=2000, scale=2.0**16):
        self.model, self.level, self.window = copy.deepcopy(model), level, window
        self.is_dynamic = level in ("O1", "O2")
        self.scale, self.clean = (scale if self.is_dynamic else 1.0), 0
        self.dtype = torch.bfloat16 if level in ("O4", "O5") else torch.float16
        masters = {}
        if level in MASTERED:
            for module in self.model.modules():
                if not isinstance(module, nn.BatchNorm2d):
                    for weight in module.parameters(recurse=False):
                        masters[weight] = weight.detach().clone().requires_grad_()
                        weight.data = weight.data.to(self.dtype)
        self.masters = masters
        self.params = [masters.get(p, p) for p in self.model.parameters()]  # what is stepped
        self.optimizer = make(self.params)

    def loss(self, x, y):
        with torch.autocast("cpu", self.dtype, enabled=self.level in ("O1", "O4")):
            out = self.model(x.to(self.dtype) if self.masters else x)
        return F.cross_entropy(out.float(), y)

    def step(self, *passes, spoil=None, treat=None):
        """One step on the sum of the gradients of ``passes``, or a skip; returns whether a step."""
        sums, taken = [0.0 for _ in self.params], True
        for x, y in passes:
            self.model.zero_grad()
            scale = self.scale
            (self.loss(x, y) * scale).backward()
            if spoil:
                spoil(self.model)
            grads = [p.grad.float() for p in self.model.parameters()]
            sums = [a + grad / scale for a, grad in zip(sums, grads, strict=True)]
            if self.is_dynamic and not all(bool(grad.isfinite().all()) for grad in grads):
                self.scale, self.clean, taken = scale / 2, 0, False
        for param, grad in zip(self.params, sums, strict=True):
            param.grad = grad
        if treat:
            treat(self.params)
        if taken:
            self.optimizer.step()
            self.clean += self.is_dynamic
            with torch.no_grad():
                for weight, master in self.masters.items():
                    weight.copy_(master)
        if self.clean == self.window:
            self.scale, self.clean = self.scale * 2, 0
        return taken


# -- one row of two weights, zero at first, whose gradient is the input ----------------------------


def row(level, make=torch.optim.SGD, count=1, lr=1.0, **options):
    """The model and ``count`` optimizers of its weight."""
    amp.reset()
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    made = [make(model.parameters(), lr=lr) for _ in range(count)]
    options = {"loss_scale": 8.0, **options}
    started(level, model, made, **options)
    return model, *made


def block(model, optimizers, x=1.0, **options):
    scaled_backward(model(torch.full((1, 2), x)).sum(), optimizers, **options)


def step(model, optimizer, x=1.0, **options):
    block(model, optimizer, x, **options)
    optimizer.step()


def value(model):
    return model.state_dict()["weight"].flatten().tolist()


# -- comparisons -----------------------------------------------------------------------------------


def same(left, right):
    """Whether two sequences of tensors are equal bit for bit."""
    left, right = list(left), list(right)
    return len(left) == len(right) and all(map(torch.equal, left, right))


def grads_of(optimizer):
    return [p.grad for p in amp.master_params(optimizer)]


def copies(tensors):
    return [tensor.detach().clone() for tensor in tensors]


def scale_now():
    return amp.state_dict()["loss_scaler0"]["loss_scale"]


# -- a device that the host does not wait for ------------------------------------------------------


def _refusing(name):
    own = getattr(torch.Tensor, name)

    def method(tensor, *args, **kwargs):
        assert not tensor.is_meta, f"the host waited: {name}"
        return own(tensor, *args, **kwargs)

    return method


@contextlib.contextmanager
def no_waits():
    """Whatever would wait for a device raises; that device is meta."""
    with contextlib.ExitStack() as stack:
        for name in ("item", "tolist", "__bool__", "__float__", "__int__", "cpu", "nonzero"):
            stack.enter_context(mock.patch.object(torch.Tensor, name, _refusing(name)))
        yield


class Delayed:
    """Stands for AsyncCopy. ``arrived``: whether the numbers are there; None: every other time."""

    arrived = None
    arrives = True
    looks = 0

    def __init__(self, values):
        self.values = values

    def read(self):
        Delayed.looks += 1
        arrived = Delayed.looks % 2 if Delayed.arrived is None else Delayed.arrived
        return self.values.tolist() if arrived else None

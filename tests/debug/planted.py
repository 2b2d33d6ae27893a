"""Five small models, and a fault planted at the output of one of their modules."""

import contextlib

import torch
from torch import nn
from torch.nn import functional

from apex import amp, debug


class Planted(torch.autograd.Function):
    """The identity, but for a bad value in ``direction``."""

    @staticmethod
    def forward(ctx, x, direction, value, where, dtype):
        ctx.save_for_backward(x)
        ctx.spoil = (value, where, dtype) if direction == "backward" else None
        return x.view_as(x) if ctx.spoil else spoil(x, x, value, where, dtype)

    @staticmethod
    def backward(ctx, gradient):
        (output,) = ctx.saved_tensors
        if ctx.spoil:
            gradient = spoil(gradient, (output != 0) * gradient.abs(), *ctx.spoil)
        return gradient, None, None, None, None


def spoil(x, rank, value, where, dtype):
    """Make one element of ``x``, the one of the highest ``rank``, or all of them ``value``."""
    bad = torch.ones_like(x)
    if where == "one":
        place = rank.argmax().view(1)
        bad = torch.zeros(x.numel(), dtype=x.dtype).scatter_(0, place, 1.0).view(x.shape)
    if value == "nan":
        return x + (-bad).sqrt()
    if value == "inf":
        return x + bad / (1 - bad)
    x = x.to(dtype).clone()
    x[bad.bool()] *= 1e6
    return x


@contextlib.contextmanager
def watching(model, lr=0.1, **options):
    """SGD for a model, and a watch of both that keeps faults."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    with debug.watch(model, optimizer, **{"on_fault": "keep", **options}) as watch:
        yield optimizer, watch


def explained(
    model, compute, optimizer=None, *, told=False, before_step=None, repeat=None, **options
):
    """The report of one step under a watch.

    ``compute()`` gives the loss, of which the watch is told or not, and ``repeat`` is what is
    passed to ``explain`` as the step.
    """
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.01)
    with debug.watch(model, optimizer, on_fault="keep", **options) as watch:
        loss = compute()
        (watch.loss(loss) if told else loss).backward()
        if before_step is not None:
            before_step()
        optimizer.step()
        return watch.explain(step=repeat)


def plant(module, direction, value, where, dtype):
    """Plant the fault in the forward of ``module``, so that it is the module's own."""
    inner = module.forward

    def forward(*args, **kwargs):
        output = inner(*args, **kwargs)
        first = output[0] if isinstance(output, tuple) else output
        kind = first.dtype if dtype is None else dtype
        bad = Planted.apply(first, direction, value, where, kind).to(first.dtype)
        return (bad, *output[1:]) if isinstance(output, tuple) else bad

    module.forward = forward


class LSTM(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.lstm = nn.LSTM(8, options.pop("size", 8), batch_first=True, **options)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 12)

    def forward(self, tokens):
        out, _ = self.lstm(self.embedding(tokens))
        return self.head(self.norm(out))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.mT / 3
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
        return self.out(functional.softmax(scores, -1) @ v)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(8), Attention()
        self.drop = nn.Dropout(0.1)
        self.mlp = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x):
        x = x + self.drop(self.attention(self.norm(x)))
        return x + self.mlp(x)


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.layers = nn.Sequential(Layer(), Layer())
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 12)

    def forward(self, tokens):
        return self.head(self.norm(self.layers(self.embedding(tokens))))


class Generator(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh())


class Discriminator(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(8, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))


def mlp():
    return nn.Sequential(
        nn.Linear(8, 16), nn.ReLU(), nn.LayerNorm(16), nn.Dropout(0.1), nn.Linear(16, 4)
    )


def cnn():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 4, 3),
        nn.Flatten(),
        nn.Linear(16, 4),
    )


MODELS = {
    "MLP": lambda: [mlp()],
    "CNN": lambda: [cnn()],
    "LSTM": lambda: [LSTM()],
    "transformer": lambda: [Transformer()],
    "GAN": lambda: [Generator(), Discriminator()],
}
INPUTS = {
    "MLP": lambda: torch.randn(4, 8),
    "CNN": lambda: torch.randn(4, 1, 8, 8),
    "LSTM": lambda: torch.randint(12, (3, 5)),
    "transformer": lambda: torch.randint(12, (3, 5)),
    "GAN": lambda: (torch.randn(4, 8), torch.randn(4, 4)),
}
LEVELS = ("O0", "O1", "O2", "O4", "GradScaler")


class Training:
    """One of the models at a level, with a watch; ``step()`` makes one step of each optimizer.

    Args:
        prepare: Called with the models by name before amp is.
    """

    def __init__(self, name, level, prepare=lambda models: None, scale=2.0**8, lr=0.0, **options):
        torch.manual_seed(0)
        self.name, self.level = name, level
        self.models = MODELS[name]()
        if name == "LSTM" and level == "GradScaler":  # autocast on a CPU has no plain LSTM
            self.models = [LSTM(size=10, proj_size=8)]
        self.inputs = INPUTS[name]()
        prepare(self.models)
        # A rate of 0: 1e6 in float32 is healthy, and must not make a fault of the next step.
        self.optimizers = [torch.optim.SGD(one.parameters(), lr=lr) for one in self.models]
        self.scaler = None
        if level == "GradScaler":
            self.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        else:
            self.models, self.optimizers = amp.initialize(
                self.models, self.optimizers, opt_level=level, verbosity=0, init_scale=scale
            )
        options = {"on_fault": "keep", "patience": 0, "scaler": self.scaler} | options
        self.watch = debug.watch(self.models, self.optimizers, **options)

    def steps(self):
        """Make a step of each optimizer; yield after each."""
        if self.name == "GAN":
            yield from self._gan_steps()
            return
        (model,), (optimizer,) = self.models, self.optimizers
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16, enabled=self.level == "GradScaler"):
            loss = model(self.inputs).float().square().mean()
        self.update(loss, optimizer)
        yield

    def _gan_steps(self):
        (generator, discriminator), (of_g, of_d) = self.models, self.optimizers
        real, noise = self.inputs
        with torch.autocast("cpu", torch.float16, enabled=self.level == "GradScaler"):
            of_d.zero_grad()
            fake = generator(noise)
            judged = discriminator(real), discriminator(fake.detach())
            loss = (judged[0].float() - 1).square().mean() + judged[1].float().square().mean()
        self.update(loss, of_d)
        yield
        with torch.autocast("cpu", torch.float16, enabled=self.level == "GradScaler"):
            of_g.zero_grad()
            loss = (discriminator(fake).float() - 1).square().mean()
        self.update(loss, of_g)
        yield

    def update(self, loss, optimizer):
        """Backward and step."""
        if self.scaler is not None:
            self.scaler.scale(loss).backward()
            self.scaler.step(optimizer)
            self.scaler.update()
            return
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()

    def explain_first(self):
        """Step until a step has a fault; its report, or ``None``."""
        for _ in self.steps():
            if self.watch.fault is not None:
                return self.watch.explain()
        return None

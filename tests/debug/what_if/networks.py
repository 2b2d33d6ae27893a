"""Small networks whose precision is known: those that train in 16 bits, and those that do not.

Each function gives a model, a loss and a function that makes a batch. The first twelve of both were
written before the rule that judges a whole pass, and its limits, existed.
"""

import copy
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

ON = {"device": "cpu", "dtype": torch.float32}


def normal(*shape):
    return torch.randn(*shape, **ON)


def classes(number, *shape):
    return torch.randint(number, shape, device="cpu")


def classified(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def squared(model, batch):
    return F.mse_loss(model(batch[0]).squeeze(-1), batch[1])


# -- healthy ---------------------------------------------------------------------------------------


class Residual(nn.Module):
    def __init__(self, width, stride):
        super().__init__()
        self.one = nn.Conv2d(width, 2 * width, 3, stride, 1, bias=False)
        self.two = nn.Conv2d(2 * width, 2 * width, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(2 * width) for _ in range(2)])
        self.short = nn.Conv2d(width, 2 * width, 1, stride, bias=False)

    def forward(self, x):
        y = self.norms[0](self.one(x)).relu()
        return (self.norms[1](self.two(y)) + self.short(x)).relu()


def resnet():
    stem = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 5)
    model = nn.Sequential(*stem, Residual(8, 2), Residual(16, 2), *head)
    pattern = normal(5, 3, 12, 12)

    def batch():
        y = classes(5, 24)
        return 0.5 * pattern[y] + normal(24, 3, 12, 12), y

    return model, classified, batch


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(20, 16), nn.Linear(24, 20)
        self.lstm = nn.LSTM(16, 24, num_layers=2, batch_first=True, dropout=0.2)

    def forward(self, words):
        return self.head(self.lstm(self.words(words))[0]).transpose(1, 2)


def language_model():
    def batch():
        rows = (classes(20, 12, 1) + 3 * torch.arange(13, device="cpu")) % 20
        return rows[:, :-1], rows[:, 1:]

    return Recurrent(), classified, batch


class Block(nn.Module):
    def __init__(self, width, heads, *, causal):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        parts = self.qkv(self.norms[0](x)).chunk(3, -1)
        q, k, v = (one.unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class VisionTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches, self.head = nn.Conv2d(1, 16, 4, 4), nn.Linear(16, 4)
        self.cls, self.pos = (
            nn.Parameter(normal(1, 1, 16) * 0.02),
            nn.Parameter(normal(1, 10, 16) * 0.02),
        )
        self.blocks = nn.Sequential(*(Block(16, 2, causal=False) for _ in range(3)))
        self.norm = nn.LayerNorm(16)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.pos
        return self.head(self.norm(self.blocks(x))[:, 0])


def vision_transformer():
    pattern = normal(4, 1, 12, 12)

    def batch():
        y = classes(4, 16)
        return pattern[y] + 0.5 * normal(16, 1, 12, 12), y

    return VisionTransformer(), classified, batch


class TiedGPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(30, 24), nn.Embedding(12, 24)
        self.blocks = nn.ModuleList([Block(24, 3, causal=True) for _ in range(3)])
        self.norm = nn.LayerNorm(24)
        for one in (self.words, self.places):
            nn.init.normal_(one.weight, std=0.02)

    def forward(self, words, targets):
        x = self.words(words) + self.places.weight
        for block in self.blocks:
            x = block(x)
        logits = self.norm(x) @ self.words.weight.T
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def tied_gpt():
    def batch():
        rows = (classes(30, 8, 1) + torch.arange(13, device="cpu") ** 2) % 30
        return rows[:, :-1], rows[:, 1:]

    return TiedGPT(), lambda model, b: model(*b), batch


def critic():
    """Of a Wasserstein GAN: its loss is a small difference of two means."""
    wrap = parametrizations.spectral_norm
    convs = [wrap(nn.Conv2d(a, b, 4, 2, 1)) for a, b in ((1, 8), (8, 16))]
    model = nn.Sequential(
        convs[0], nn.LeakyReLU(0.2), convs[1], nn.LeakyReLU(0.2), nn.Flatten(),
        wrap(nn.Linear(16 * 9, 1)),
    )  # fmt: skip

    def loss(model, batch):
        return model(batch[1]).mean() - model(batch[0]).mean()

    return model, loss, lambda: (normal(16, 1, 12, 12), 0.8 * normal(16, 1, 12, 12))


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.images = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 16))
        self.texts = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 16))

    def forward(self, images, texts):
        return F.normalize(self.images(images), dim=-1), F.normalize(self.texts(texts), dim=-1)


def contrastive():
    mixing = normal(12, 20)

    def loss(model, batch):
        images, texts = model(*batch)
        logits = images @ texts.T / 0.01
        target = torch.arange(len(logits), device="cpu")
        return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2

    def batch():
        texts = normal(24, 12)
        return texts @ mixing / 3 + 0.3 * normal(24, 20), texts

    return TwoTowers(), loss, batch


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.ModuleList([self.pair(1, 8), self.pair(8, 16)])
        self.middle, self.up = (
            self.pair(16, 16),
            nn.ModuleList([self.pair(32, 8), self.pair(16, 8)]),
        )
        self.out = nn.Conv2d(8, 1, 1)

    @staticmethod
    def pair(width, out):
        return nn.Sequential(nn.Conv2d(width, out, 3, padding=1), nn.GroupNorm(4, out), nn.SiLU())

    def forward(self, x):
        kept = []
        for one in self.down:
            kept.append(one(x))
            x = F.max_pool2d(kept[-1], 2)
        x = self.middle(x)
        for one in self.up:
            x = F.interpolate(x, scale_factor=2.0)
            x = one(torch.cat([x, kept.pop()], 1))
        return self.out(x)


def unet():
    def batch():
        x = normal(6, 1, 16, 16)
        return x, (F.avg_pool2d(x, 3, 1, 1) > 0.2).float()

    def loss(model, batch):
        return F.binary_cross_entropy_with_logits(model(batch[0]), batch[1])

    return UNet(), loss, batch


class Mixture(nn.Module):
    """Two of four experts for each row, and a loss that balances them."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(16, 4, bias=False)
        self.experts = nn.ModuleList(
            [nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(4)]
        )
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 4)
        self.balance = 0.0

    def forward(self, x):
        shares = self.gate(x).softmax(-1)
        best = shares.topk(2, -1)
        mixed = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, places = (best.indices == number).nonzero(as_tuple=True)
            weight = best.values[rows, places].unsqueeze(1)
            mixed = mixed.index_add(0, rows, (weight * expert(x[rows])).to(mixed.dtype))
        self.balance = 4 * shares.mean(0).square().sum()
        return self.head(self.norm(x + mixed))


def mixture_of_experts():
    mixing = normal(16, 4)

    def batch():
        x = normal(48, 16)
        return x, (x @ mixing).argmax(1)

    return Mixture(), lambda m, b: classified(m, b) + 0.01 * m.balance, batch


def _mlp(inputs, outputs, width=32):
    return nn.Sequential(
        nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
        nn.Linear(width, outputs),
    )  # fmt: skip


def standardised_targets():
    """Prices around a million with a spread of 1e5, of which the loss takes mean and spread."""

    def loss(model, batch):
        return F.smooth_l1_loss(model(batch[0]).squeeze(-1), (batch[1] - 1e6) / 1e5)

    def batch():
        x = normal(64, 6)
        return x, 1e6 + 1e5 * (x[:, 0] - x[:, 1] * x[:, 2])

    return _mlp(6, 1), loss, batch


def constant_channel():
    """A channel of 300 that hardly varies goes into a batch norm."""
    layers = nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU()
    model = nn.Sequential(*layers, nn.Linear(32, 3))
    with torch.no_grad():
        model[0].weight[7] *= 0.01
        model[0].bias[7] = 300.0
    return model, classified, _three_classes


def _three_classes():
    x = normal(64, 12)
    return x, (x[:, :3] + 0.3 * x[:, 3:6] ** 2).argmax(1)


def rare_boxes():
    """A detector's head: tiny weights, and a bias by which each place is a box in 1 %."""
    model = _mlp(12, 9)
    nn.init.normal_(model[4].weight, std=0.01)
    nn.init.constant_(model[4].bias, -math.log(99))

    def loss(model, batch):
        return F.binary_cross_entropy_with_logits(model(batch[0]), batch[1], reduction="sum") / 64

    def batch():
        x = normal(64, 12)
        return x, (x[:, :9] > 2.3).float()

    return model, loss, batch


def zero_head():
    """Pixels of 0 to 255 into a batch norm, and a head that begins with zeros."""
    first = nn.BatchNorm2d(3), nn.Conv2d(3, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3)
    model = nn.Sequential(*first, nn.Flatten(), nn.Linear(12 * 16, 3))
    nn.init.zeros_(model[5].weight)

    def batch():
        y = classes(3, 16)
        x = torch.randint(200, (16, 3, 12, 12), device="cpu").float()
        x[torch.arange(16, device="cpu"), y] += 55
        return x, y

    return model, classified, batch


def first_ratios():
    """The first policy gradient of a rollout: ratios are 1, so that the loss is the mean of 0."""
    model = nn.Sequential(nn.Embedding(50, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 50))
    rollout = copy.deepcopy(model)

    def chosen(model, words):
        return model(words[:, :-1]).log_softmax(-1).gather(-1, words[:, 1:, None])[..., 0]

    def loss(model, batch):
        words, old, advantages = batch
        ratio = (chosen(model, words) - old).exp()
        return -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()

    def batch():
        words, reward = classes(50, 8, 17), normal(8, 1)
        with torch.no_grad():
            old = chosen(rollout, words)
        return words, old, (reward - reward.mean()) / reward.std()

    return model, loss, batch


def own_teacher():
    """A copy that is still its teacher's equal: the loss and all gradients are 0."""
    model = _mlp(12, 6)
    teacher = copy.deepcopy(model)

    def loss(model, batch):
        with torch.no_grad():
            wanted = teacher(batch)
        return F.mse_loss(model(batch), wanted)

    return model, loss, lambda: normal(32, 12)


# -- faulty ----------------------------------------------------------------------------------------


def kelvin_targets():
    """A regression around 290 with a spread of 3, whose bias begins at the mean."""
    model = _mlp(8, 1)
    nn.init.constant_(model[4].bias, 290.0)

    def batch():
        x = normal(48, 8)
        return x, 290 + 3 * (x[:, 1] * x[:, 2] - x[:, 0]).tanh()

    return model, squared, batch


def two_targets():
    """Pressure around 1e5 with a spread of 20 beside a temperature that is standardised."""
    model = _mlp(8, 2)
    with torch.no_grad():
        model[4].bias[0] = 1e5

    def loss(model, batch):
        return ((model(batch[0]) - batch[1]) / torch.tensor([20.0, 1.0], **ON)).square().mean()

    def batch():
        x = normal(48, 8)
        return x, torch.stack([1e5 + 20 * x[:, 0], x[:, 1] - x[:, 2]], 1)

    return model, loss, batch


class SharedOffset(nn.Module):
    """Logits to which a free energy, the same for every class, is added inside of the head."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 32), nn.Tanh())
        self.head = nn.Linear(32, 3)
        with torch.no_grad():
            self.head.bias += 2e4

    def forward(self, x):
        return self.head(self.body(x)).log_softmax(-1)


def offset_logits():
    return SharedOffset(), lambda m, b: F.nll_loss(m(b[0]), b[1]), _three_classes


def raw_inputs():
    """Inputs in kelvin that nobody has standardised, into a linear layer and a batch norm."""
    layers = nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 1)

    def batch():
        x = normal(48, 8)
        return 300 + 0.5 * x, x[:, 0] + x[:, 1] * x[:, 2]

    return nn.Sequential(*layers), squared, batch


class TwoMoments(nn.Module):
    """Normalises by E[x^2] - E[x]^2."""

    def forward(self, x):
        mean = x.mean(-1, keepdim=True)
        spread = (x * x).mean(-1, keepdim=True) - mean * mean
        return (x - mean) / (spread.abs() + 1e-5).sqrt()


def two_moments():
    model = nn.Sequential(nn.Linear(12, 32), TwoMoments(), nn.GELU(), nn.Linear(32, 3))
    nn.init.constant_(model[0].bias, 40.0)
    return model, classified, _three_classes


class RootMeanSquare(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width, **ON))

    def forward(self, x):
        return self.scale * (x / x.pow(2).mean(-1, keepdim=True).add(1e-6).sqrt())


class Squares(RootMeanSquare):
    """Multiplies, which no list casts."""

    def forward(self, x):
        return self.scale * (x / ((x * x).mean(-1, keepdim=True) + 1e-6) ** 0.5)


def _squares(kind, times):
    model = nn.Sequential(
        nn.Linear(12, 32), kind(32), nn.SiLU(), nn.Linear(32, 32), kind(32), nn.Linear(32, 3)
    )
    with torch.no_grad():
        model[0].weight.mul_(times)
    return model, classified, _three_classes


def squares_overflow():
    return _squares(Squares, 2000.0)


def squares_vanish():
    """Squares of activations of 1e-4 are zero in float16, and the 1e-12 that is added is too."""
    model, loss, batch = _squares(Vanishing, 3e-4)
    nn.init.zeros_(model[0].bias)
    return model, loss, batch


class Vanishing(RootMeanSquare):
    def forward(self, x):
        return self.scale * (x / ((x * x).mean(-1, keepdim=True) + 1e-12) ** 0.5)


class Stream(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x):
        return x + 2e4 * self.inner(self.norm(x)).tanh()


def long_stream():
    """A residual stream that six blocks take beyond 65504."""
    model = nn.Sequential(
        nn.Linear(12, 24), *(Stream(24) for _ in range(6)), nn.LayerNorm(24), nn.Linear(24, 3)
    )
    with torch.no_grad():
        for block in model[1:7]:
            block.inner.bias[0] = 4.0
    return model, classified, _three_classes


class OwnAttention(nn.Module):
    """Attention by hand over words of which some are padding."""

    def __init__(self, fill, *, shifted):
        super().__init__()
        self.fill, self.shifted = fill, shifted
        self.words, self.q, self.k, self.v = (
            nn.Embedding(16, 16),
            *(nn.Linear(16, 16) for _ in range(3)),
        )
        self.head = nn.Linear(16, 4)

    def forward(self, words):
        x = self.words(words)
        scores = self.q(x) @ self.k(x).transpose(1, 2)
        scores = scores.masked_fill((words == 0)[:, None], self.fill)
        if self.shifted:
            shares = scores.softmax(-1)
        else:
            powers = torch.exp2(4 * scores)
            shares = powers / powers.sum(-1, keepdim=True)
        return self.head((shares @ self.v(x)).mean(1))


def _padded():
    words = classes(16, 16, 7)
    return words, words.sum(1) % 4


def padding_of_a_billion():
    """torch refuses to fill a float16 tensor with -1e9."""
    return OwnAttention(-1e9, shifted=True), classified, _padded


def powers_of_scores():
    """A softmax by hand that takes no maximum off."""
    return OwnAttention(-100.0, shifted=False), classified, _padded


class Steps(nn.Module):
    """Predicts noise from sines of a time of 0 to 1000, at O5 given in bfloat16."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 4))

    def forward(self, times):
        rates = torch.arange(1, 9, device="cpu") / 8
        angles = times[:, None] * rates
        return self.body(torch.cat([angles.sin(), angles.cos()], 1).to(times.dtype))


class WideSteps(Steps):
    """The same without a cast, which a layer of 16 bits refuses."""

    def forward(self, times):
        angles = times[:, None] * torch.arange(1, 9, device="cpu")
        return self.body(torch.cat([angles.sin(), angles.cos()], 1))


def late_times():
    def loss(model, batch):
        return F.mse_loss(model(batch[0]).float(), batch[1])

    def batch():
        times = torch.randint(500, 1000, (48,), device="cpu").float()
        return times, torch.stack([(times * one / 8).sin() for one in (3, 5, 6, 8)], 1)

    return Steps(), loss, batch


def features_in_float32():
    def loss(model, batch):
        return F.mse_loss(model(batch[0]).float(), batch[1])

    return WideSteps(), loss, lambda: (classes(9, 48), normal(48, 4))


def distances():
    """A kernel by |a|^2 + |b|^2 - 2ab, of features far from zero."""
    model = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 6))
    nn.init.constant_(model[2].bias, 30.0)

    def loss(model, batch):
        z, y = model(batch[0]), batch[1]
        norms = (z * z).sum(-1)
        near = torch.exp(-0.5 * (norms[:, None] + norms - 2 * z @ z.T))
        return (near - (y[:, None] == y).float()).square().mean()

    return model, loss, _three_classes


def small_differences():
    """A derivative as the difference of two outputs nearby, which 16 bits hardly tell apart."""
    model = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1))

    def loss(model, batch):
        return ((model(batch + 1e-3) - model(batch)) / 1e-3 - batch.cos()).square().mean()

    return model, loss, lambda: normal(64, 1)


HEALTHY = [
    resnet, language_model, vision_transformer, tied_gpt, critic, contrastive, unet,
    mixture_of_experts, standardised_targets, constant_channel, rare_boxes, zero_head,
    first_ratios, own_teacher,
]  # fmt: skip
FAULTY = [
    kelvin_targets, two_targets, offset_logits, raw_inputs, two_moments, squares_overflow,
    squares_vanish, long_stream, padding_of_a_billion, powers_of_scores, late_times, distances,
    features_in_float32, small_differences,
]  # fmt: skip


def made(network, seed=0, number=8):
    """A model, its loss, and batches."""
    torch.manual_seed(seed)
    model, loss, batch = network()
    return model, loss, [batch() for _ in range(number)]

"""What the founding tutorials have their readers type, device words aside."""

import collections
import dataclasses
import subprocess
import sys
import types

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from apex import amp
from tests.amp.hand import Hand, same
from tests.tolerance import O1_REGRESSION, assert_close_to_largest

LEVELS = ["O0", "O1", "O2", "O3", "O4", "O5"]


class Segmenter(nn.Module):
    """T1: registrations made in ``__init__``, before initialize."""

    def __init__(self):
        super().__init__()
        amp.register_float_function(torch, "sigmoid")
        amp.register_float_function(torch, "softmax")
        amp.register_half_function(torch, "einsum")
        amp.register_promote_function(torch, "minimum")
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.head = nn.Conv2d(4, 2, 1)
        self.seen = None

    def forward(self, x):
        x = self.conv(x)
        gate = torch.sigmoid(x.sum((2, 3), keepdim=True))
        self.seen = gate.dtype
        return self.head(x * gate.to(x.dtype))


def two_groups(net):
    return torch.optim.Adam(
        [
            {"params": net.conv.parameters(), "lr": 1e-3},
            {"params": net.head.parameters(), "lr": 1e-2},
        ],
        weight_decay=1e-4,
        eps=1e-4,  # O3 steps in float16, where 1e-8 is 0
    )


def step(net, opt, images, labels):
    loss = F.cross_entropy(net(images), labels)
    if not torch.isnan(loss):
        opt.zero_grad()
        with amp.scale_loss(loss, opt) as scaled_loss:
            scaled_loss.backward()
        opt.step()
    return loss.item()


@pytest.mark.parametrize("level", LEVELS)
def test_t1_training_saving_and_restoring(level, tmp_path):
    net = Segmenter()
    opt = two_groups(net)
    net, opt = amp.initialize(net, opt, opt_level=level, verbosity=0)
    images, labels = torch.randn(4, 3, 8, 8), torch.randint(0, 2, (4, 8, 8))
    losses = [step(net, opt, images, labels) for _ in range(8)]
    assert losses[-1] < losses[0]
    if level in ("O1", "O4"):
        assert net.seen == torch.float32  # the registration
    torch.save(
        {"model": net.state_dict(), "optimizer": opt.state_dict(), "amp": amp.state_dict()},
        tmp_path / "amp_checkpoint.pt",
    )
    going_on = [step(net, opt, images, labels) for _ in range(3)]

    net = Segmenter()
    opt = two_groups(net)
    checkpoint = torch.load(tmp_path / "amp_checkpoint.pt")
    net, opt = amp.initialize(net, opt, opt_level=level, verbosity=0)
    net.load_state_dict(checkpoint["model"])
    opt.load_state_dict(checkpoint["optimizer"])
    amp.load_state_dict(checkpoint["amp"])
    assert [step(net, opt, images, labels) for _ in range(3)] == going_on


@pytest.mark.slow
def test_t2_regression_with_and_without():
    x, y = torch.randn(64, 1024), torch.randn(64, 512)
    ends = []
    for use_amp in (False, True):
        torch.manual_seed(1)
        model = torch.nn.Linear(1024, 512)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        if use_amp:
            model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
        for _ in range(500):
            loss = torch.nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            if use_amp:
                with amp.scale_loss(loss, optimizer) as scaled_loss:
                    scaled_loss.backward()
            else:
                loss.backward()
            optimizer.step()
        ends.append(loss.item())
    assert_close_to_largest(torch.tensor(ends[1]), torch.tensor(ends[0]), O1_REGRESSION)


def classifier():
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 3))


def loader(count=6):
    generator = torch.Generator().manual_seed(3)
    data = torch.randn(8, 3, 2, 2, generator=generator)
    target = torch.randint(0, 3, (8,), generator=generator)
    return [(data, target)] * count


SEEDED = "__import__('torch').manual_seed(2)\n"  # no scaled gradient is above 40,000
T3_MNIST = """
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from apex import amp


class Net(nn.Module):
    def __init__(self):
        super(Net, self).__init__()
        self.conv1 = nn.Conv2d(1, 10, kernel_size=5)
        self.conv2 = nn.Conv2d(10, 20, kernel_size=5)
        self.conv2_drop = nn.Dropout2d()
        self.fc1 = nn.Linear(320, 50)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, x):
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2_drop(self.conv2(x)), 2))
        x = x.view(-1, 320)
        x = F.relu(self.fc1(x))
        x = F.dropout(x, training=self.training)
        x = self.fc2(x)
        return F.log_softmax(x, dim=1)


def main(amp_handle):
    model = Net()
    optimizer = optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    model.train()
    for batch_idx in range(3):
        print("iteration")
        data, target = torch.randn(4, 1, 28, 28), torch.randint(0, 10, (4,))
        optimizer.zero_grad()
        output = model(data)
        loss = F.nll_loss(output, target)
        with amp_handle.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()


main(amp.init(verbose=True))
main(amp.init(enable=True, enable_caching=True, verbose=True))
main(amp.init(True, True, True))
print("iteration")
main(amp.init(enable=False, verbose=True))
"""


def test_t3_the_cast_log_on_standard_output():
    """Bare lines, with no logging set up, again at every iteration."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SEEDED + T3_MNIST],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    before, *iterations = done.stdout.split("iteration\n")
    assert before == ""
    counted = [collections.Counter(lines.splitlines()) for lines in iterations]
    casts = {"Float->Half (conv2d)": 5, "Float->Half (linear)": 4, "Half->Float (log_softmax)": 1}
    assert counted == [casts] * 9 + [{}] * 4


def test_t3_two_losses_and_one_optimizer():
    amp_handle = amp.init()
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    optimizer = amp_handle.wrap_optimizer(optimizer, num_loss=2)
    losses = []
    for data, target in loader(20):
        optimizer.zero_grad()
        output = model(data)
        loss1, loss2 = F.cross_entropy(output, target), output.float().square().mean()
        with optimizer.scale_loss(loss1) as scaled_loss:
            scaled_loss.backward(retain_graph=True)
        with optimizer.scale_loss(loss2) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        losses.append((loss1 + loss2).item())
    assert losses[-1] < losses[0]
    clean = {"loss_scale": 2.0**16, "unskipped": 20}
    assert [*amp.state_dict(optimizers=optimizer).values()] == [clean, clean]


def test_t3_several_optimizers():
    amp_handle = amp.init()
    generator = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    discriminator = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer_g = amp_handle.wrap_optimizer(torch.optim.Adam(generator.parameters(), lr=1e-2))
    optimizer_d = amp_handle.wrap_optimizer(
        torch.optim.Adam(discriminator.parameters(), lr=1e-2), num_loss=2
    )
    criterion, ones, zeros = nn.BCEWithLogitsLoss(), torch.ones(16, 1), torch.zeros(16, 1)
    before = [p.clone() for p in (*generator.parameters(), *discriminator.parameters())]
    for _ in range(5):
        optimizer_d.zero_grad()
        fake = generator(torch.randn(16, 4))
        with optimizer_d.scale_loss(criterion(discriminator(torch.randn(16, 2)), ones)) as loss:
            loss.backward()
        with optimizer_d.scale_loss(criterion(discriminator(fake.detach()), zeros)) as loss:
            loss.backward()
        optimizer_d.step()
        optimizer_g.zero_grad()
        with optimizer_g.scale_loss(criterion(discriminator(fake), ones)) as loss:
            loss.backward()
        optimizer_g.step()
    after = (*generator.parameters(), *discriminator.parameters())
    assert not any(map(torch.equal, before, after))
    assert [e["unskipped"] for e in amp.state_dict(optimizers=optimizer_g).values()] == [5] * 3


def test_t3_a_backend_of_ones_own():
    class Backend(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            assert x.dtype == weight.dtype == torch.float16
            ctx.save_for_backward(x, weight)
            return x * weight

        @staticmethod
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            return grad * weight, grad * x

    backend = types.SimpleNamespace(FRUBackend=lambda *args: Backend.apply(*args))

    @amp.half_function
    def fru(x, weight):
        return Backend.apply(x, weight)

    amp.register_half_function(backend, "FRUBackend")
    amp_handle = amp.init()
    weight = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    for function in (fru, backend.FRUBackend):
        optimizer.zero_grad()
        loss = function(torch.ones(4), weight).float().mean()
        with amp_handle.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        assert torch.equal(weight.grad, torch.full((4,), 0.25))
        optimizer.step()


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_t3_recurrent_networks(kind):
    amp_handle = amp.init()
    rnn, head = kind(4, 8), nn.Linear(8, 3)
    optimizer = torch.optim.Adam([*rnn.parameters(), *head.parameters()], lr=1e-2)
    x, y = torch.randn(5, 6, 4), torch.randint(0, 3, (6,))
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        out, _ = rnn(x)
        assert out.dtype == torch.float16
        loss = F.cross_entropy(head(out[-1]), y)
        with amp_handle.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_t5_autocast_clipping_and_scale_loss():
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    losses = []
    for data, target in loader(20):
        optimizer.zero_grad()
        with amp.autocast():
            output = model(data)
            loss = F.cross_entropy(output, target)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2


def test_t5_accumulation():
    accumulation_steps = 4
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    optimizer.zero_grad()
    batches = loader(10)
    for i, (data, target) in enumerate(batches):
        loss = F.cross_entropy(model(data), target) / accumulation_steps
        with amp.scale_loss(loss, optimizer, loss_id=0) as scaled_loss:
            scaled_loss.backward()
        if (i + 1) % accumulation_steps == 0 or i + 1 == len(batches):
            optimizer.step()
            optimizer.zero_grad()
    assert amp.state_dict()["loss_scaler0"]["unskipped"] == 3


def test_t5_torchs_own_scaler_at_o1():
    ends = []
    for use_amp in (True, False):
        torch.manual_seed(2)
        model = classifier()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler(
            "cpu", init_scale=2**10, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000
        )
        if use_amp:
            model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
        for data, target in loader():
            optimizer.zero_grad()
            with amp.autocast() if use_amp else torch.autocast("cpu", torch.float16):
                loss = F.cross_entropy(model(data).float(), target)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        ends.append([p.detach().clone() for p in model.parameters()])
        amp.reset()
    assert all(map(torch.equal, *ends))


def test_t5_forward_in_the_head_of_the_with_statement():
    model = classifier()
    optimizer = torch.optim.Adam(model.parameters())
    loss_function = nn.CrossEntropyLoss()
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    for data, target in loader():
        optimizer.zero_grad()
        with amp.scale_loss(loss_function(model(data), target), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    assert amp.state_dict()["loss_scaler0"]["unskipped"] == 6


def test_t5_clipping_printed_before_the_backward():
    """There it clips nothing at first, then what the last step has left: the run goes on."""
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    losses = []
    for data, target in loader(20):
        optimizer.zero_grad()
        with amp.autocast():
            loss = F.cross_entropy(model(data), target)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        assert norm == 0.0
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2


def by_norm(parameters, norm_type):
    torch.nn.utils.clip_grad_norm_(parameters, max_norm=0.1, norm_type=norm_type)


def by_parameter(parameters):
    for param in parameters:
        if param.grad is not None:
            torch.nn.utils.clip_grad_norm_(param, max_norm=0.1)


def by_value(parameters):
    torch.nn.utils.clip_grad_value_(parameters, clip_value=0.01)


def normalized(parameters):
    for param in parameters:
        if param.grad is not None:
            param.grad.data = param.grad.data / (param.grad.data.norm() + 1e-6)


TREATMENTS = {
    "norm 2": lambda parameters: by_norm(parameters, 2),
    "norm 1": lambda parameters: by_norm(parameters, 1.0),
    "norm inf": lambda parameters: by_norm(parameters, float("inf")),
    "each parameter": by_parameter,
    "value": by_value,
    "normalization": normalized,
}


@pytest.mark.parametrize("treat", TREATMENTS.values(), ids=TREATMENTS)
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
def test_t5_what_is_done_to_gradients_before_a_step(level, treat):
    model = classifier()
    hand = Hand(model, lambda params: torch.optim.SGD(params, lr=0.1), level)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    for data, target in loader(3):
        optimizer.zero_grad()
        with amp.scale_loss(F.cross_entropy(model(data), target), optimizer) as scaled_loss:
            scaled_loss.backward()
        treat(list(amp.master_params(optimizer)))
        optimizer.step()
        hand.zero_grad()
        hand.backward(hand.loss(data, target))
        treat(hand.params)
        hand.step()
    assert same(amp.master_params(optimizer), hand.params)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, 3)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(x + self.bn2(self.conv2(x)))
        return self.fc(torch.flatten(F.adaptive_avg_pool2d(x, (1, 1)), 1))


@pytest.mark.parametrize("level", LEVELS)
def test_t5_residual_network_with_adam(level):
    model = Residual()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-4)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    loss_function = nn.CrossEntropyLoss()
    losses = []
    for data, target in loader(10):
        optimizer.zero_grad()
        loss = loss_function(model(data), target)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    model.eval()
    with torch.no_grad():
        assert model(loader()[0][0]).argmax(1).shape == (8,)


@dataclasses.dataclass
class Output:
    """What a language model returns: its parts are attributes."""

    loss: torch.Tensor
    logits: torch.Tensor


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.classifier = nn.Linear(16, 2)

    def forward(self, input_ids, attention_mask=None, labels=None):
        hidden = self.layer(self.embedding(input_ids), src_key_padding_mask=attention_mask == 0)
        logits = self.classifier(hidden[:, 0])
        return Output(F.cross_entropy(logits.float(), labels), logits)


def sentences():
    input_ids = torch.randint(0, 20, (8, 6), generator=torch.Generator().manual_seed(5))
    return {
        "input_ids": input_ids,
        "attention_mask": torch.ones(8, 6, dtype=torch.int64),
        "labels": input_ids[:, 0] % 2,
    }


def language(make=lambda model: model):
    torch.manual_seed(4)
    model = make(Language())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 - n / 100)


@pytest.mark.parametrize("level", [None, "O0", "O1", "O4"])
def test_t5_language_model_under_autocast_with_a_scaler_and_a_scheduler(level):
    model, optimizer, scheduler = language()
    if level:
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    scaler = amp.GradScaler("cpu", init_scale=2**10)
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        with amp.autocast():
            outputs = model(**sentences())
            loss = outputs.loss
        assert outputs.logits.shape == (8, 2)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert optimizer.param_groups[0]["lr"] == 0.1 * (1 - 12 / 100)


def test_t5_half_model_with_torchs_scaler_is_refused_by_torch():
    """As printed: float16 weights, autocast, a scaler. torch unscales no float16 gradients."""
    model, optimizer, _ = language(nn.Module.half)
    scaler = amp.GradScaler("cpu", init_scale=2**10)
    with amp.autocast():
        loss = model(**sentences()).loss
    scaler.scale(loss).backward()
    with pytest.raises(ValueError, match="unscale FP16 gradients"):
        scaler.step(optimizer)


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_t5_half_model_that_is_initialised(level):
    """What the snippet is after: 16-bit weights, autocast, scaling, a scheduler."""
    model, optimizer, scheduler = language(nn.Module.half)
    with pytest.warns(UserWarning, match="in 16 bits already"):
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        with amp.autocast():
            outputs = model(**sentences())
        with amp.scale_loss(outputs.loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(outputs.loss.item())
    assert losses[-1] < losses[0]


def test_t5_bfloat16_model_under_autocast_with_a_scaler_and_a_scheduler():
    model, optimizer, scheduler = language(nn.Module.bfloat16)
    scaler = amp.GradScaler("cpu", init_scale=2**10)
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        with amp.autocast(dtype=torch.bfloat16):
            outputs = model(**sentences())
        scaler.scale(outputs.loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        losses.append(outputs.loss.item())
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_t5_looking_for_numbers_that_are_not_finite(level):
    """Weights, outputs and gradients, looked at in every step, and the scale beside them."""
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    seen = []
    for number, (data, target) in enumerate(loader(4)):
        optimizer.zero_grad()
        output = model(data)
        assert torch.isfinite(output).all()
        with amp.scale_loss(F.cross_entropy(output, target), optimizer) as scaled_loss:
            scaled_loss.backward()
            if number == 2:
                model[1].bias.grad[0] = float("nan")
        finite = all(bool(torch.isfinite(p.grad).all()) for p in amp.master_params(optimizer))
        optimizer.step()
        assert all(torch.isfinite(p).all() for p in model.parameters())
        seen.append((finite, amp.state_dict()["loss_scaler0"]["loss_scale"]))
    assert seen == [(True, 2.0**16)] * 2 + [(False, 2.0**15), (True, 2.0**15)]

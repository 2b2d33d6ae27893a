"""Known defects of the original that no other file here shows to be gone, one test each.

The whole table is in ``docs/compatibility.md``.
"""

import logging
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from apex import amp
from apex.amp import _speech
from tests.amp.training import batches, net, same

LEVELS = ["O0", "O1", "O2", "O3", "O4", "O5"]
HALF = {"O1": torch.float16, "O4": torch.bfloat16}


def start(level, model, **kwargs):
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return amp.initialize(model, optimizer, opt_level=level, verbosity=0, **kwargs)


@pytest.mark.parametrize("level", LEVELS)
def test_a_weight_unfrozen_later_steps_on_unscaled_gradients(level):
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    model.weight.requires_grad_(False)
    model, optimizer = start(level, model, loss_scale=64.0)
    model.weight.requires_grad_(True)
    with amp.scale_loss(model(torch.ones(1, 2)).sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert model.state_dict()["weight"].tolist() == [[-1.0, -1.0]]


def test_the_counter_of_a_static_scale_stands_still():
    model, optimizer = start("O2", nn.Linear(2, 2), loss_scale=2.0)
    for _ in range(3):
        with amp.scale_loss(model(torch.ones(1, 2)).sum(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        amp._amp_state.loss_scalers[0].update_scale()  # as programs do that check by themselves
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 2.0, "unskipped": 0}}


@pytest.mark.parametrize("level", HALF)
def test_a_weight_used_twice_gets_the_gradients_of_both_uses(level):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 3))

        def forward(self, x):
            return F.linear(F.linear(x, self.weight), self.weight)

    model, x = Tied(), torch.randn(4, 3)
    by_hand = model.weight.detach().clone().requires_grad_()
    half = by_hand.to(HALF[level])
    F.linear(F.linear(x.to(half.dtype), half), half).float().sum().backward()
    model, optimizer = start(level, model, loss_scale=1.0)
    for _ in range(2):  # the second pass has no stale cast to meet
        optimizer.zero_grad()
        with amp.scale_loss(model(x).float().sum(), optimizer) as scaled:
            scaled.backward()
        assert torch.equal(model.weight.grad, by_hand.grad)


@pytest.mark.parametrize("other", [torch.float32, torch.float16])
def test_double_meets_narrower_tensors_as_in_torch(other):
    x, y = torch.rand(3, dtype=torch.float64), torch.rand(3).to(other)
    calls = (torch.add, torch.mul, torch.atan2, torch.ge, torch.Tensor.__truediv__)
    expected = [call(x, y) for call in calls] + [torch.cat([x, y])]
    start("O1", nn.Linear(1, 1))
    got = [call(x, y) for call in calls] + [torch.cat([x, y])]
    assert [t.dtype for t in got] == [t.dtype for t in expected]
    assert same(got, expected)


@pytest.mark.parametrize("level", HALF)
def test_prelu_and_bilinear_layers_meet_their_float32_weights(level):
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.prelu, self.bilinear = nn.PReLU(), nn.Bilinear(2, 2, 3)

        def forward(self, x):
            x = self.prelu(x)
            return x.dtype, self.bilinear(x, x)

    model, optimizer = start(level, Both())
    dtype, out = model(torch.randn(4, 2, dtype=HALF[level]))
    assert dtype == HALF[level]
    with amp.scale_loss(out.float().sum(), optimizer) as scaled:
        scaled.backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.any() for p in model.parameters())


IN_PLACE = {  # with arguments that each takes
    **dict.fromkeys(("acos_", "asin_", "cosh_", "exp_", "expm1_", "log_", "log10_", "log2_"), ()),
    **dict.fromkeys(("reciprocal_", "rsqrt_", "sinh_", "tan_", "erfinv_"), ()),
    "pow_": (2,),
    "__ipow__": (2,),
    "cumprod_": (0,),
    "cumsum_": (0,),
    "renorm_": (2, 0, 1.0),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("begin", [lambda: start("O1", nn.Linear(1, 1)), amp.init])
def test_in_place_functions_of_the_float_list_are_refused_on_16_bit_tensors(begin, dtype):
    x = torch.rand(3, 3).to(dtype) * 0.8 + 0.1
    plain = {name: getattr(x.clone(), name)(*args) for name, args in IN_PLACE.items()}
    begin()
    for name, args in IN_PLACE.items():
        method = "pow" if name == "__ipow__" else name.removesuffix("_")
        for space in (torch.Tensor, torch):
            function, target = getattr(space, name, None), x.clone()
            if function is None:
                continue
            with pytest.raises(NotImplementedError, match=rf"Write x = x\.{method}\(\.\.\.\)"):
                function(target, *args)
            assert torch.equal(target, x)
            wide = x.float()
            assert function(wide, *args) is wide
            with amp.disable_casts():
                assert torch.equal(function(target, *args), plain[name])
            with torch.autocast("cpu", dtype=dtype):  # the program's own
                assert torch.equal(function(x.clone(), *args), plain[name])


@pytest.mark.parametrize("level", ["O0", "O2", "O3", "O4", "O5"])
def test_in_place_functions_of_the_float_list_are_taken_elsewhere(level):
    start(level, nn.Linear(1, 1))
    for x in (torch.rand(3).half(), torch.rand(3).bfloat16()):
        assert x.exp_() is x


def test_in_place_functions_of_an_edited_float_list():
    x = torch.rand(3).half()
    for names in (amp.lists.torch_overrides.FP32_FUNCS, amp.lists.tensor_overrides.FP32_FUNCS):
        names.remove("exp")
    try:
        start("O1", nn.Linear(1, 1))
    finally:
        amp.lists.torch_overrides.FP32_FUNCS.append("exp")
        amp.lists.tensor_overrides.FP32_FUNCS.append("exp")
    assert x.exp_() is x
    with pytest.raises(NotImplementedError):
        x.log_()


def test_in_place_functions_are_refused_in_a_model_and_not_in_derivatives():
    class InPlace(nn.Linear):
        def forward(self, x):
            return super().forward(x).exp_()

    model, _ = start("O1", InPlace(2, 2))
    for casts in (lambda: start("O2", nn.Linear(1, 1)), lambda: start("O4", nn.Linear(1, 1))):
        casts()
        with pytest.raises(NotImplementedError, match="exp_ on a torch.float16 tensor"):
            model(torch.ones(1, 2))
    start("O1", nn.Linear(1, 1))
    with amp.disable_casts():
        x = torch.rand(4, requires_grad=True)
        norm = x.half().norm(p=3)  # its derivative calls pow_ on a float16 tensor
    norm.backward()
    assert torch.isfinite(x.grad).all()


@pytest.mark.parametrize("level", LEVELS)
def test_no_gpu_and_no_cudnn_is_needed(level):
    with torch.backends.cudnn.flags(enabled=False):
        model, optimizer = start(level, nn.Linear(2, 2))
        with amp.scale_loss(model(torch.ones(1, 2)).float().sum(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    assert model.weight.device.type == "cpu"


def test_a_custom_function_is_annotated_in_torchs_way_or_in_ours():
    class Strict(torch.autograd.Function):
        """Refuses mixed types, as compiled kernels do."""

        @staticmethod
        def forward(ctx, x, weight):
            if x.dtype != weight.dtype:
                raise TypeError(f"{x.dtype} {weight.dtype}")
            return x @ weight

        @staticmethod
        def backward(ctx, grad):
            return grad, None

    class Torchs(Strict):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
        def forward(ctx, x, weight):
            return Strict.forward(ctx, x, weight)

        @staticmethod
        @torch.amp.custom_bwd(device_type="cpu")
        def backward(ctx, grad):
            return grad, None

    weight, x = torch.randn(3, 3), torch.randn(2, 3).half()
    start("O1", nn.Linear(1, 1))
    with pytest.raises(TypeError, match="float16"):
        Strict.apply(x, weight)
    assert Torchs.apply(x, weight).dtype == torch.float32
    assert amp.half_function(Strict.apply)(x, weight).dtype == torch.float16
    assert amp.float_function(Strict.apply)(x, weight).dtype == torch.float32


def test_o1_wraps_ten_functions_of_torch_and_leaves_the_rest_alone():
    recompute = torch.utils.checkpoint
    spaces = (torch, F, torch.Tensor, torch.nn.modules.rnn._VF)
    spaces += (recompute, recompute.CheckpointFunction)
    before = {(space, name): value for space in spaces for name, value in vars(space).items()}
    start("O1", nn.Linear(1, 1))
    after = {(space, name): value for space in spaces for name, value in vars(space).items()}
    changed = {key for key, value in after.items() if before.get(key) is not value}
    assert changed == {
        (F, "binary_cross_entropy"),
        (F, "grid_sample"),
        (F, "interpolate"),
        (F, "local_response_norm"),
        (F, "multilabel_soft_margin_loss"),
        (torch, "matrix_exp"),
        (torch.Tensor, "cpu"),
        (torch.Tensor, "matrix_exp"),
        (recompute, "_checkpoint_without_reentrant_generator"),
        (recompute.CheckpointFunction, "forward"),
    }


def test_backward_functions_written_in_python_are_not_cast():
    seen = []

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            seen.append((x @ x).dtype)
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            seen.append((grad @ grad).dtype)
            return grad

    class Model(nn.Linear):
        def forward(self, x):
            return Product.apply(super().forward(x).float())

    model, optimizer = start("O1", Model(2, 2))
    with amp.scale_loss(model(torch.ones(2, 2)).sum(), optimizer) as scaled:
        scaled.backward()
    assert seen == [torch.float16, torch.float32]


def test_only_rank_0_speaks_of_casts_and_overflows(monkeypatch, capsys):
    monkeypatch.setattr(_speech, "logger", logging.Logger("apex.amp"))  # without pytest's handlers

    def spoken():
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        amp.initialize(model, optimizer, opt_level="O1", verbosity=2)
        with amp.scale_loss(model(torch.ones(1, 2)).sum(), optimizer) as scaled:
            scaled.backward()
            model.weight.grad.fill_(math.nan)
        optimizer.step()
        return capsys.readouterr().out

    monkeypatch.setattr(_speech, "is_rank0", lambda: False)
    assert spoken() == ""
    monkeypatch.setattr(_speech, "is_rank0", lambda: True)
    text = spoken()
    assert "Float->Half (linear)" in text
    assert text.count("Gradient overflow") == 1


def test_o0_is_plain_torch():
    ends = []
    for use_amp in (False, True):
        model = net()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        ((x, y),) = batches(1)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        moments = [slots["exp_avg"] for slots in optimizer.state.values()]
        if use_amp:
            amp.initialize(model, optimizer, opt_level="O0", verbosity=0)
        now = [slots["exp_avg"] for slots in optimizer.state.values()]
        assert all(a is b for a, b in zip(moments, now, strict=True))
        assert not any(module._state_dict_hooks for module in model.modules())
        for x, y in batches(3):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            if use_amp:
                with amp.scale_loss(loss, optimizer) as scaled:
                    assert scaled is loss
                    scaled.backward()
            else:
                loss.backward()
            optimizer.step()
        ends.append([*model.state_dict().values(), *[p.grad for p in model.parameters()]])
    assert same(*ends)


def test_the_text_on_batchnorm_at_o1_says_what_is_the_case():
    with pytest.raises(RuntimeError, match=r"batchnorm's weights are float32 there anyway"):
        start("O1", nn.BatchNorm1d(2), keep_batchnorm_fp32=True)
    model, _ = start("O1", nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    assert model[1].weight.dtype == torch.float32
    assert model(torch.randn(4, 2)).dtype == torch.float16  # its outputs follow its input


def test_bounds_hold_from_the_start_and_for_a_loaded_scale():
    model, _ = start("O2", nn.Linear(2, 2), min_loss_scale=2.0**18, max_loss_scale=2.0**20)
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 2.0**18
    for saved, taken in ((4.0, 2.0**18), (2.0**24, 2.0**20), (2.0**19, 2.0**19)):
        amp.load_state_dict({"loss_scaler0": {"loss_scale": saved, "unskipped": 0}})
        assert amp.state_dict()["loss_scaler0"]["loss_scale"] == taken


@pytest.mark.gpu
@pytest.mark.parametrize("poisoned", ["cpu", "cuda", None])
def test_a_model_on_two_devices(poisoned):
    class Split(nn.Module):
        def __init__(self):
            super().__init__()
            self.cpu, self.cuda = nn.Linear(2, 2), nn.Linear(2, 2, device="cuda")

        def forward(self, x):
            return self.cuda(self.cpu(x).cuda())

    model, optimizer = start("O2", Split(), init_scale=8.0)
    before = [p.clone() for p in model.parameters()]
    with amp.scale_loss(model(torch.ones(1, 2)).sum(), optimizer) as scaled:
        scaled.backward()
        if poisoned:
            getattr(model, poisoned).weight.grad.fill_(math.inf)
    optimizer.step()
    assert same(before, model.parameters()) == bool(poisoned)
    expected = 4.0 if poisoned else 8.0
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == expected


@pytest.fixture
def _group():
    distributed = torch.distributed
    if not distributed.is_available():
        pytest.skip("this torch has no torch.distributed")
    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("_group")
@pytest.mark.parametrize("level", LEVELS)
def test_accumulation_with_gradients_that_are_views_of_ddps_buckets(level):
    ends = []
    for view in (False, True):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = amp.initialize(
            model, optimizer, opt_level=level, loss_scale=128.0, verbosity=0
        )
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=view)
        for _ in range(2):
            optimizer.zero_grad()
            for x, y in batches(3):
                with amp.scale_loss(F.cross_entropy(model(x), y), optimizer) as scaled:
                    scaled.backward()
            optimizer.step()
        ends.append([p.detach().clone() for p in amp.master_params(optimizer)])
        amp.reset()
    assert same(*ends)

"""apex.contrib.sparsity: masks against brute force, and training that stays sparse."""

import copy
import itertools
import logging
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from apex import amp
from apex.catalogue.optimizers import makers
from apex.contrib.sparsity import ASP, create_mask, sparse_masklib
from apex.contrib.sparsity.asp import ASPError, eligible_modules
from apex.fp16_utils import FP16_Optimizer
from apex.optimizers import FusedAdam
from tests.checkpoints import assert_equal

MASK = "__weight_mma_mask"


@pytest.fixture(autouse=True)
def anew():
    ASP.reset()
    amp.reset()
    yield
    ASP.reset()
    amp.reset()


# -- masks -----------------------------------------------------------------------------------------


def whole_numbers(*shape, largest=3):
    """Magnitudes with many ties, whose sums are exact."""
    return torch.randint(-largest, largest + 1, shape).float()


def best(values, choices):
    """The choice (tuples of 0 and 1) with the largest sum; of equal ones the first."""
    sums = [sum(abs(v) for v, kept in zip(values, one, strict=True) if kept) for one in choices]
    return list(choices[sums.index(max(sums))])


def choices_1d(m, n):
    kept = itertools.combinations(range(m), n)
    return [tuple(int(i in some) for i in range(m)) for some in kept]


@pytest.mark.parametrize(("m", "n", "columns"), [(4, 2, 12), (4, 2, 10), (6, 1, 6), (3, 2, 9)])
def test_1d_masks_keep_the_largest_sum(m, n, columns):
    matrix = whole_numbers(7, columns)
    mask = sparse_masklib.mn_1d_best(matrix, m, n)
    padded = F.pad(matrix, (0, -columns % m))
    for row, found in zip(padded.tolist(), mask.tolist(), strict=True):
        groups = [row[i : i + m] for i in range(0, len(row), m)]
        assert found == sum((best(group, choices_1d(m, n)) for group in groups), [])[:columns]


def test_magnitudes_are_compared_and_not_rounded_sums():
    assert create_mask(torch.tensor([2.0**25, 1.0, 1.5, 0.0])).tolist() == [1, 0, 1, 0]
    odd = torch.tensor([1.0, float("nan"), 2.0, -float("inf")])
    assert create_mask(odd).tolist() == [0, 1, 0, 1]
    half = torch.tensor([60000.0, -60000.0, 60000.0, 50000.0], dtype=torch.float16)
    assert create_mask(half).tolist() == [1, 1, 0, 0]


def blocks_of(matrix):
    padded = F.pad(matrix, (0, -matrix.shape[1] % 4, 0, -matrix.shape[0] % 4))
    for top, left in itertools.product(*(range(0, size, 4) for size in padded.shape)):
        yield top, left, padded[top : top + 4, left : left + 4].flatten().tolist()


@pytest.mark.parametrize("shape", [(8, 12), (6, 7)])
def test_2d_best_masks_keep_the_largest_sum(shape):
    rows = choices_1d(4, 2)
    choices = [sum(some, ()) for some in itertools.product(rows, repeat=4)]
    choices = [one for one in choices if all(sum(one[i::4]) == 2 for i in range(4))]
    patterns = sparse_masklib.compute_valid_2d_patterns(4, 2)
    assert patterns.flatten(1).tolist() == [list(one) for one in choices]
    matrix = whole_numbers(*shape, largest=9)
    mask = sparse_masklib.m4n2_2d_best(matrix, 0.5)
    for top, left, values in blocks_of(matrix):
        part = mask[top : top + 4, left : left + 4]
        expected = torch.tensor(best(values, choices)).view(4, 4)
        assert torch.equal(part, expected[: part.shape[0], : part.shape[1]].int())


def test_2d_greedy_masks_take_the_largest_that_fits():
    matrix = whole_numbers(8, 9, largest=6)
    mask = sparse_masklib.m4n2_2d_greedy(matrix, 0.5)
    for top, left, values in blocks_of(matrix):
        kept = torch.zeros(4, 4, dtype=torch.int32)
        for entry in sorted(range(16), key=lambda i: -abs(values[i])):  # stable
            row, column = divmod(entry, 4)
            if kept[row].sum() < 2 and kept[:, column].sum() < 2:
                kept[row, column] = 1
        part = mask[top : top + 4, left : left + 4]
        assert torch.equal(part, kept[: part.shape[0], : part.shape[1]])


@pytest.mark.parametrize("pattern", ["m4n2_1d", "m4n2_2d_greedy", "m4n2_2d_best"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_kernels_of_convolutions_are_pruned_along_input_channels(pattern, dtype):
    for kernel in ((), (3,), (3, 2), (1, 2, 2)):
        weight = torch.randn(8, 12, *kernel).to(dtype)
        mask = create_mask(weight, pattern)
        assert (mask.dtype, mask.shape, mask.is_contiguous()) == (dtype, weight.shape, True)
        for place in itertools.product(*map(range, kernel)):
            at = (slice(None), slice(None), *place)
            assert torch.equal(mask[at], create_mask(weight[at].contiguous(), pattern))
        groups = mask.movedim(1, -1).reshape(-1, 4).sum(1)
        assert (groups <= 2).all() if "greedy" in pattern else (groups == 2).all()


def test_small_helpers():
    assert sparse_masklib.fill(torch.tensor([[0.0, 2.0], [1.0, 0.0]])) == 0.5
    patterns = sparse_masklib.compute_valid_1d_patterns(4, 2)
    assert patterns.tolist() == [list(map(float, one)) for one in choices_1d(4, 2)]
    groups, shape = sparse_masklib.reshape_1d(torch.ones(2, 5), 4)
    assert (groups.sum(1).tolist(), shape) == ([4.0, 1.0, 4.0, 1.0], (2, 8))
    for pattern in ("m4n2_1d", "m4n2_2d_greedy", "m4n2_2d_best"):
        assert create_mask(torch.ones(0, 8), pattern).shape == (0, 8)
        assert create_mask(torch.ones(8, 0, 3), pattern).shape == (8, 0, 3)


def test_masks_refuse_what_they_cannot_do():
    for bad in (
        lambda: create_mask(torch.ones(4), "m8n4_1d"),
        lambda: create_mask(torch.ones(4), density=0.25),
        lambda: create_mask(torch.tensor(1.0)),
    ):
        with pytest.raises(ValueError, match="allowed are m4n2_1d, m4n2_2d_best, m4n2_2d_greedy"):
            bad()
    with pytest.raises(ValueError, match=r"shape \[4\]; it must be a matrix"):
        sparse_masklib.mn_1d_best(torch.ones(4), 4, 2)


# -- training --------------------------------------------------------------------------------------


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 16), nn.ReLU(), nn.Linear(16, 3)
    )


def loss_of(model, number):
    inputs = torch.randn(8, 32, generator=torch.Generator().manual_seed(number))
    dtype = next(model.parameters()).dtype
    with torch.autocast("cpu", enabled=False):
        return model(inputs.to(dtype)).float().pow(2).mean()


def masks_of(model):
    return {name: one for name, one in model.named_buffers() if name.endswith(MASK)}


def assert_sparse(model, count=2):
    masks = masks_of(model)
    assert len(masks) == count
    for name, mask in masks.items():
        weight = model.get_parameter(name.replace(MASK, "weight"))
        assert (mask.movedim(1, -1).reshape(-1, 4).sum(1) == 2).all()
        assert (weight[~mask] == 0).all()
        assert (weight[mask] != 0).all()


def prune(model, optimizer, **options):
    ASP.init_model_for_pruning(model, verbosity=0, **options)
    ASP.init_optimizer_for_pruning(optimizer)
    ASP.compute_sparse_masks()


OPTIMIZERS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.01),
    **makers(lr=0.01, weight_decay=0.1),
}
optimizers = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())


@optimizers
def test_steps_are_those_of_masked_gradients_and_weights(make):
    """Bit for bit those of a program that multiplies by the masks itself."""
    model, other = network(), network()
    optimizer, plain = make(model.parameters()), make(other.parameters())
    for one, stepped in ((model, optimizer), (other, plain)):  # so that there is momentum
        loss_of(one, 0).backward()
        stepped.step()
    prune(model, optimizer, allow_permutation=False)
    masks = {other.get_parameter(k.replace(MASK, "weight")): v for k, v in masks_of(model).items()}
    for number in range(4):
        with torch.no_grad():
            for weight, mask in masks.items():
                weight.mul_(mask)
        for one, stepped in ((model, optimizer), (other, plain)):
            stepped.zero_grad()
            loss_of(one, number).backward()
        for weight, mask in masks.items():
            weight.grad.mul_(mask)
        optimizer.step()
        plain.step()
    assert_sparse(model)
    with torch.no_grad():
        for weight, mask in masks.items():
            weight.mul_(mask)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


def test_gradients_of_a_closure_are_masked():
    """Whatever the argument is called, and whatever else a step takes."""

    class Scaled(torch.optim.SGD):
        def step(self, function=None, scale=1.0):
            self.scale = scale
            return super().step(function)

    model = network()
    optimizer = Scaled(model.parameters(), lr=0.1, momentum=0.9)
    prune(model, optimizer)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, 0)
        loss.backward()
        return loss

    assert optimizer.step(closure, 2.0) > 0
    assert optimizer.scale == 2.0
    assert torch.optim.SGD.step(optimizer, closure=closure) > 0
    mask = model[0].get_buffer(MASK)
    assert (optimizer.state[model[0].weight]["momentum_buffer"][~mask] == 0).all()
    assert_sparse(model)


@pytest.mark.parametrize("keep", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))])
def test_a_copy_of_a_pruned_model_stays_sparse(keep):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss_of(model, 9).backward()
    optimizer.step()
    prune(model, optimizer, allow_recompute_mask=True)
    expected = copy.deepcopy(model.state_dict())
    model, optimizer = keep((model, optimizer))
    ASP.reset()
    ASP.init_model_for_pruning(model, verbosity=0, allow_recompute_mask=True)
    ASP.init_optimizer_for_pruning(optimizer)
    assert ASP.is_sparsity_enabled()
    assert_equal(model.state_dict(), expected)
    loss_of(model, 0).backward()
    optimizer.step()
    assert_sparse(model)


def amp_model(level, make, first="model"):
    model = network()
    optimizer = make(model.parameters())
    if first == "ASP":
        prune(model, optimizer)
    options = {} if level == "O1" else {"cast_model_type": torch.bfloat16}
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0, **options
    )
    if first == "model":
        amp_steps(model, optimizer, [9])  # momentum of weights that will be pruned
        prune(model, optimizer)
    return model, optimizer


def amp_steps(model, optimizer, numbers):
    for number in numbers:
        optimizer.zero_grad()
        inputs = torch.randn(8, 32, generator=torch.Generator().manual_seed(number))
        with amp.scale_loss(model(inputs).float().pow(2).mean(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()


@pytest.mark.parametrize("first", ["model", "ASP"])
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("name", ["SGD", "FusedAdam"])
def test_masters_of_amp_are_masked_too(name, level, first):
    model, optimizer = amp_model(level, OPTIMIZERS[name], first)
    assert_sparse(model)
    before = copy.deepcopy(model.state_dict())
    amp_steps(model, optimizer, range(3))
    assert_sparse(model)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for master, (key, weight) in zip(params, model.named_parameters(), strict=True):
        assert torch.equal(master.to(weight.dtype), weight)
        assert not torch.equal(weight, before[key])
        if key.replace("weight", MASK) in masks_of(model):
            mask = model.get_buffer(key.replace("weight", MASK))
            assert (master[~mask] == 0).all()
            slot = "momentum_buffer" if name == "SGD" else "exp_avg"
            assert (optimizer.state[master][slot][~mask] == 0).all() == (first == "ASP")


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_a_resumed_run_is_bit_for_bit_the_same(level):
    def start():
        if level == "O2":
            return amp_model(level, OPTIMIZERS["FusedAdam"])
        model = network()
        optimizer = FusedAdam(model.parameters(), lr=0.01)
        prune(model, optimizer)
        return amp.initialize(model, optimizer, opt_level=level, verbosity=0)

    model, optimizer = start()
    amp_steps(model, optimizer, range(2))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), amp.state_dict()))
    assert [key for key in saved[0] if "mma" in key] == [f"0.{MASK}", f"2.{MASK}"]
    amp_steps(model, optimizer, range(2, 4))
    expected = copy.deepcopy(model.state_dict())
    ASP.reset()
    amp.reset()

    torch.manual_seed(1)
    model = network(seed=7)
    optimizer = FusedAdam(model.parameters(), lr=0.01)
    ASP.init_model_for_pruning(model, verbosity=0)
    ASP.init_optimizer_for_pruning(optimizer)
    options = {} if level == "O0" else {"cast_model_type": torch.bfloat16, "loss_scale": "dynamic"}
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
    assert not ASP.is_sparsity_enabled()
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    amp.load_state_dict(saved[2])
    assert ASP.is_sparsity_enabled()
    amp_steps(model, optimizer, range(2, 4))
    assert_equal(model.state_dict(), expected)
    with pytest.raises(ASPError, match=r"0::weight .* is pruned already"):
        ASP.compute_sparse_masks()


def test_fp16_optimizers_masters_are_masked():
    model = network().half()
    optimizer = FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), verbose=False)
    prune(model, optimizer)
    for number in range(2):
        optimizer.zero_grad()
        optimizer.backward(loss_of(model, number))
        optimizer.step()
    assert_sparse(model)
    masks = list(masks_of(model).values())
    for master, mask in zip(optimizer.fp32_from_fp16_groups[0][0:3:2], masks, strict=True):
        assert (master[~mask] == 0).all()


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"master_weights": True, "capturable": True}, "master_param"),
        ({"storage": "low_bits"}, "low_bits"),
    ],
)
def test_what_fused_optimizers_keep_beside_a_weight_is_masked_and_not_lost(options, key):
    model = network().bfloat16()
    optimizer = FusedAdam(model.parameters(), lr=1e-3, **options)
    loss_of(model, 9).backward()
    optimizer.step()
    prune(model, optimizer)
    for number in range(3):
        optimizer.zero_grad()
        loss_of(model, number).backward()
        optimizer.step()
        beside = [optimizer.state[model[0].weight][key].clone()]
    assert_sparse(model)
    mask = model[0].get_buffer(MASK)
    assert (beside[0][~mask] == 0).all()
    optimizer.zero_grad()
    for param in model.parameters():  # a step of nothing: low bits are kept over it
        param.grad = torch.zeros_like(param)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    assert torch.equal(optimizer.state[model[0].weight][key], beside[0])
    assert (beside[0][mask] != 0).float().mean() > 0.9


def test_steps_of_a_grad_scaler():
    model = network()
    optimizer = FusedAdam(model.parameters(), lr=0.01)
    prune(model, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
    for number in range(3):
        optimizer.zero_grad()
        loss = loss_of(model, number) * (float("inf") if number == 1 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert_sparse(model)
    assert scaler.get_scale() == 2.0**3


# -- which layers, and what can be undone ----------------------------------------------------------


class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside = nn.ModuleList([nn.Bilinear(2, 2, 2)])
        self.matrix = nn.Parameter(torch.randn(16, 32))
        self.inside[0].weight = nn.Parameter(torch.randn(8, 16, 2))


def test_convolutions_attention_and_layers_of_ones_own():
    model = nn.ModuleDict(
        {
            "conv": nn.Conv2d(16, 8, 3),
            "deep": nn.Conv3d(32, 8, 2),
            "few": nn.Conv1d(8, 8, 3),
            "grouped": nn.Conv1d(32, 8, 3, groups=2),
            "frozen": nn.Linear(16, 8).requires_grad_(False),
            "attention": nn.MultiheadAttention(32, 2),
            "other": nn.MultiheadAttention(32, 2, kdim=48, vdim=16),
            "own": Custom(),
        }
    )
    names = {Custom: ["matrix", "inside.0.weight"]}
    ASP.init_model_for_pruning(model, verbosity=0, custom_layer_dict=names)
    ASP.compute_sparse_masks()
    assert ASP.is_sparsity_enabled()
    masks = {key: mask for key, mask in model.named_buffers() if key.endswith("_mma_mask")}
    assert list(masks) == [
        "conv.__weight_mma_mask",
        "deep.__weight_mma_mask",
        "grouped.__weight_mma_mask",
        "attention.__in_proj_weight_mma_mask",
        "attention.out_proj.__weight_mma_mask",
        "other.__q_proj_weight_mma_mask",
        "other.__k_proj_weight_mma_mask",
        "other.__v_proj_weight_mma_mask",
        "other.out_proj.__weight_mma_mask",
        "own.__matrix_mma_mask",
        "own.__inside_0_weight_mma_mask",
    ]
    for key, mask in masks.items():
        name = key.replace("__", "").replace("_mma_mask", "").replace("inside_0_", "inside.0.")
        weight = model.get_parameter(name)
        assert torch.equal(weight != 0, mask)
        assert (mask.movedim(1, -1).reshape(-1, 4).sum(1) == 2).all()


def test_layers_are_chosen_by_class_and_name():
    model = network()
    assert [n for n, _ in eligible_modules(model, (nn.Linear,), ["0", "4"], ["4"])] == ["0"]
    ASP.init_model_for_pruning(model, verbosity=0, disallowed_layer_names=["0"])
    assert list(masks_of(model)) == [f"2.{MASK}"]
    ASP.reset()
    assert masks_of(model) == {}
    ASP.init_model_for_pruning(model, verbosity=0, allowed_layer_names=["0"])
    assert list(masks_of(model)) == [f"0.{MASK}"]


def test_notices(capsys, caplog, monkeypatch):
    with caplog.at_level("INFO", logger="apex.sparsity"):
        ASP.init_model_for_pruning(network(), allow_permutation=False)
    assert "[ASP] skipped 4::weight: its shape [3, 16] is not a multiple of 8" in caplog.text
    assert "[ASP] will prune 0::weight of size=[48, 32] and type=torch.float32" in caplog.text
    monkeypatch.setattr(logging.getLogger("apex.sparsity"), "hasHandlers", lambda: False)
    ASP.compute_sparse_masks()
    assert "[ASP] 50.00% of 2::weight of size=[16, 48]" in capsys.readouterr().out
    ASP.reset()
    caplog.clear()
    prune(network(), torch.optim.SGD([torch.ones(1)], lr=0.1))
    assert (capsys.readouterr().out, caplog.messages) == ("", [])


def test_pruned_weights_are_restored_bit_for_bit():
    model = network()
    with torch.no_grad():
        model[0].weight[0, :4] = torch.tensor([1.0, -0.0, 2.0, 0.0])
    ASP.init_model_for_pruning(model, verbosity=0, allow_recompute_mask=True)
    before = copy.deepcopy(model.state_dict())
    for _ in range(2):
        ASP.compute_sparse_masks()
        ASP.compute_sparse_masks()
        assert ASP.is_sparsity_enabled()
        ASP.restore_pruned_weights()
        assert not ASP.is_sparsity_enabled()
    order = None  # inputs of layer 2 were permuted once
    for key, value in model.state_dict().items():
        if key in ("0.weight", "2.weight"):
            rows = value if key == "0.weight" else value.t()
            olds = before[key] if key == "0.weight" else before[key].t()
            order = torch.cdist(olds, rows).argmin(1) if order is None else order
            assert torch.equal(rows[order].view(torch.int32), olds.contiguous().view(torch.int32))


def test_masks_are_computed_again_from_all_weights():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prune(model, optimizer, allow_recompute_mask=True)
    weight, bias, first = model[0].weight, model[0].bias.clone(), model[0].get_buffer(MASK).clone()
    with torch.no_grad():
        weight[first] *= 1e-9
        model[2].weight.normal_()
    ASP.compute_sparse_masks()
    assert torch.equal(model[0].get_buffer(MASK), ~first)
    assert torch.equal(model[0].bias, bias)  # channels were permuted the first time alone
    loss_of(model, 0).backward()
    optimizer.step()
    ASP.restore_pruned_weights()
    assert (weight != 0).all()


def test_restored_weights_reach_the_masters():
    model, optimizer = amp_model("O2", OPTIMIZERS["SGD"])
    ASP.reset()
    prune(model, optimizer, allow_recompute_mask=True)
    with torch.no_grad():
        pruned = model[2].get_buffer("__weight_mma_pruned_p").clone()
    amp_steps(model, optimizer, [0])
    ASP.restore_pruned_weights()
    optimizer.param_groups[0].update(lr=0.0, weight_decay=0.0)
    amp_steps(model, optimizer, [1])
    mask = pruned != 0
    assert torch.equal(model[2].weight[mask], pruned[mask])


def test_any_function_may_compute_masks():
    def every_second(weight):
        return torch.arange(weight.numel()).view_as(weight) % 2 == 0

    model = network()
    ASP.init_model_for_pruning(model, every_second, verbosity=0)
    ASP.compute_sparse_masks()
    assert (model[0].weight[:, 1::2] == 0).all()
    assert (model[0].weight[:, ::2] != 0).all()
    ASP.reset()
    ASP.init_model_for_pruning(model, lambda weight: weight[0], verbosity=0)
    with pytest.raises(ValueError, match=r"mask of shape \[32\] for 0::weight"):
        ASP.compute_sparse_masks()


def test_order_of_calls():
    assert issubclass(ASPError, AssertionError)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for call in (
        ASP.compute_sparse_masks,
        ASP.restore_pruned_weights,
        ASP.is_sparsity_enabled,
        lambda: ASP.init_optimizer_for_pruning(optimizer),
    ):
        with pytest.raises(ASPError, match=r"before ASP\.init_model_for_pruning"):
            call()
    assert not ASP.already_init_asp_model()
    ASP.prune_trained_model(model, optimizer)
    assert ASP.already_init_asp_model()
    with pytest.raises(
        ASPError, match=r"has a model already, and supports only one in a process\. Call"
    ):
        ASP.init_model_for_pruning(model)
    with pytest.raises(ASPError, match="has an optimizer already"):
        ASP.init_optimizer_for_pruning(optimizer)
    ASP.reset()
    ASP.init_model_for_pruning(model, verbosity=0)
    ASP.compute_sparse_masks()
    ASP.init_optimizer_for_pruning(optimizer)  # has no state that would not fit
    with pytest.raises(ASPError, match=r"To restore pruned weights, .* allow_recompute_mask=True"):
        ASP.restore_pruned_weights()
    model[0].get_buffer(MASK).fill_(True)
    with pytest.raises(ASPError, match="1 of 2 weights are not pruned, such as 0::weight"):
        ASP.is_sparsity_enabled()
    ASP.reset()
    loss_of(model, 0).backward()
    optimizer.step()
    assert (model[0].weight != 0).all()
    ASP.prune_trained_model(model, optimizer)


def test_permuted_weights_do_not_meet_a_state_that_was_not():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss_of(model, 0).backward()
    optimizer.step()
    ASP.init_model_for_pruning(model, verbosity=0)
    ASP.compute_sparse_masks()
    with pytest.raises(ASPError, match="Call init_optimizer_for_pruning before compute_sparse_m"):
        ASP.init_optimizer_for_pruning(optimizer)
    ASP.reset()
    ASP.init_model_for_pruning(model, verbosity=0, allow_permutation=False)
    ASP.compute_sparse_masks()
    ASP.init_optimizer_for_pruning(optimizer)


def test_bad_arguments_change_nothing(tmp_path):
    model = network()
    for error, text, options in (
        (TypeError, "model was a str", {"model": "network"}),
        (ValueError, "pattern was 'm2n1'", {"mask_calculator": "m2n1"}),
        (ValueError, "contains ReLU, whose parameters", {"whitelist": [nn.Linear, nn.ReLU]}),
        (ValueError, "no parameter 'scale'", {"custom_layer_dict": {nn.Linear: ["scale"]}}),
        (TypeError, "mask_calculator was None", {"mask_calculator": None}),
        (TypeError, "names of layers were one string", {"allowed_layer_names": "10"}),
    ):
        with pytest.raises(error, match=text):
            ASP.init_model_for_pruning(**{"model": model, "verbosity": 0, **options})
        assert not ASP.already_init_asp_model()
    with pytest.raises(TypeError, match="must be a torch.optim.Optimizer"):
        ASP.prune_trained_model(model, "SGD")
    assert not ASP.already_init_asp_model()
    assert masks_of(model) == {}
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        ASP.set_permutation_saving_params(True, True, str(tmp_path / "file"))

"""FusedMuon: torch.optim.Muon's numbers, stacks, groups, states, and shards on four ranks."""

import copy

import pytest
import torch

from apex import amp
from apex.catalogue.optimizers import Step, muon
from apex.ops.lists.storage import join_bits
from apex.ops.updates import newton_schulz as middle
from apex.optimizers import FusedAdam, FusedMuon, _muon_shards
from tests.optimizers import common
from tests.optimizers import muon_programs as programs
from tests.optimizers.common import PATHS, give_grads, parameters, same, started, train, values
from tests.tolerance import MUON, MUON_ROUNDED, MUON_SINGULAR

SHAPES = ((5, 7), (7, 5), (33, 65), (64, 256), (1, 1), (1, 9), (9, 1), (100, 30), (5, 7))
BFLOAT16, FLOAT = torch.bfloat16, torch.float32


def far(left, right):
    """The largest difference."""
    return max((a - b).abs().max().item() for a, b in zip(left, right, strict=True) if a.numel())


# -- the numbers ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"nesterov": False, "weight_decay": 0.0},
        {"adjust_lr_fn": "match_rms_adamw"},
        {"ns_steps": 3, "momentum": 0.8, "eps": 1.0, "ns_coefficients": (2.0, -1.5, 0.5)},
    ],
    ids=str,
)
def test_numbers_of_torch(options):
    left, right = parameters(shapes=SHAPES), parameters(shapes=SHAPES)
    ours, theirs = FusedMuon(left, lr=0.02, **options), torch.optim.Muon(right, lr=0.02, **options)
    assert far(train(ours, left, range(5)), train(theirs, right, range(5))) < MUON[BFLOAT16]
    for param, other in zip(left, right, strict=True):
        buffers = ours.state[param]["momentum_buffer"], theirs.state[other]["momentum_buffer"]
        assert far(*[[x] for x in buffers]) < MUON[FLOAT]


@pytest.mark.onednn
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.float16, BFLOAT16, FLOAT, torch.float64])
def test_bfloat16_products_against_the_formula(dtype, path):
    """Where products are float32 the formula holds to a rounding: test_formulas.py."""
    params, before = started(values, dtype, [(5, 7), (12, 4), (2, 6, 3), (3, 0), (0, 4, 4)])
    optimizer = FusedMuon(params, lr=1.0, weight_decay=0.0)
    train(optimizer, params, range(1), path)
    for param, old in zip(params, before, strict=True):
        step = Step(1, optimizer.param_groups[0], param.grad.double(), old.double(), {})
        exact, _ = muon(step)
        rounding = 0 if dtype in (FLOAT, torch.float64) else 4 * torch.finfo(dtype).eps
        if param.numel():
            assert far([param.double()], [exact]) < MUON_ROUNDED + rounding


@pytest.mark.onednn
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT])
@pytest.mark.parametrize("shape", [(30, 10), (10, 30), (3, 16, 16)])
def test_singular_values_come_near_to_one(shape, dtype):
    matrices = parameters(dtype, [shape])[0].detach()
    hyper = middle.Iteration((middle.JORDAN,), 1e-7, 5)
    (found,) = middle.orthogonalized([matrices], hyper, flatten=False)
    values = torch.linalg.svdvals(found.double())
    assert MUON_SINGULAR[0] < values.min()
    assert values.max() < MUON_SINGULAR[1]


@pytest.mark.parametrize("path", PATHS)
def test_nothing_comes_of_nothing(path):
    """A zero gradient moves by the decay alone; the smallest numbers do not become nan."""
    params, before = started(values, shapes=[(4, 3), (4, 3)])
    params[0].grad, params[1].grad = torch.zeros(4, 3), torch.full((4, 3), 1e-38)
    common.take_step(path, FusedMuon(params, lr=0.5, weight_decay=0.25))
    assert torch.equal(params[0].detach(), before[0] - 0.125 * before[0])
    assert far([params[1]], [before[1] * 0.875]) < MUON[FLOAT]


# -- stacks --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT])
def test_stacks_are_their_matrices(dtype):
    """3-D parameters and, flattened, convolutions; in bfloat16 bit for bit."""
    shapes = [(4, 6, 5), (6, 5), (3, 2, 2, 3)]
    params = parameters(shapes=shapes)
    convolution = {"params": params[2:], "flatten": True}
    optimizer = FusedMuon([{"params": params[:2]}, convolution], lr=0.02, iteration_dtype=dtype)
    assert {group["algorithm"] for group in optimizer.param_groups} == {"muon"}
    alone = [torch.nn.Parameter(x.clone()) for x in [*params[0].detach(), params[1].detach()]]
    alone.append(torch.nn.Parameter(params[2].detach().reshape(3, 12).clone()))
    for number in range(2):
        give_grads(params, number)
        optimizer.step()
        each = [*params[0].grad, params[1].grad, params[2].grad.reshape(3, 12)]
        for param, grad in zip(alone, each, strict=True):
            param.grad = grad
        if not number:
            others = [FusedMuon([param], lr=0.02, iteration_dtype=dtype) for param in alone]
        for other in others:
            other.step()
    found = [*params[0].detach(), params[1].detach(), params[2].detach().view(3, 12)]
    assert far(found, alone) < (MUON[FLOAT] if dtype is FLOAT else 1e-30)


def test_an_empty_stack_beside_others():
    """As on a rank that has no matrix of one stack, and some of another."""
    params, alone = (parameters(shapes=shapes) for shapes in ([(0, 6, 5), (3, 6, 5)], [(3, 6, 5)]))
    alone[0].data.copy_(params[1].data)
    give_grads(params, 1)
    alone[0].grad = params[1].grad.clone()
    FusedMuon(params).step()
    FusedMuon(alone).step()
    assert same(params[1:], alone)


def test_what_is_stacked(monkeypatch):
    """Tensors of one kind, up to a number of elements, or one that is larger; in small batches."""
    kinds, sizes = ["a", "b", "a", "a", "b", "b"], [8, 30, 8, 8, 10, 10]
    assert middle.stacks(kinds, sizes, 20) == [[0, 2], [1], [3], [4, 5]]
    for module in (middle, _muon_shards):
        monkeypatch.setattr(module, "most", lambda device: 20)
    seen, real = [], middle.newton_schulz
    monkeypatch.setattr(middle, "newton_schulz", lambda x, _: seen.append(len(x)) or real(x, _))
    params = parameters(shapes=[(5, 3, 2), (3, 2), (3, 2)])
    expected = parameters(shapes=[(5, 3, 2), (3, 2), (3, 2)])
    found = train(FusedMuon(params), params, range(1))
    assert seen == [3, 2, 2]
    for module in (middle, _muon_shards):
        monkeypatch.setattr(module, "most", lambda device: 2**20)
    assert same(found, train(FusedMuon(expected), expected, range(1)))


# -- groups --------------------------------------------------------------------------------------


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.conv = torch.nn.Embedding(9, 6), torch.nn.Conv2d(1, 3, 2)
        self.body, self.head = torch.nn.Linear(6, 6), torch.nn.Linear(6, 9)

    def forward(self, tokens):
        return self.head(self.body(self.embed(tokens)).tanh())


def kinds(optimizer):
    """The shapes that each algorithm steps."""
    found = {"muon": [], "adam": []}
    for group in optimizer.param_groups:
        found[group["algorithm"]] += [tuple(param.shape) for param in group["params"]]
    return found


def test_which_parameters_are_matrices():
    model = Model()
    by_shape = kinds(FusedMuon(model.parameters()))
    assert by_shape["muon"] == [(9, 6), (6, 6), (9, 6)]
    assert by_shape["adam"] == [(3, 1, 2, 2), (3,), (6,), (9,)]
    assert kinds(FusedMuon(model.parameters(), flatten=True))["adam"] == [(3,), (6,), (9,)]
    by_name = FusedMuon(
        model.named_parameters(), is_matrix=lambda name, param: name == "body.weight"
    )
    assert kinds(by_name)["muon"] == [(6, 6)]
    assert by_name.param_groups[1]["param_names"] == ["body.weight"]
    wanted = {id(model.body.weight)}
    unnamed = FusedMuon(model.parameters(), is_matrix=lambda name, param: id(param) in wanted)
    assert kinds(unnamed)["muon"] == [(6, 6)]
    given = FusedMuon(
        [
            {"params": [model.head.weight], "algorithm": "adam"},
            {"params": [model.body.weight], "algorithm": "muon"},
        ],
        is_matrix=lambda *_: 1 / 0,
    )
    assert kinds(given) == {"adam": [(9, 6)], "muon": [(6, 6)]}


def test_what_the_rest_is_stepped_with():
    """The constructor's numbers for Adam, unless a group has its own; FusedAdam, bit for bit."""
    params, alone = parameters(shapes=[(7,), (3, 2), (5,)]), parameters(shapes=[(7,), (5,)])
    alone[1].data.copy_(params[2].data)
    numbers = {"adam_lr": 0.01, "adam_weight_decay": 0.3, "adam_eps": 1e-5, "betas": (0.8, 0.9)}
    optimizer = FusedMuon([{"params": params[:2]}], lr=0.5, weight_decay=0.2, **numbers)
    optimizer.add_param_group({"params": params[2:], "lr": 0.03, "weight_decay": 0.0})
    found = [(g["algorithm"], g["lr"], g["weight_decay"], g["eps"]) for g in optimizer.param_groups]
    assert found == [("adam", 0.01, 0.3, 1e-5), ("muon", 0.5, 0.2, 1e-7), ("adam", 0.03, 0.0, 1e-5)]
    adam = FusedAdam(
        [{"params": alone[:1]}, {"params": alone[1:], "lr": 0.03, "weight_decay": 0.0}],
        lr=0.01, weight_decay=0.3, eps=1e-5, betas=(0.8, 0.9),
    )  # fmt: skip
    for number in range(3):
        give_grads(params, number)
        alone[0].grad, alone[1].grad = params[0].grad, params[2].grad
        optimizer.step()
        adam.step()
    assert same([params[0], params[2]], alone)
    # torch's ZeroRedundancyOptimizer puts the constructor's arguments into each group
    again = FusedMuon(
        [{"params": params[:1], "lr": 0.5, "eps": 1e-7, **numbers}], lr=0.5, **numbers
    )
    assert (again.param_groups[0]["lr"], again.param_groups[0]["eps"]) == (0.01, 1e-5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ns_steps": 100}, "ns_steps was 100; allowed are whole numbers from 0 to 99"),
        ({"ns_steps": 2.5}, r"ns_steps was 2.5"),
        ({"momentum": 1.0}, "momentum was 1.0; allowed are numbers from 0 to below 1"),
        ({"momentum": -0.1}, "Invalid momentum value: -0.1"),
        ({"ns_coefficients": (1.0, 2.0)}, r"ns_coefficients was \(1.0, 2.0\); .* three"),
        ({"ns_coefficients": (1.0, 2.0, "3")}, r"ns_coefficients was \(1.0, 2.0, '3'\)"),
        ({"ns_coefficients": 3.0}, "ns_coefficients was 3.0; allowed are three numbers"),
        ({"adjust_lr_fn": "rms"}, "adjust_lr_fn was 'rms'; allowed are None, 'original' and"),
        ({"adam_lr": -0.1}, "Invalid learning rate: -0.1"),
        ({"algorithm": "sgd"}, "algorithm was 'sgd'; allowed are 'muon' and 'adam'"),
        ({"use_muon": False}, "use_muon=False. Write algorithm='muon' or algorithm='adam'"),
    ],
)
def test_numbers_that_are_refused(options, words):
    params = parameters(shapes=[(3, 2), (4,)])
    if not {"algorithm", "use_muon"} & {*options}:
        with pytest.raises(ValueError, match=words):
            FusedMuon(params, **options)
    optimizer = FusedMuon(params[:1])
    words = words if "adam_lr" not in options else "has adam_lr=-0.1, .* applies to all groups"
    with pytest.raises(ValueError, match=words):
        optimizer.add_param_group({"params": params[1:], **options})
    assert len(optimizer.param_groups) == 1


def test_arguments_that_are_refused():
    params = parameters(shapes=[(3, 2), (4,), (2, 2, 2, 2)])
    with pytest.raises(ValueError, match="iteration_dtype was torch.float16; allowed are"):
        FusedMuon(params, iteration_dtype=torch.float16)
    with pytest.raises(TypeError, match="is_matrix was 2; pass a function"):
        FusedMuon(params, is_matrix=2)
    with pytest.raises(
        ValueError, match=r"parameter \(bias\) of shape \(4,\) is in a group for Muon"
    ):
        FusedMuon([("bias", params[1])], is_matrix=lambda name, param: True)
    with pytest.raises(ValueError, match=r"shape \(2, 2, 2, 2\) .* flatten=True, 2 or more"):
        FusedMuon([{"params": params[2:], "algorithm": "muon"}])
    optimizer = FusedMuon(params[:1])
    with pytest.raises(ValueError, match="appear in more than one parameter group"):
        optimizer.add_param_group({"params": [params[1], params[0]]})
    assert len(optimizer.param_groups) == 1
    params[1].grad, params[0].grad = torch.ones(4).to_sparse(), torch.ones(3, 2)
    both, before = FusedMuon(params[:2]), values(params)
    with pytest.raises(RuntimeError, match="does not support sparse gradients"):
        both.step()
    assert same(values(params), before)
    assert not both.state


# -- states --------------------------------------------------------------------------------------


def test_switching_from_and_to_torch():
    alone, params = parameters(shapes=SHAPES), parameters(shapes=SHAPES)
    expected = train(torch.optim.Muon(alone, lr=0.02), alone, range(6))
    first = torch.optim.Muon(params, lr=0.02)
    train(first, params, range(2))
    second = FusedMuon(params, lr=0.5)
    second.load_state_dict(first.state_dict())
    train(second, params, range(2, 4))
    third = torch.optim.Muon(params, lr=0.5)
    saved = second.torch_state_dict()
    assert saved["param_groups"][0].keys() == first.state_dict()["param_groups"][0].keys()
    third.load_state_dict(saved)
    assert far(train(third, params, range(4, 6)), expected) < MUON[BFLOAT16]
    with pytest.raises(ValueError, match="torch.optim.Muon updates only matrices"):
        FusedMuon(parameters()).torch_state_dict()


@pytest.mark.parametrize("steps", [0, 2])
def test_a_group_of_adam_stays_one_with_a_state_of_torchs(steps):
    alone, params = parameters(shapes=SHAPES), parameters(shapes=SHAPES)
    first = torch.optim.AdamW(params, lr=0.02)
    train(first, params, range(steps))
    second = FusedMuon([{"params": params, "algorithm": "adam"}])
    second.load_state_dict(first.state_dict())
    assert second.param_groups[0]["algorithm"] == "adam"
    found = train(second, params, range(steps, 4))
    assert far(found, train(torch.optim.AdamW(alone, lr=0.02), alone, range(4))) < MUON[FLOAT]


def test_states_of_other_groups_are_refused():
    def never(name, param):
        return False

    params, optimizer = started(FusedMuon, shapes=[(3, 2), (2, 3)], steps=1, is_matrix=never)
    saved = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(
        ValueError, match="group 0 was saved with algorithm='adam', and in this optimizer"
    ):
        FusedMuon(params).load_state_dict(saved)
    del saved["param_groups"][0]["algorithm"]
    with pytest.raises(ValueError, match="has exp_avg, exp_avg_sq, and this .* momentum_buffer"):
        FusedMuon(params).load_state_dict(saved)


@pytest.mark.parametrize("storage", ["low_bits", "kahan", "stochastic"])
def test_storages(storage):
    """What is kept beside bfloat16 weights; low bits give those of float32 weights."""
    shapes = [(16, 8), (3, 6, 4), (11,)]
    params = parameters(BFLOAT16, shapes)
    wide = common.widened(params)
    torch.manual_seed(0)
    optimizer, plain = FusedMuon(params, lr=0.03, storage=storage), FusedMuon(wide, lr=0.03)
    for number in range(8):
        common.give_both(params, wide, number)
        common.take_step(None, optimizer, plain)
    if storage == "low_bits":
        low = [optimizer.state[param]["low_bits"] for param in params]
        assert same(map(join_bits, values(params), low), values(wide))
    start, mine, exact = (
        torch.cat([x.detach().float().flatten() for x in some])
        for some in (parameters(BFLOAT16, shapes), params, wide)
    )
    assert torch.corrcoef(torch.stack([mine - start, exact - start]))[0, 1] > 0.9
    with pytest.raises(RuntimeError, match="keeps bfloat16 weights"):
        FusedMuon(wide, storage=storage)


def test_under_amp():
    """Masters by the rule's first answer, a skipped overflow, and a loss that falls."""
    model = Model()
    del model.conv
    rule = {id(model.body.weight)}  # masters are others
    optimizer = FusedMuon(
        model.parameters(), lr=0.05, adam_lr=0.1, is_matrix=lambda name, param: id(param) in rule
    )
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    tokens, losses = torch.arange(9), []
    for number in range(12):
        loss = torch.nn.functional.cross_entropy(model(tokens).float(), (tokens + 1) % 9)
        before = values(amp.master_params(optimizer))
        with amp.scale_loss(loss * (torch.inf if number == 3 else 1), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        assert same(before, amp.master_params(optimizer)) == (number == 3)
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert kinds(optimizer)["muon"] == [(6, 6)]
    (master,) = [g["params"][0] for g in optimizer.param_groups if g["algorithm"] == "muon"]
    assert master.dtype == FLOAT
    assert optimizer.state[master].keys() == {"momentum_buffer"}
    amp.reset()


# -- shards --------------------------------------------------------------------------------------


@pytest.mark.dist
@pytest.mark.parametrize("case", programs.MESHES)
@pytest.mark.slow
def test_shards_give_the_bits_of_one_process(four, case):
    """Of uneven, empty and no shards; each matrix is computed once, by few collectives."""
    answers = four.run(programs.stepped, case=case)
    for weights, alone, _, _ in answers:
        assert same(weights, alone)
    dims = sum(place.is_shard() for place in programs.MESHES[case][1])
    assert {count for *_, count, _ in answers} == {2 * dims}
    computed = sorted(shape for *_, shapes in answers for shape in shapes)
    copies = {"replicated": 4, "hybrid": 2}.get(case, 1)
    matrices = [shape for shape in programs.SHAPES if len(shape) > 1]
    assert computed == sorted(matrices * copies)
    if dims and case != "hybrid":
        assert all(shapes for *_, shapes in answers)  # nobody is idle


@pytest.mark.dist
def test_batches_of_what_is_sent(four):
    """More collectives, the same bits."""
    for weights, alone, calls, _ in four.run(programs.in_batches, sent=20):
        assert same(weights, alone)
        assert calls == 2 * 3  # of 80 elements: both of 9 x 6; 6 x 9, 1 x 5; 7 x 7, 2 x 12


@pytest.mark.dist
def test_shards_of_shards_give_the_bits_of_one_process(four):
    """Collected in another order the rows of a matrix would be, and its sums."""
    for weights, alone in four.run(programs.strided, iteration_dtype=FLOAT):
        assert same(weights, alone)


@pytest.mark.dist
def test_matrices_that_are_whole_on_a_rank_do_not_travel(four):
    for weight, alone, calls in four.run(programs.stack_of_experts):
        assert torch.equal(weight, alone)
        assert not calls


@pytest.mark.dist
@pytest.mark.parametrize("nowhere", [False, True])
def test_ranks_without_a_gradient(four, nowhere):
    """It counts as 0 for the others, and leaves the weight of its rank alone; no hang."""
    for weights, kept in four.run(programs.without_gradients, nowhere=nowhere):
        assert same(weights, kept)


@pytest.mark.dist
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT])
@pytest.mark.parametrize("kind", ["fsdp", "hybrid", "tensor parallel"])
def test_training_on_parts_of_a_batch(four, kind, dtype):
    for weights, alone in four.run(programs.trained, kind=kind, iteration_dtype=dtype):
        assert far(weights, alone) < MUON[dtype]


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["fsdp", "tensor parallel"])
@pytest.mark.slow
def test_sharded_checkpoints_resume(four, kind, tmp_path):
    for different, placed, keys in four.run(programs.resumed, kind=kind, folder=str(tmp_path)):
        assert different == 0
        assert placed
        assert keys == ["momentum_buffer", "low_bits"]


@pytest.mark.dist
@pytest.mark.slow
def test_what_cannot_be_collected_is_refused(four):
    for placements, meshes, partitioned in four.run(programs.refused):
        assert "has placements (Partial(sum),) or another mesh" in placements
        assert "Make both DTensors on the same mesh" in meshes
        assert "Pass groups, each with algorithm='muon' or algorithm='adam'" in partitioned

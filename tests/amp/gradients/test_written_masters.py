"""Whoever writes to a master writes to its weight, and the other way round."""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from apex import amp
from apex.amp.gradients.masters import table
from tests.amp.levels import MODEL
from tests.amp.training import MASTERED, scaled_backward, started

CAST = list(MODEL)
VALUE = 0.3  # of weights at first; 0.6 and 1.2 are exact doubles of it in every dtype
mastered = pytest.mark.parametrize("level", MASTERED)
still = functools.partial(torch.optim.SGD, lr=0.0)


def start(level, make=still):
    amp.reset()
    model = torch.nn.Linear(4, 1, bias=False)
    torch.nn.init.constant_(model.weight, VALUE)
    return started(level, model, make, loss_scale=8.0)


def step(model, optimizer):
    optimizer.zero_grad()
    scaled_backward(model(torch.ones(1, 4)).sum(), optimizer)
    optimizer.step()


def output(model):
    with torch.no_grad():
        return model(torch.ones(1, 4)).item()


def expected(level, value):
    """The output with all weights at the float32 ``value``."""
    return 4 * torch.tensor(value).to(MODEL[level]).float().item()


def in_place(master):
    with torch.no_grad():
        master.mul_(2.0)


def other_memory(master):
    master.data = 2.0 * master.data


def unseen(master):
    master.data.mul_(2.0)


@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("write", [in_place, other_memory])
@mastered
def test_a_written_master_reaches_the_next_forward(level, write, stepped):
    model, optimizer = start(level)
    if stepped:
        step(model, optimizer)
    (master,) = optimizer.param_groups[0]["params"]
    write(master)
    assert output(model) == expected(level, 2 * VALUE)
    assert torch.equal(model.state_dict()["weight"], torch.full((1, 4), 2 * VALUE))


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


COLLECTIVES = {  # of one rank: they write what is there
    "broadcast": lambda tensor: dist.broadcast(tensor, 0),
    "all_reduce": lambda tensor: dist.all_reduce(tensor),
    "reduce": lambda tensor: dist.reduce(tensor, dst=0),
    "scatter": lambda tensor: dist.scatter(tensor, [tensor.clone()], src=0),
    "all_gather": lambda tensor: dist.all_gather([tensor], tensor.clone()),
}


@pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("name", COLLECTIVES)
@mastered
def test_a_master_that_a_collective_writes_reaches_the_next_forward(level, name, stepped):
    model, optimizer = start(level)
    if stepped:
        step(model, optimizer)
    (master,) = optimizer.param_groups[0]["params"]
    collective = COLLECTIVES[name]
    with torch.no_grad():
        unseen(master)  # as another rank's values do
        collective(master)
        assert output(model) == expected(level, 2 * VALUE)
        unseen(master)
        collective(master.data)
    assert output(model) == expected(level, 4 * VALUE)
    assert torch.equal(model.state_dict()["weight"], torch.full((1, 4), 4 * VALUE))
    step(model, optimizer)
    assert output(model) == expected(level, 4 * VALUE)


@pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")
@pytest.mark.usefixtures("one_rank")
@mastered
def test_a_weight_that_a_collective_writes_is_taken_over(level):
    model, optimizer = start(level)
    step(model, optimizer)
    model.weight.data.fill_(1.0)
    dist.broadcast(model.weight.data, 0)
    step(model, optimizer)
    assert torch.equal(model.state_dict()["weight"], torch.ones(1, 4))


def test_reset_takes_the_wrappers_off_collectives():
    before = dist.broadcast
    start("O2")
    assert dist.broadcast is not before
    amp.reset()
    assert dist.broadcast is before


@mastered
def test_a_weight_in_the_groups_that_is_frozen_at_first_begins_at_its_float32_value(level):
    amp.reset()
    model = torch.nn.Linear(4, 1, bias=False)
    torch.nn.init.constant_(model.weight, VALUE)
    model.requires_grad_(False)
    optimizer = still(model.parameters())
    amp.initialize(model, optimizer, opt_level=level, loss_scale=8.0, verbosity=0)
    output(model)
    model.requires_grad_(True)
    step(model, optimizer)
    assert torch.equal(model.state_dict()["weight"], torch.full((1, 4), VALUE))


@pytest.mark.parametrize("write", [in_place, other_memory, unseen])
@mastered
def test_a_master_that_was_handed_out_counts_as_written(level, write):
    model, optimizer = start(level)
    step(model, optimizer)
    (master,) = amp.master_params(optimizer)
    write(master)
    assert output(model) == expected(level, 2 * VALUE)
    unseen(master)  # it was handed out before the last forward
    assert output(model) == expected(level, 2 * VALUE)


@mastered
def test_weights_that_were_given_other_memory_are_taken_over(level):
    model, optimizer = start(level)
    step(model, optimizer)
    vector_to_parameters(
        torch.full_like(parameters_to_vector(model.parameters()).detach(), 0.5), model.parameters()
    )
    step(model, optimizer)
    assert output(model) == 2.0
    assert torch.equal(model.state_dict()["weight"], torch.full((1, 4), 0.5))


def put(model, weight):
    model.weight.data = weight


def copied(model, weight):
    with torch.no_grad():
        model.weight.copy_(weight)


def evaluate(model, optimizer):
    output(model)


def save(model, optimizer):
    model.state_dict()


def attack(model, optimizer):
    scaled_backward(model(torch.zeros(1, 4)).sum(), optimizer)


@pytest.mark.parametrize("write", [put, copied])
@pytest.mark.parametrize("between", [evaluate, save, attack])
@mastered
def test_a_weight_that_is_put_back_has_its_master_again(level, between, write):
    """An average for an evaluation or a file, an adversarial attack between two backwards."""
    model, optimizer = start(level)
    scaled_backward(model(torch.ones(1, 4)).sum(), optimizer)
    own = model.weight.data.clone()
    write(model, own + 0.1)
    between(model, optimizer)
    between(model, optimizer)
    assert not torch.equal(model.state_dict()["weight"], torch.full((1, 4), VALUE))
    write(model, own)
    optimizer.step()
    assert torch.equal(model.state_dict()["weight"], torch.full((1, 4), VALUE))
    assert not table.with_before


@mastered
def test_a_weight_that_is_put_back_before_a_training_forward_costs_no_memory_in_it(level):
    model, optimizer = start(level)
    own = model.weight.data
    put(model, own + 0.1)
    evaluate(model, optimizer)
    assert table.get(model.weight).before is not None
    put(model, own)
    optimizer.zero_grad()
    model(torch.ones(1, 4))
    assert table.get(model.weight).before is None
    assert torch.equal(model.state_dict()["weight"], torch.full((1, 4), VALUE))


def test_what_a_weight_had_before_is_forgotten_by_a_step():
    model, optimizer = start("O2")
    own = model.weight.data.clone()
    put(model, own + 0.1)
    evaluate(model, optimizer)
    step(model, optimizer)
    put(model, own)
    step(model, optimizer)
    assert torch.equal(model.state_dict()["weight"], own.float())


def loaded(model, master, value):
    model.load_state_dict({"weight": value.clone()})


def written(model, master, value):
    with torch.no_grad():
        master.copy_(value)
    output(model)


def both_written(model, master, value):
    with torch.no_grad():
        model.weight.copy_(value)
    written(model, master, value)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("give", [loaded, written, both_written])
@mastered
def test_a_value_that_a_master_was_given_is_newer_than_what_its_weight_had_before(level, give):
    model, optimizer = start(level)
    (master,) = optimizer.param_groups[0]["params"]
    own = model.weight.data.clone()
    put(model, own + 0.1)
    evaluate(model, optimizer)
    give(model, master, own.float())  # it rounds to what VALUE rounds to
    put(model, own.clone())
    evaluate(model, optimizer)
    assert torch.equal(master, own.float())


@mastered
def test_both_written_alike_keep_the_master(level):
    model, optimizer = start(level)
    (master,) = optimizer.param_groups[0]["params"]
    with torch.no_grad():
        master.mul_(1 / 3)
        model.weight.mul_(1 / 3)  # rounds twice: within one rounding of the master
    wanted = master.clone()
    output(model)
    assert torch.equal(master, wanted)
    assert torch.equal(model.weight, wanted.to(MODEL[level]))


@mastered
def test_both_written_differently_take_the_weight_and_warn(level):
    model, optimizer = start(level)
    (master,) = optimizer.param_groups[0]["params"]
    with torch.no_grad():
        master.copy_(torch.tensor([[0.1, 0.1, 0.5, 0.5]]))
        model.weight.copy_(torch.tensor([[0.1, 0.25, 0.5, 1.0]]))
    with pytest.warns(UserWarning, match=r"shape \[1, 4\].*were both written") as caught:
        output(model)
    assert [warning.filename for warning in caught] == [__file__]  # whatever lies between
    assert torch.equal(master, torch.tensor([[0.1, 0.25, 0.5, 1.0]]))
    assert torch.equal(model.weight, master.to(MODEL[level]))


# -- entries of model.state_dict() ------------------------------------------------------------


@pytest.mark.parametrize("level", CAST)
def test_what_is_written_into_an_entry_is_loaded(level):
    model, optimizer = start(level)
    with torch.no_grad():
        model.state_dict()["weight"].fill_(2 * VALUE)
    assert output(model) == expected(level, 2 * VALUE)
    assert torch.equal(model.state_dict()["weight"], torch.full((1, 4), 2 * VALUE))
    step(model, optimizer)  # with a rate of 0
    assert output(model) == expected(level, 2 * VALUE)


@pytest.mark.parametrize("level", CAST)
def test_an_average_over_entries_of_a_copy_is_that_of_float32(level):
    model, optimizer = start(level)
    average = copy.deepcopy(model)
    wanted = torch.full((1, 4), VALUE).to(MODEL[level]).float()  # a copy begins with the weights
    for number in range(200):
        with torch.no_grad():
            model.state_dict()["weight"].add_(0.01 * (number % 7))
        both = zip(average.state_dict().values(), model.state_dict().values(), strict=True)
        for mine, theirs in both:
            mine.copy_(0.999 * mine + 0.001 * theirs)
        wanted = 0.999 * wanted + 0.001 * model.state_dict()["weight"]
    assert torch.equal(average.state_dict()["weight"], wanted)
    output(average)
    assert torch.equal(average.weight, wanted.to(MODEL[level]))


@pytest.mark.parametrize("level", CAST)
def test_an_entry_is_dropped_when_the_weight_is_written(level):
    model, _ = start(level)
    entry = model.state_dict()["weight"]
    with torch.no_grad():
        model.weight.fill_(1.0)
    assert torch.equal(model.state_dict()["weight"], torch.ones(1, 4))
    assert torch.equal(entry, torch.ones(1, 4)) == (level != "O3")  # there it is nobody's now


@mastered
def test_an_entry_is_a_copy_where_a_write_was_not_seen(level):
    model, optimizer = start(level)
    step(model, optimizer)
    model.weight.data.fill_(1.0)
    entry = model.state_dict()["weight"]
    assert torch.equal(entry, torch.ones(1, 4))
    entry.zero_()
    assert torch.equal(model.state_dict()["weight"], torch.ones(1, 4))


@pytest.mark.parametrize("level", ["O0", *MASTERED])
def test_a_lookup_of_state_by_a_weight_breaks_no_checkpoint(level):
    model, optimizer = start(level, functools.partial(torch.optim.SGD, lr=0.5, momentum=0.5))
    step(model, optimizer)
    assert [*optimizer.state[model.weight]] == ["momentum_buffer"]  # of its master, if it has one
    saved = optimizer.state_dict()
    assert [sorted(state) for state in saved["state"].values()] == [["momentum_buffer"]]
    optimizer.load_state_dict(saved)
    amp.reset()
    assert len(optimizer.state[model.weight]) == 1


# -- around ------------------------------------------------------------------------------------


@mastered
@pytest.mark.slow
def test_a_compiled_model_sees_the_write_after_zero_grad(level):
    model, optimizer = start(level)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert compiled(torch.ones(1, 4)).item() == expected(level, VALUE)
    in_place(optimizer.param_groups[0]["params"][0])
    optimizer.zero_grad()
    assert compiled(torch.ones(1, 4)).item() == expected(level, 2 * VALUE)


@mastered
def test_a_gradient_that_the_program_keeps_is_not_overwritten(level):
    model, optimizer = start(level)
    step(model, optimizer)
    optimizer.zero_grad()
    scaled_backward(model(torch.ones(1, 4)).sum(), optimizer)
    (master,) = amp.master_params(optimizer)
    kept = master.grad.numpy()
    optimizer.step()
    optimizer.zero_grad()
    scaled_backward(model(torch.full((1, 4), 3.0)).sum(), optimizer)
    assert kept.tolist() == [[1.0] * 4]
    assert torch.equal(master.grad, torch.full((1, 4), 3.0))


def test_a_master_whose_weight_left_the_groups_is_still_looked_at():
    layers = [torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 1, bias=False)]
    model = torch.nn.Sequential(*layers)
    optimizer = still([{"params": [layer.weight]} for layer in layers])
    amp.initialize(model, optimizer, opt_level="O2", loss_scale=8.0, verbosity=0)
    step(model, optimizer)
    entry = model.state_dict()["1.weight"]
    del optimizer.param_groups[1]
    step(model, optimizer)
    entry.zero_()
    assert output(model) == 0.0


def test_masters_of_one_of_two_optimizers_that_were_handed_out():
    """The model's forward compares the masters of both, and has nothing to write the first time."""
    amp.reset()
    layers = [torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 1, bias=False)]
    model = torch.nn.Sequential(*layers)
    for layer in layers:
        torch.nn.init.constant_(layer.weight, VALUE)
    optimizers = [still(layer.parameters()) for layer in layers]
    amp.initialize(model, optimizers, opt_level="O2", loss_scale=8.0, verbosity=0)
    scaled_backward(model(torch.ones(1, 4)).sum(), optimizers)
    for one in optimizers:
        one.step()
    before = output(model)
    assert output(model) == before
    (master,) = amp.master_params(optimizers[1])
    unseen(master)
    assert output(model) > 1.4 * before


class Clamped(torch.nn.Linear):
    """Clamps what it loads."""

    def _load_from_state_dict(self, *args):
        super()._load_from_state_dict(*args)
        with torch.no_grad():
            self.weight.clamp_(max=0.1)


def test_a_module_that_alters_what_it_loads_keeps_the_altered_values():
    model = Clamped(4, 1, bias=False)
    optimizer = still(model.parameters())
    amp.initialize(model, optimizer, opt_level="O2", loss_scale=8.0, verbosity=0)
    step(model, optimizer)
    model.load_state_dict({"weight": torch.full((1, 4), 0.7)})
    for _ in range(2):
        step(model, optimizer)
        assert output(model) == expected("O2", 0.1)


def test_a_write_through_data_before_the_first_step_is_kept():
    model, optimizer = start("O2")
    model.weight.data.fill_(2.0)
    step(model, optimizer)
    assert output(model) == 8.0


class Replaces(torch.optim.SGD):
    """Gives every parameter other memory in each step."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                param.data = param.data - group["lr"] * param.grad


def test_memory_that_a_step_has_freed_and_the_program_gets_again():
    model = torch.nn.Linear(300, 300, bias=False)
    optimizer = Replaces(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O5", verbosity=0)
    (master,) = optimizer.param_groups[0]["params"]
    for number in range(1, 9):
        scaled_backward(model(torch.ones(2, 300)).mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
        master.data = torch.full((300, 300), float(number))
        model(torch.ones(1, 300))
        assert (model.weight == number).all()


def test_a_master_of_a_late_group_is_noted():
    layers = [torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 1, bias=False)]
    model = torch.nn.Sequential(*layers)
    optimizer = still(layers[0].parameters())
    amp.initialize(model, optimizer, opt_level="O2", loss_scale=8.0, verbosity=0)
    model.state_dict()  # makes a float32 value of the second, too
    with torch.no_grad():
        layers[1].weight.fill_(0.5)
        optimizer.add_param_group({"params": [layers[1].weight]})
        layers[1].weight.fill_(0.5 + 2.0**-11)  # no warning: the master was not written
    output(model)
    assert (optimizer.param_groups[1]["params"][0] == 0.5 + 2.0**-11).all()

"""Healthy networks are called safe at every level, faulty ones are not: the whole model is run."""

import re

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from apex import amp
from apex.amp.casting import cpu_float16, dispatcher
from apex.debug import what_if
from apex.debug.what_if import judging
from apex.debug.what_if.formats import FORMATS as FORMATS_OF
from apex.debug.what_if.judging import Layer, LayerVerdict
from apex.debug.what_if.spread import Spread
from apex.debug.what_if.whole import Whole
from tests.debug.what_if import networks

LEVELS = ["O1", "O2", "O4", "O5"]
FORMATS = ["float16", "bfloat16"]


def looked_at(network):
    return what_if(*networks.made(network), formats=FORMATS)


WITHOUT_GRADIENTS = [networks.zero_head, networks.own_teacher]  # as yet, in some layer


@pytest.mark.parametrize("network", networks.HEALTHY)
def test_no_healthy_network_is_accused(network):
    result = looked_at(network)
    assert {one.name: one.state for one in result.levels} == dict.fromkeys(LEVELS, "trains")
    assert {one.verdicts[form].state for form in FORMATS for one in result.layers} == {"safe"}
    is_part = network in WITHOUT_GRADIENTS
    where = "is safe for the products that were measured" if is_part else "everywhere is safe"
    every = "every layer that was seen is safe then" if is_part else "every layer is safe then"
    text = re.escape(f"bfloat16 {where}.\nfloat16 needs a loss scale of at most ") + r"2\*\*\d+; "
    assert re.search(f"^{text}{every}.\nWithout float32 masters", result.answer, re.M)


# network -> the levels that fail with the policy, layers that float16 and bfloat16 need in float32,
# and what the answer says
FAULTY = {
    networks.kelvin_targets: ([], [], ["4"], "lies around 290 with a spread of 0"),
    networks.two_targets: (["O2", "O5"], ["4"], ["4"], "bfloat16 has steps of 5.1e+02"),
    networks.offset_logits: ([], ["head"], ["head"], "float16 has steps of 16"),
    networks.raw_inputs: (["O5"], [], ["0"], "At O5 the whole model fails, with that policy too"),
    networks.two_moments: (LEVELS, [], [], "at every loss scale from"),
    networks.squares_overflow: (["O1", "O2"], [], [], "gradients to float32's is 0.00"),
    networks.squares_vanish: (["O1", "O2"], [], [], "the whole model fails: the loss is nan"),
    networks.long_stream: (["O1", "O2"], [], [], "sums of float16 numbers at O1, and `"),
    networks.padding_of_a_billion: (["O1", "O2"], [], [], "RuntimeError: value cannot"),
    networks.powers_of_scores: (["O1", "O2"], [], [], "the whole model fails: the loss is nan"),
    networks.late_times: (["O5"], [], [], "bfloat16 computes each layer well by itself. At O5"),
    networks.distances: (["O1", "O4"], [], [], "in float32 0."),
    networks.features_in_float32: (["O2", "O5"], [], [], "At O5 the whole model fails: RuntimeErr"),
    networks.small_differences: (["O4", "O5"], ["2"], [], "At O4 and O5 the whole model fails"),
}


@pytest.mark.parametrize("network", FAULTY)
def test_a_faulty_network_is_not_called_safe(network):
    fails, by_float16, by_bfloat16, said = FAULTY[network]
    result = looked_at(network)
    assert [one.name for one in result.levels if one.state == "fails"] == fails
    needed = [
        [one.name for one in result.layers if one.verdicts[form].is_needed] for form in FORMATS
    ]
    assert needed == [by_float16, by_bfloat16]
    assert said in result.answer
    good = [one for one in LEVELS if one not in fails]
    assert result.answer.splitlines()[0] == _advice(result, good)
    assert not (fails + by_bfloat16) or "O4" in good or "everywhere is safe" not in result.answer
    assert "O1" in good or "every layer is safe" not in result.answer


def _advice(result, good):
    formats, advice = result.policy()["formats"], []
    for form, levels in (("bfloat16", ["O4", "O5"]), ("float16", ["O1", "O2"])):
        first, *other = [one for one in levels if one in good] or [""]
        if first:
            use = "If your device is fast in float16 only, use" if advice else "Use"
            policy = " with the policy" if formats[form]["modules"] else ""
            advice.append(f"{use} {first}{''.join(f' (or {one})' for one in other)}{policy}.")
    return " ".join(advice) or "Stay in float32 (O0)."


def test_every_network_is_in_one_of_the_tables():
    assert list(FAULTY) == networks.FAULTY


def test_what_other_layers_change_accuses_none():
    """Layers whose group was not cleared are tried alone; what is left is to be looked at."""
    lost = Spread(0.1, 300.0, 1.0, 2.0, 0.6)
    verdicts = [
        LayerVerdict(1.0, "result", 0, 0.0, 0.0, 0.0, "safe", spread=lost) for _ in "x" * 20
    ]
    pairs = [(Layer(str(place), "Linear"), one) for place, one in enumerate(verdicts)]
    alone, form = [], FORMATS_OF["bfloat16"]

    def together(group):
        for _, verdict in group:
            verdict.is_needed, verdict.whole = True, Whole(1.0, 1.0, 1.0, "")
        return group

    def is_cleared(pair):
        alone.append(pair[0].name)
        pair[1].is_needed = False
        return True

    judging._try_offsets(pairs, form, together, is_cleared)
    assert alone == [str(place) for place in range(19, 3, -1)]
    assert not any(verdict.is_needed for verdict in verdicts)
    assert [one.state for one in verdicts] == ["look"] * 4 + ["safe"] * 16
    assert verdicts[0].why == lost.why(form)


def test_a_layer_that_only_computes_inaccurately_is_not_said_to_need_float32():
    """Its gradient is wrong, and little depends on it."""
    from tests.debug.what_if.test_local import batches, loss, network

    result = what_if(network(factor=40.0), loss, batches(), formats=["bfloat16"])
    advice, first, *_ = result.answer.splitlines()
    assert advice == "Use O4 (or O5) with the policy."
    assert first.startswith("bfloat16 computes `0.scores` inaccurately: the cosine of its ")
    assert result.policy()["formats"]["bfloat16"]["modules"] == {"0.scores": "float32"}


def test_a_look_leaves_amp_and_the_process_as_they_were():
    """Another training goes on at O1, whose casts are on in this thread, and kernels stay off."""
    model, loss, batches = networks.made(networks.squares_overflow)
    amp.reset()
    cpu_float16.switch(on=False)
    before = dispatcher.installed()
    seen = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(cpu_float16.is_on())
            return func(*args, **(kwargs or {}))

    with Seen():
        what_if(model, loss, batches, formats=FORMATS)
    assert set(seen) == {False}
    assert dispatcher.installed() == before
    assert not torch.is_autocast_enabled("cpu")
    assert not hasattr(amp._amp_state, "opt_properties")
    x = batches[0][0]
    assert nn.Linear(12, 4)(x).dtype == torch.float32


def test_a_model_that_cannot_be_copied_is_said_to_be_not_run():
    class Uncopied(nn.Linear):
        def __deepcopy__(self, memo):
            raise RuntimeError("holds a file")

    model, loss, batches = networks.made(networks.standardised_targets)
    model[0] = Uncopied(6, 32)
    del model[1:4]
    result = what_if(model, loss, batches, formats=["bfloat16"])
    assert [one.state for one in result.levels] == ["not run", "not run"]
    assert (
        "apex did not run the whole model at O4 and O5: copy.deepcopy of the model" in result.answer
    )
    assert not re.search(r"\b[Uu]se O|Stay in", result.answer)


def test_a_loss_that_uses_another_model_is_said_to_be_not_run():
    model, loss, batches = networks.made(networks.standardised_targets)
    result = what_if(model, lambda _, batch: loss(model, batch), batches, formats=["bfloat16"])
    assert {one.state for one in result.levels} == {"not run"}
    assert "the loss does not depend on its model argument" in result.answer


def test_progress_counts_passes():
    model, loss, batches = networks.made(networks.standardised_targets)
    said = []
    what_if(model, loss, batches, formats=["float16"], progress=lambda *both: said.append(both))
    assert said == [(done, 16) for done in range(1, 17)]

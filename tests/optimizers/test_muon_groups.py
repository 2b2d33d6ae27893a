"""``FusedMuon.groups_for``, ``split=`` and coefficients by name."""

import warnings

import pytest
import torch
from torch import nn

from apex.contrib.xentropy import LinearCrossEntropyLoss
from apex.ops.updates.newton_schulz import NAMED, Iteration, newton_schulz
from apex.optimizers import FusedMuon
from tests.tolerance import POLAR_EXPRESS


class Language(nn.Module):
    def __init__(self, *, tied=False, output="lm_head"):
        super().__init__()
        self.tokens = nn.Embedding(11, 8)
        self.positions = nn.Parameter(torch.zeros(5, 8))
        self.layer = nn.TransformerEncoderLayer(8, 2, 16)
        self.experts = nn.Parameter(torch.randn(3, 8, 8))
        self.memory = nn.LSTM(8, 8)
        self.conv = nn.Conv1d(8, 8, 3)
        setattr(self, output, nn.Linear(8, 11, bias=False))
        if tied:
            getattr(self, output).weight = self.tokens.weight


def matrices(groups):
    """Names that Muon steps, by the number of blocks."""
    found = {}
    for group in groups:
        if group["algorithm"] == "muon":
            found.setdefault(group.get("split", 1), []).extend(n for n, _ in group["params"])
    return found


HIDDEN = ["layer.self_attn.out_proj.weight", "layer.linear1.weight", "layer.linear2.weight"]
SPLIT = {3: ["layer.self_attn.in_proj_weight"], 4: ["memory.weight_ih_l0", "memory.weight_hh_l0"]}


@pytest.mark.parametrize("tied", [False, True])
def test_hidden_matrices_by_the_type_of_their_module(tied):
    model = Language(tied=tied)
    groups = FusedMuon.groups_for(model)
    assert matrices(groups) == {1: HIDDEN, **SPLIT}
    every = [param for group in groups for _, param in group["params"]]
    assert {*map(id, every)} == {*map(id, model.parameters())}
    assert len(every) == len({*map(id, every)})
    optimizer = FusedMuon(groups, lr=0.02, adam_lr=1e-3)
    assert {group["lr"] for group in optimizer.param_groups} == {0.02, 1e-3}


def test_a_tied_output_layer_of_any_name_is_adams():
    assert matrices(FusedMuon.groups_for(Language(tied=True, output="last"))) == {
        1: HIDDEN,
        **SPLIT,
    }


def test_outputs_and_matrices_by_name():
    model = Language(output="last")
    groups = FusedMuon.groups_for(model, outputs=["last"], matrices=["exp*"])
    assert matrices(groups) == {1: ["experts", *HIDDEN], **SPLIT}
    with pytest.warns(UserWarning, match=r"no output layer was found\. Pass outputs="):
        assert "last.weight" in matrices(FusedMuon.groups_for(model))[1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "last.weight" in matrices(FusedMuon.groups_for(model, outputs=[]))[1]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"outputs": ["heads"]}, "no module is called heads"),
        ({"outputs": [], "matrices": ["expert"]}, "no parameter is called expert"),
    ],
)
def test_names_that_fit_nothing(options, said):
    with pytest.raises(ValueError, match=said):
        FusedMuon.groups_for(Language(), **options)


def test_output_layers_that_a_model_names():
    class Pretrained(nn.Sequential):
        def get_output_embeddings(self):
            return self[1]

    model = Pretrained(nn.Linear(4, 4), nn.Linear(4, 9))
    assert matrices(FusedMuon.groups_for(model)) == {1: ["0.weight"]}
    model = nn.Sequential(nn.Linear(4, 4), LinearCrossEntropyLoss(4, 9))
    assert matrices(FusedMuon.groups_for(model)) == {1: ["0.weight"]}


def test_the_last_layer_of_a_head_and_no_part_of_a_block_that_is_called_output():
    block = nn.ModuleDict({"output": nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))})
    head = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    model = nn.ModuleDict({"block": block, "classifier": head})
    assert matrices(FusedMuon.groups_for(model)) == {
        1: ["block.output.0.weight", "classifier.0.weight"]
    }


def test_positions_that_a_layer_of_apex_keeps_are_adams():
    layer = nn.Module()
    layer.weight, layer.positions = (nn.Parameter(torch.ones(4, 4)) for _ in range(2))
    layer.__class__ = type("Layer", (nn.Module,), {"__module__": "apex.transformer"})
    assert matrices(FusedMuon.groups_for(layer, outputs=[])) == {1: ["weight"]}


def test_frozen_parameters_are_left_out():
    model = Language()
    model.layer.requires_grad_(requires_grad=False)
    groups = FusedMuon.groups_for(model)
    assert matrices(groups) == {4: SPLIT[4]}
    assert not any(n.startswith("layer") for group in groups for n, _ in group["params"])


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "wte.weight",
        "lm_head.weight",
        "bert.embeddings.word_embeddings.weight",
        "pos_embed",
    ],
)
def test_the_constructor_warns_of_names(name):
    param = nn.Parameter(torch.randn(4, 4))
    with pytest.warns(UserWarning, match=f"FusedMuon: {name} looks like an embedding or an output"):
        FusedMuon([(name, param)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FusedMuon([param])
        FusedMuon([(name, param)], is_matrix=lambda name, param: True)
        FusedMuon([{"params": [(name, param)], "algorithm": "muon"}])
        FusedMuon([("layer.0.output.dense.weight", param), ("headline.weight", param * 1)][:1])


# -- split ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ns_algorithm", ["standard_newton_schulz", "gram_newton_schulz"])
@pytest.mark.parametrize("adjust", [None, "match_rms_adamw"])
def test_blocks_have_the_bits_of_matrices_of_their_own(dtype, ns_algorithm, adjust):
    whole = nn.Parameter(torch.randn(12, 8).to(dtype))
    blocks = [nn.Parameter(part.detach().clone()) for part in whole.split(4)]
    options = {"lr": 0.1, "ns_algorithm": ns_algorithm, "adjust_lr_fn": adjust}
    joint, apart = FusedMuon([whole], split=3, **options), FusedMuon(blocks, **options)
    for _ in range(3):
        whole.grad = torch.randn_like(whole)
        for block, grad in zip(blocks, whole.grad.split(4), strict=True):
            block.grad = grad.clone()
        joint.step()
        apart.step()
    assert torch.equal(whole, torch.cat(blocks))


def test_blocks_of_stacks_and_of_flattened_parameters():
    stack, conv = nn.Parameter(torch.randn(2, 6, 4)), nn.Parameter(torch.randn(6, 2, 2, 2))
    blocks = nn.Parameter(stack.detach().reshape(4, 3, 4).clone())
    rows = nn.Parameter(conv.detach().reshape(2, 3, 8).clone())
    for param in (stack, conv):
        param.grad = torch.randn_like(param)
    blocks.grad, rows.grad = stack.grad.reshape(blocks.shape), conv.grad.reshape(rows.shape)
    FusedMuon([stack], split=2).step()
    FusedMuon([conv], split=2, flatten=True).step()
    FusedMuon([blocks]).step()
    FusedMuon([rows]).step()
    assert torch.equal(stack.view(blocks.shape), blocks)
    assert torch.equal(conv.view(rows.shape), rows)


def test_a_split_is_saved_and_states_without_one_load():
    param = nn.Parameter(torch.randn(6, 4))
    optimizer = FusedMuon([{"params": [param], "split": 3, "algorithm": "muon"}])
    param.grad = torch.randn_like(param)
    optimizer.step()
    state = optimizer.state_dict()
    assert state["param_groups"][0]["split"] == 3
    assert "split" not in optimizer.torch_state_dict()["param_groups"][0]
    del state["param_groups"][0]["split"]  # of 1.0.0
    new = FusedMuon([nn.Parameter(param.detach().clone())], split=2)
    new.load_state_dict(state)
    assert new.param_groups[0]["split"] == 2


@pytest.mark.parametrize("split", [0, -1, 1.5, True])
def test_splits_that_are_refused(split):
    with pytest.raises(ValueError, match=f"split was {split}; allowed are whole numbers from 1"):
        FusedMuon([nn.Parameter(torch.randn(6, 4))], split=split)


def test_rows_that_it_does_not_divide():
    param = nn.Parameter(torch.randn(6, 4))
    with pytest.raises(ValueError, match=r"shape \(6, 4\) has 6 rows, which split=4 does not"):
        FusedMuon([("qkv", param)], split=4)
    optimizer = FusedMuon([nn.Parameter(torch.randn(3))], split=4)  # of Adam
    with pytest.raises(ValueError, match="does not divide"):
        optimizer.add_param_group({"params": [param]})
    assert len(optimizer.param_groups) == 1


# -- coefficients ----------------------------------------------------------------------------------


def spread(name, condition, steps=5):
    """How far singular values are from 1, in float64; of a matrix whose least is 1 / condition."""
    left, _ = torch.linalg.qr(torch.randn(32, 32, dtype=torch.float64))
    right, _ = torch.linalg.qr(torch.randn(64, 32, dtype=torch.float64))
    values = torch.logspace(0, -torch.tensor(float(condition)).log10(), 32, dtype=torch.float64)
    x = left @ values.diag() @ right.T
    done = newton_schulz(x, Iteration(NAMED[name], 1e-7, steps))
    return float((torch.linalg.svdvals(done) - 1).abs().max())


def test_polar_express_is_nearer_to_orthogonal():
    near, far = spread("polar_express", 10), spread("polar_express", 100, steps=8)
    assert near < spread("quintic", 10) / 2
    assert far <= POLAR_EXPRESS
    assert spread("polar_express", 100) < spread("quintic", 100)


def test_coefficients_by_name():
    def stepped(coefficients, **options):
        torch.manual_seed(0)
        param = nn.Parameter(torch.randn(8, 32))
        param.grad = torch.randn(8, 32)
        optimizer = FusedMuon(
            [param], ns_coefficients=coefficients, iteration_dtype=torch.float32, **options
        )
        optimizer.step()
        return param.detach(), optimizer

    default, quintic = stepped((3.4445, -4.7750, 2.0315))[0], stepped("quintic")
    polar = stepped("polar_express")
    assert torch.equal(default, quintic[0])
    assert not torch.equal(default, polar[0])
    torch.testing.assert_close(
        stepped("polar_express", ns_algorithm="gram_newton_schulz")[0], polar[0]
    )
    saved = quintic[1].torch_state_dict()["param_groups"][0]
    assert saved["ns_coefficients"] == (3.4445, -4.7750, 2.0315)
    with pytest.raises(ValueError, match="has no 'polar_express'"):
        polar[1].torch_state_dict()
    with pytest.raises(ValueError, match="three numbers, 'quintic', 'polar_express'"):
        FusedMuon([nn.Parameter(torch.randn(2, 2))], ns_coefficients="polar")

"""initialize(policy=...): the named modules stay in float32, weights and products."""

import copy
import json
import warnings

import pytest
import torch
from torch import nn

from apex import amp
from tests.tolerance import POLICY_AT_O1

LEVELS = {"O1": torch.float16, "O2": torch.float16, "O4": torch.bfloat16, "O5": torch.bfloat16}
pytestmark = pytest.mark.filterwarnings("error")


def name_of(dtype):
    return str(dtype).removeprefix("torch.")


def policy(half, **modules):
    names = {name.replace("_", "."): value for name, value in modules.items()}
    return {"apex_precision_policy": 1, "formats": {name_of(half): {"modules": names}}}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.b = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        self.c = nn.Linear(8, 4)

    def forward(self, x):
        return self.c(self.b(self.a(x)))


def made(level, model, given, **options):
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"loss_scale": 1.0, "verbosity": 0, **options}
    return amp.initialize(model, optimizer, opt_level=level, policy=given, **options)


def products(model, x):
    """What each linear layer computed in: the type that its product was given, and its weight's."""
    seen = {}

    class Seen(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.addmm.default:
                seen[layers.pop(0)] = args[1].dtype
            return func(*args, **(kwargs or {}))

    layers = [name for name, one in model.named_modules() if isinstance(one, nn.Linear)]
    with Seen():
        model(x)
    return seen


@pytest.mark.parametrize(("level", "half"), LEVELS.items())
def test_the_named_module_computes_in_float32_and_the_others_do_not(level, half):
    model, optimizer = made(level, Net(), policy(half, b="float32"))
    x = torch.randn(2, 8, device="cpu", dtype=torch.float32)
    wide = torch.float32
    assert products(model, x) == {"a": half, "b.0": wide, "b.2": wide, "c": half}
    casts_weights = level in ("O2", "O5")
    weights = {name.rpartition(".")[0]: p.dtype for name, p in model.named_parameters()}
    kept = half if casts_weights else wide
    assert weights == {"a": kept, "b.0": wide, "b.2": wide, "c": kept}
    before = model.b[0].weight.detach().clone()
    with amp.scale_loss(model(x).float().pow(2).mean(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert not torch.equal(before, model.b[0].weight)
    amp.reset()
    assert products(model, x) == dict.fromkeys(weights, wide)


@pytest.mark.parametrize(("level", "half"), LEVELS.items())
def test_the_innermost_name_counts(level, half):
    model, _ = made(level, Net(), policy(half, b="float32", b_2=name_of(half)))
    x = torch.randn(2, 8, device="cpu", dtype=torch.float32)
    assert products(model, x) == {"a": half, "b.0": torch.float32, "b.2": half, "c": half}


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float64])
@pytest.mark.parametrize(("level", "half"), LEVELS.items())
def test_inputs_of_a_named_module_are_those_of_autocasts_custom_fwd(level, half, dtype):
    """Which has float8 as float32, too: torch.autocast casts it in the functions of its lists."""

    class Function(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
        def forward(ctx, x):
            seen.append(x.dtype)
            return x.float()

    class Looks(nn.Module):
        def forward(self, x):
            seen.append(x.dtype)
            return x.float()

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), Looks()

        def forward(self, x):
            return self.b(x.to(dtype))

    seen = []
    x = torch.ones(2, 2, device="cpu", dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        Function.apply(x.to(dtype))
    model, _ = made(level, Outer(), policy(half, b="float32"))
    model(x)
    assert seen[0] == seen[1]


def test_a_product_beyond_float16_is_finite_where_it_is_named():
    """At O1; the effect of a policy on a training."""
    big = Net()
    with torch.no_grad():
        big.b[0].weight.mul_(1e6)
        big.b[2].weight.div_(1e6)
    x = torch.randn(2, 8, device="cpu", dtype=torch.float32)
    exact = big(x).detach()
    plain, _ = made("O1", copy.deepcopy(big), None)
    assert not torch.isfinite(plain(x)).all()
    amp.reset()
    model, _ = made("O1", big, policy(torch.float16, b="float32"))
    torch.testing.assert_close(model(x).float(), exact, rtol=POLICY_AT_O1, atol=POLICY_AT_O1)


@pytest.mark.parametrize("level", LEVELS)
def test_a_traced_model_follows_it_where_autocast_is_off(level):
    """TorchScript casts every product once more where autocast is on, as it is after O1 and O4.

    The casts of the level are in the graph; those of a named module's products it lacks.
    """
    model, _ = made(level, Net(), policy(LEVELS[level], b="float32"))
    x = torch.randn(2, 8, device="cpu", dtype=torch.float32)
    exact = model(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit.trace is deprecated
        traced, other = (torch.jit.trace(model, x, check_trace=False) for _ in "12")
    with torch.autocast("cpu", enabled=False):
        assert torch.equal(traced(x), exact)
    assert torch.equal(other(x), exact) == (level in ("O2", "O5"))


@pytest.mark.slow
def test_a_compiled_model_follows_it():
    torch._dynamo.reset()
    model, _ = made("O2", Net(), policy(torch.float16, b="float32"))
    x = torch.randn(2, 8, device="cpu", dtype=torch.float32)
    exact = model(x)
    compiled = torch.compile(model, backend="eager")
    assert torch.equal(compiled(x), exact)


def test_names_are_without_what_compile_and_wrappers_add():
    model = Net()
    inner, model.b = model.b, torch.compile(model.b, backend="eager")
    made("O2", nn.DataParallel(model), policy(torch.float16, b_0="float32"))
    assert [inner[0].weight.dtype, inner[2].weight.dtype] == [torch.float32, torch.float16]


def test_of_several_models_each_has_its_own(tmp_path):
    file = tmp_path / "policy.json"
    file.write_text(json.dumps(policy(torch.bfloat16, a="float32")))
    models = [Net(), Net(), Net()]
    given = [str(file), None, policy(torch.bfloat16, c="float32")]
    amp.initialize(models, opt_level="O5", policy=given, verbosity=0)
    kept = [[n for n, p in m.named_parameters() if p.dtype == torch.float32] for m in models]
    assert kept == [["a.weight", "a.bias"], [], ["c.weight", "c.bias"]]
    with pytest.raises(ValueError, match="policy had 1 entries for 3 models"):
        amp.initialize([Net(), Net(), Net()], opt_level="O5", policy=str(file), verbosity=0)


class Tied(nn.Module):
    """With a tied weight, an attention, and a module whose weights its parent reads."""

    def __init__(self):
        super().__init__()
        self.read = nn.Linear(4, 4)
        self.embedding, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight
        self.attention = nn.MultiheadAttention(4, 1)

    def forward(self, x):
        h = self.embedding(x)
        h = nn.functional.linear(h, self.read.weight.to(h.dtype))
        return self.head(self.attention(h, h, h)[0])


REFUSED = {
    "a name that is not there": ({"nothing": "float32"}, "names 'nothing', which the Tied"),
    "the model itself": ({"": "float32"}, "names ''.*without the model itself"),
    "a part of an attention": ({"attention.out_proj": "float32"}, "never called.*'attention'"),
    "a tied weight": ({"head": "float32"}, "names 'head', which shares.*'embedding.weight'"),
    "a list": ({"attention": ["float32"]}, r"has \['float32'\] for 'attention'"),
    "another type": ({"attention": "float8"}, "has 'float8' for 'attention'.*'float32' and"),
}


@pytest.mark.parametrize(("modules", "match"), REFUSED.values(), ids=REFUSED.keys())
def test_what_initialize_refuses(modules, match):
    model = Tied()
    given = {"apex_precision_policy": 1, "formats": {"float16": {"modules": modules}}}
    with pytest.raises(ValueError, match=match):
        made("O2", model, given)
    assert {p.dtype for p in model.parameters()} == {torch.float32}  # nothing was changed


def test_a_buffer_of_two_modules_cannot_be_kept_and_cast():
    """It was cast with the other module, and the kept one computed with 16 bits of it."""
    model = Net()
    table = torch.ones(8, device="cpu", dtype=torch.float32)
    model.a.register_buffer("table", table)
    model.c.register_buffer("table", table)
    with pytest.raises(ValueError, match="'a', which shares a weight or a buffer with 'c.table'"):
        made("O2", model, policy(torch.float16, a="float32"))


FILES = {
    "no JSON": ("{", "is not JSON"),
    "another version": ('{"apex_precision_policy": 2}', "=2; this apex reads 1"),
    "no formats": ('{"apex_precision_policy": 1}', "has no 'formats'"),
    "another format": ('{"apex_precision_policy": 1, "formats": {"e4m3": {"modules": {}}}}',
                       "no entries for float16, in which O1 computes; it has e4m3"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "match"), FILES.values(), ids=FILES.keys())
def test_files_that_are_no_policy(text, match, tmp_path):
    (tmp_path / "policy.json").write_text(text)
    with pytest.raises(ValueError, match=match):
        made("O1", Net(), tmp_path / "policy.json")


@pytest.mark.parametrize("level", ["O0", "O3"])
def test_levels_without_policies(level):
    with pytest.raises(RuntimeError, match="Use O1, O2, O4 or O5"):
        made(level, Net(), policy(torch.float16, b="float32"))


def test_one_module_under_two_names_cannot_be_two_things():
    model = Net()
    model.again = model.a
    with pytest.raises(ValueError, match="different entries for 'a' and 'again'"):
        made("O1", model, policy(torch.float16, a="float32"))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_name_that_the_first_forward_does_not_call_is_an_error(level):
    modules = {"read": "float32", "attention": "float32"}
    given = {"apex_precision_policy": 1, "formats": {"float16": {"modules": modules}}}
    model, _ = made(level, Tied(), given)
    x = torch.zeros(3, 1, device="cpu", dtype=torch.int64)
    with pytest.raises(RuntimeError, match=r"names 'read', which the first forward"):
        model(x)
    model(x)  # said once


def test_a_forward_that_raises_keeps_its_error_and_the_check():
    model, _ = made("O1", Net(), policy(torch.float16, b="float32"))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.randn(2, 9, device="cpu", dtype=torch.float32))
    hook = next(h for h in model._forward_hooks.values() if hasattr(h, "level"))
    assert hook.level.calls.missing == {"b"}
    model(torch.randn(2, 8, device="cpu", dtype=torch.float32))
    assert hook.level.calls is None


def test_it_is_in_the_checkpoint_and_another_is_refused():
    given = policy(torch.float16, b="float32")
    made("O1", Net(), given, loss_scale="dynamic")
    saved = amp.state_dict()
    assert saved["policy"] == [{"b": "float32"}]
    amp.load_state_dict(saved)
    made("O1", Net(), policy(torch.float16, a="float32"), loss_scale="dynamic")
    with pytest.raises(RuntimeError, match=r"had the policy \[\{'b'.* this training has"):
        amp.load_state_dict(saved)
    made("O1", Net(), None, loss_scale="dynamic")
    assert "policy" not in amp.state_dict()
    with pytest.raises(RuntimeError, match="this training has None"):
        amp.load_state_dict(saved)
    made("O1", Net(), given, loss_scale="dynamic")
    with pytest.raises(RuntimeError, match="had the policy None"):
        amp.load_state_dict({"loss_scaler0": saved["loss_scaler0"]})


def test_what_is_passed_over_is_said(caplog):
    given = policy(torch.float16, b="float32")
    given["formats"]["e4m3"] = {"modules": {}}
    with caplog.at_level("INFO", "apex.amp"):
        made("O1", Net(), given, verbosity=1)
    assert "b=float32 (unused, because the level computes in float16: e4m3)" in caplog.text


def test_a_scripted_module_is_refused_before_anything_is_changed():
    model = Net()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit.script is deprecated
        model.b = torch.jit.script(nn.Linear(8, 8))
    with pytest.raises(
        ValueError, match="names 'b', a TorchScript module, on which amp cannot set hooks"
    ):
        made("O2", model, policy(torch.float16, b="float32"))
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("name", ["b", "b_0"])
@pytest.mark.parametrize("outer_first", [True, False])
@pytest.mark.parametrize("is_outers", [True, False])
def test_a_module_of_two_models_cannot_be_named(name, outer_first, is_outers):
    """Named by the outer model it was cast by the inner one's preparation, and the other way."""
    outer = Net()
    given = policy(torch.float16, **{name if is_outers else "0": "float32"})
    pairs = [(outer, given if is_outers else None), (outer.b, None if is_outers else given)]
    models, policies = zip(*(pairs if outer_first else pairs[::-1]), strict=True)
    match = "'(b|b.0|0)' of the (Net|Sequential), and the (Net|Sequential) shares it"
    with pytest.raises(ValueError, match=match):
        amp.initialize([*models], opt_level="O2", policy=[*policies], verbosity=0)
    assert {p.dtype for p in outer.parameters()} == {torch.float32}


class Around(nn.Module):
    def __init__(self, shared):
        super().__init__()
        self.shared, self.own = shared, nn.Linear(8, 8)

    def forward(self, x):
        return self.own(self.shared(x))


@pytest.mark.parametrize("named", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("levels", [("O5", "O5"), ("O4", "O5"), ("O4", "O4")])
def test_a_module_that_two_calls_share_cannot_be_named(levels, named):
    """The second call cast what the first kept, and a forward failed; at O4 both kept it."""
    shared = nn.Sequential(nn.Linear(8, 8))
    models = [Around(shared), Around(shared)]
    given = [policy(torch.bfloat16, **({"shared": "float32"} if one else {})) for one in named]
    amp.initialize(models[0], opt_level=levels[0], policy=given[0], verbosity=0)
    before = {name: p.dtype for name, p in models[0].named_parameters()}
    match = "names 'shared' of the Around, and the Around shares it"
    with pytest.raises(ValueError, match=match):
        amp.initialize(models[1], opt_level=levels[1], policy=given[1], verbosity=0)
    assert {name: p.dtype for name, p in models[0].named_parameters()} == before
    assert {p.dtype for p in models[1].own.parameters()} == {torch.float32}
    x = torch.randn(2, 8, device="cpu", dtype=torch.float32)
    assert torch.isfinite(models[0](x)).all()
    amp.reset()
    amp.initialize(models[1], opt_level=levels[1], policy=given[1], verbosity=0)
    assert torch.isfinite(models[1](x)).all()


def test_a_shared_module_that_nobody_names_and_a_model_that_is_initialized_again():
    shared = nn.Linear(8, 8)
    models = [Around(shared), Around(shared)]
    amp.initialize(models[0], opt_level="O4", policy=policy(torch.bfloat16, own="float32"))
    amp.initialize(models[1], opt_level="O4", policy=policy(torch.bfloat16, own="float32"))
    x = torch.randn(2, 8, device="cpu", dtype=torch.float32)
    assert [products(one, x) for one in models] == [
        {"shared": torch.bfloat16, "own": torch.float32}
    ] * 2
    amp.initialize(models[0], opt_level="O4", policy=policy(torch.bfloat16), verbosity=0)
    assert products(models[0], x) == {"shared": torch.bfloat16, "own": torch.bfloat16}

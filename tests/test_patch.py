"""``apex.patch``: models of transformers, small and with random weights."""

import copy

import pytest
import torch
from torch import nn

import apex
from apex import amp
from apex.ops import _runtime
from apex.patching import _layers as layers
from tests.checkpoints import reloaded
from tests.counted import Counted
from tests.tolerance import PATCHED, PATCHED_FEW, PATCHED_LOSS, PATCHED_NORM, rms

transformers = pytest.importorskip("transformers")

SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0,
}  # fmt: skip
T5 = {
    "vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4,
    "dropout_rate": 0.0, "feed_forward_proj": "gated-gelu", "decoder_start_token_id": 0,
}  # fmt: skip
# Many numbers in each gradient, so that chance does not decide between two errors.
WIDE = {**SMALL, "hidden_size": 128, "head_dim": 64, "num_attention_heads": 2,
        "num_key_value_heads": 1}  # fmt: skip
MLPS, GELUS = "2 x {}MLP by SwiGLUMLP", "left: 2 x {}MLP: its activation is GELU"
LOSS = "1 x ForCausalLMLoss by causal_lm_loss"
KINDS = {  # configuration, model, report's norms, and its MLPs
    "Llama": ("LlamaConfig", "LlamaForCausalLM", "5 x LlamaRMSNorm by RMSNorm", MLPS),
    "Mistral": ("MistralConfig", "MistralForCausalLM", "5 x MistralRMSNorm by RMSNorm", MLPS),
    "Qwen2": ("Qwen2Config", "Qwen2ForCausalLM", "5 x Qwen2RMSNorm by RMSNorm", MLPS),
    "Qwen3": ("Qwen3Config", "Qwen3ForCausalLM", "9 x Qwen3RMSNorm by RMSNorm", MLPS),
    "Gemma": ("GemmaConfig", "GemmaForCausalLM", "5 x GemmaRMSNorm by RMSNormZeroCentered", GELUS),
    "Gemma3": (
        "Gemma3TextConfig", "Gemma3ForCausalLM", "13 x Gemma3RMSNorm by RMSNormZeroCentered", GELUS,
    ),
    "T5": (
        "T5Config", "T5ForConditionalGeneration", "12 x T5LayerNorm by T5RMSNorm",
        "left: 4 x T5DenseGatedActDense: its activation is NewGELUActivation, not SiLU",
    ),
}  # fmt: skip
kinds = pytest.mark.parametrize("kind", KINDS)


def made(kind, seed=0, dtype=torch.float32, sizes=SMALL):
    """A model whose norms are not all ones, and whose activations are of size 1."""
    config, model, *_ = KINDS[kind]
    torch.manual_seed(seed)
    options = T5 if kind == "T5" else sizes
    model = getattr(transformers, model)(getattr(transformers, config)(**options)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 1:
                weight.add_(torch.randn(weight.shape, device="cpu", dtype=weight.dtype) / 5)
            elif kind != "T5":
                weight.mul_(128.0 / sizes["hidden_size"])
    return model.to(dtype)


def tokens(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 64, (3, 10), generator=generator, device="cpu", dtype=torch.int64)


def results(model, path="triton", seed=0):
    """Loss and gradients, in float64."""
    model.zero_grad()
    with _runtime.use(path):
        loss = model(input_ids=tokens(seed), labels=tokens(seed)).loss
        loss.backward()
    gradients = {name: p.grad.double() for name, p in model.named_parameters()}
    return {"loss": loss.detach().double(), **gradients}


def norms_are_ours_already(kind):
    """transformers 4 takes Apex's norm for T5 itself; 5 has ceased to."""
    return kind == "T5" and transformers.__version__.startswith("4.")


# -- what is replaced ------------------------------------------------------------------------------


@kinds
def test_report_and_undo(kind):
    model = made(kind)
    before = {name: (module, type(module)) for name, module in model.named_modules()}
    state, loss = model.state_dict(), results(model, "reference")["loss"]
    report = apex.patch(model)
    *_, norms, mlps = KINDS[kind]
    said = str(report)
    if not norms_are_ours_already(kind):
        assert norms in said
    assert mlps.format(kind) in said
    assert (LOSS in said) == (kind != "T5")
    assert list(model.state_dict()) == list(state)
    assert all(module is before[name][0] for name, module in model.named_modules())
    assert str(apex.patch(model)).replace("left: ", "").count("by") == 0  # nothing is left to do
    report.undo()
    assert all(type(module) is before[name][1] for name, module in model.named_modules())
    assert torch.equal(results(model, "reference")["loss"], loss)
    report.undo()  # again: nothing


OTHERS = {  # what is said of models whose classes are not listed
    "Phi3": ("3 x Phi3RMSNorm by RMSNorm", "left: 1 x Phi3MLP: its layers are not gate_proj"),
    "Olmo2": ("5 x Olmo2RMSNorm by RMSNorm", "1 x Olmo2MLP by SwiGLUMLP"),
    "Granite": ("3 x GraniteRMSNorm by RMSNorm", "1 x GraniteMLP by SwiGLUMLP"),
    "Glm4": ("5 x Glm4RMSNorm by RMSNorm", "left: 1 x Glm4MLP: its layers are not gate_proj"),
    "Cohere": (
        "left: 2 x CohereLayerNorm: apex has no norm with the same results",
        "1 x CohereMLP by SwiGLUMLP",
    ),
    "Starcoder2": ("left: 3 x LayerNorm: torch's own layer, which is faster",),
}


def made_of(family):
    torch.manual_seed(0)
    options = {**SMALL, "num_hidden_layers": 1}
    options.pop("head_dim")
    config = getattr(transformers, f"{family}Config")(**options)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 1:
                weight.add_(torch.randn(weight.shape, device="cpu", dtype=weight.dtype) / 5)
    return model


@pytest.mark.parametrize("family", OTHERS)
def test_a_module_of_a_class_that_is_not_listed_goes_by_its_numbers(family):
    model = made_of(family)
    wanted = results(model, "reference")
    report = apex.patch(model)
    assert all(text in str(report) for text in OTHERS[family])
    norms = {name for name, one in model.named_modules() if "Norm" in type(one).__name__}
    assert norms <= {*report.replaced, *report.left}
    found = results(model, "reference")
    assert found.keys() == wanted.keys()
    for name, exact in wanted.items():
        assert rms(found[name] - exact) <= PATCHED_NORM * rms(exact)


def test_a_model_of_which_nothing_was_replaced_warns():
    config = transformers.GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=64)
    model = transformers.GPT2LMHeadModel(config)
    with pytest.warns(UserWarning, match="replaced in the GPT2LMHeadModel.*norms, MLPs"):
        report = apex.patch(model)
    assert report.replaced == {}
    assert all("torch's own layer" in why for why in report.left.values())
    assert len(report.left) == 3
    with pytest.warns(UserWarning, match="nothing was replaced in the Linear"):
        assert str(apex.patch(nn.Linear(2, 2))) == "nothing to replace"


def test_comparing_numbers_runs_no_hook_and_leaves_weights_alone():
    model = made_of("Olmo2")
    mlp, calls = model.model.layers[0].mlp, []
    for one in (mlp, mlp.gate_proj, model.model.norm):
        one.register_forward_pre_hook(lambda *_: calls.append(1))
    before = {name: (one, one.clone()) for name, one in model.named_parameters()}
    apex.patch(model)
    assert calls == []
    for name, one in model.named_parameters():
        assert one is before[name][0]
        assert torch.equal(one, before[name][1])


def test_a_copy_and_a_pickle_are_patched():
    model = made("Llama")
    others = []
    can_be_pickled = not hasattr(model.model.layers[0].self_attn, "_kernel_funcs")  # of kernels
    report = apex.patch(model)
    others.append(copy.deepcopy(model))
    if can_be_pickled:
        others.append(reloaded(model))
    wanted = results(model)
    report.undo()
    for other in others:
        assert type(other.model.norm) is layers.RMSNorm
        assert other.loss_function is layers.causal_lm_loss
        found = results(other)
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_what_the_program_has_changed_stays():
    model = made("Llama")
    norm, mlp = model.model.norm, model.model.layers[0].mlp
    norm.forward = lambda x: x

    def own(logits, labels, **kwargs):
        return logits.sum()

    model.loss_function = own
    report = apex.patch(model)
    assert "replaced its forward" in report.left["model.norm"]
    assert "replaced it" in report.left["loss_function"]
    mlp.__class__ = nn.Identity
    report.undo()
    assert model.loss_function is own
    assert type(mlp) is nn.Identity


def test_what_is_no_module_is_refused():
    with pytest.raises(TypeError, match=r"patch: model is a str; pass a torch\.nn\.Module"):
        apex.patch("model")


# -- numbers ---------------------------------------------------------------------------------------

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kind", ["Llama", "Gemma", "T5"])
def test_dtypes_and_values_of_norms(kind, autocast):
    if norms_are_ours_already(kind):
        pytest.skip("transformers 4 takes Apex's norm for T5 itself")
    model = made(kind)
    norm = model.encoder.final_layer_norm if kind == "T5" else model.model.norm
    wide = torch.randn(5, 32, device="cpu", dtype=torch.float32)
    for weight in FLOATS:
        norm.to(weight)
        for dtype in (*FLOATS, torch.float64):
            x = wide.to(dtype)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                theirs = norm(x)
                report = apex.patch(model)
                ours = norm(x)
            report.undo()
            assert ours.dtype == theirs.dtype, (weight, dtype)
            torch.testing.assert_close(ours, theirs, rtol=PATCHED_NORM, atol=PATCHED_NORM)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_loss_is_transformers(dtype):
    from transformers.loss.loss_utils import ForCausalLMLoss

    logits = torch.randn(2, 6, 11, device="cpu", dtype=torch.float64).to(dtype)
    labels = torch.randint(0, 11, (2, 6), device="cpu", dtype=torch.int64)
    labels[0, 2:4] = -100
    ways = [{}, {"num_items_in_batch": 5}, {"ignore_index": 3}, {"shift_labels": labels.clone()}]
    ways.append({"num_items_in_batch": torch.tensor(7, device="cpu", dtype=torch.int64)})
    for way in ways:
        pair = []
        for function in (layers.causal_lm_loss, ForCausalLMLoss):
            leaf = logits.clone().requires_grad_()
            given = labels.masked_fill(labels == -100, 3) if "ignore_index" in way else labels
            loss = function(leaf, given, vocab_size=11, **way)
            loss.backward()
            pair.append([loss.detach().float(), leaf.grad])
        torch.testing.assert_close(*pair)


def test_the_loss_of_many_logits_needs_memory_for_their_gradient_alone():
    """As docs/fused-layers.md says: the bytes of the logits once, and transformers' six times."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    needed = []
    for function in (layers.causal_lm_loss, ForCausalLMLoss):
        logits = torch.randn(1, 160, 2**15, device="cpu", dtype=torch.bfloat16, requires_grad=True)
        labels = torch.randint(2**15, (1, 160), device="cpu")
        with Counted() as counted:
            function(logits, labels, vocab_size=2**15).backward()
        needed.append(round(counted.peak / logits.nbytes, 2))
    assert needed == [1.0, 6.0]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kind", ["Llama", "Qwen3", "Gemma3", "T5"])
def test_errors_with_kernels_are_the_originals(kind, dtype):
    """Not bfloat16: the interpreter cuts bits off where a GPU rounds."""
    if norms_are_ours_already(kind):
        pytest.skip("transformers 4 takes Apex's norm for T5 itself")
    errors = {}
    for seed in range(5):
        model = made(kind, seed, dtype, WIDE)
        exact = copy.deepcopy(model).double()
        apex.patch(exact)  # the originals' norms are float32 in float64 models, too
        exact = results(exact, "reference", seed)
        theirs = results(model, "reference", seed)
        apex.patch(model)
        ours = results(model, "triton", seed)
        for name, of_all in exact.items():
            pools = errors.setdefault(name, ([], [], []))
            for pool, x in zip(pools, (ours[name], theirs[name], of_all), strict=True):
                pool.append((x if pool is pools[2] else x - of_all).flatten())
    ratios = {}
    for name, pools in errors.items():
        error, original, size = (rms(torch.cat(pool)) for pool in pools)
        # A rounding of float32; of few numbers, as the losses are, a unit in the last place.
        bits, bound = (24, PATCHED) if len(pools[2][0]) > 100 else (23, PATCHED_FEW)
        original = max(original, size * 2.0**-bits)
        if original < 0.01 * size:  # else the dtype does not decide it
            ratios[name] = error / original / bound
    assert len(ratios) > 0.9 * len(errors)
    worst = max(ratios, key=ratios.get)
    assert ratios[worst] <= 1, (worst, ratios[worst])


# -- what programs do with models ------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["Llama", pytest.param("T5", marks=pytest.mark.slow)])
def test_generate_writes_the_same(kind):
    model = made(kind)
    options = {"max_new_tokens": 3, "do_sample": False}
    plain = model.generate(tokens(), **options)
    apex.patch(model)
    with _runtime.use("triton"):
        assert torch.equal(model.generate(tokens(), **options), plain)


def test_gradient_checkpointing_has_the_same_bits():
    """Without transformers' cache in both: it gives attention keys of other strides."""
    model = made("Llama").train()
    model.config.use_cache = False
    apex.patch(model)
    plain = results(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    again = results(model)
    assert all(torch.equal(again[name], plain[name]) for name in plain)


@pytest.mark.parametrize("first", ["patch", "initialize"])
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_levels_of_amp(level, first):
    losses = []
    for patched in (False, True):
        model = made("Llama").train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        if patched and first == "patch":
            apex.patch(model)
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        if patched and first == "initialize":
            assert apex.patch(model).replaced
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(input_ids=tokens(), labels=tokens()).loss
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            optimizer.step()
        losses.append(loss.item())
        amp.reset()
    assert losses[1] == pytest.approx(losses[0], rel=PATCHED_LOSS)

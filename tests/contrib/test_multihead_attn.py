"""``apex.contrib.multihead_attn`` against the formulas in float64, from the original's layout."""

import copy
import importlib
import inspect
import math

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from apex import amp
from apex.contrib.multihead_attn import (
    EncdecMultiheadAttn,
    SelfMultiheadAttn,
    fast_mask_softmax_dropout_func,
)
from apex.contrib.multihead_attn._masks import join_masks
from apex.contrib.multihead_attn.fast_self_multihead_attn_func import fast_self_attn_func
from apex.ops._check import ArgumentError
from tests.tolerance import (
    ATTENTION_GRADIENTS,
    PRODUCTS,
    assert_close_in_rms,
    assert_one_rounding,
    errors_in_eps,
)
from tests.vmapped import assert_backward_under_vmap

EMBED, HEADS, TARGET, SOURCE, BATCH = 24, 3, 7, 5, 4
DIM = EMBED // HEADS

# Name: class, its options, and which masks the forward gets.
CASES = {
    "self": (SelfMultiheadAttn, {}, ""),
    "self, bias": (SelfMultiheadAttn, {"bias": True}, "padding"),
    "self, time mask": (SelfMultiheadAttn, {}, "time"),
    "self, separate": (SelfMultiheadAttn, {"separate_qkv_params": True}, "padding time"),
    "self, separate, bias": (SelfMultiheadAttn, {"separate_qkv_params": True, "bias": True}, ""),
    "self, additive": (SelfMultiheadAttn, {"mask_additive": True, "bias": True}, "additive"),
    "self, additive, time": (SelfMultiheadAttn, {"mask_additive": True}, "additive time"),
    "self, separate, norm": (
        SelfMultiheadAttn,
        {"separate_qkv_params": True, "include_norm_add": True},
        "",
    ),
    "self, norm": (SelfMultiheadAttn, {"include_norm_add": True, "bias": True}, "padding"),
    "self, default": (SelfMultiheadAttn, {"include_norm_add": True, "impl": "default"}, ""),
    "encdec": (EncdecMultiheadAttn, {}, ""),
    "encdec, bias": (EncdecMultiheadAttn, {"bias": True}, "padding"),
    "encdec, norm": (EncdecMultiheadAttn, {"include_norm_add": True, "bias": True}, "time"),
    "encdec, default": (
        EncdecMultiheadAttn,
        {"include_norm_add": True, "impl": "default"},
        "padding time",
    ),
}


def _case(name, dtype):
    """Make a layer, its query and key, and its masks."""
    kind, options, masks = CASES[name]
    layer = kind(EMBED, HEADS, **options).to(dtype)
    for parameter in layer.parameters():  # biases other than 0, norms other than 1
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter)
    query = torch.randn(TARGET, BATCH, EMBED).to(dtype).requires_grad_()
    encdec = kind is EncdecMultiheadAttn
    key = torch.randn(SOURCE, BATCH, EMBED).to(dtype).requires_grad_() if encdec else query
    source = len(key)
    padding = torch.rand(BATCH, source) < 0.3
    padding[0], padding[1] = True, False  # masked as a whole; not at all
    time = torch.rand(TARGET, source) < 0.3
    time[2] = True
    passed = {}
    if "padding" in masks:
        passed["key_padding_mask"] = padding.to(torch.uint8)
    if "additive" in masks:
        numbers = torch.randn(BATCH, source).masked_fill(padding, -math.inf)
        passed["key_padding_mask"] = numbers.to(dtype)
    if "time" in masks:
        passed["attn_mask"] = time
    return layer, query, key, passed


def _projected(layer, query, key):
    """Yield the query, key and value weights and biases of each head."""
    p = dict(layer.named_parameters())
    zero = query.new_zeros(3 * EMBED)
    for head in range(HEADS):
        mine = slice(head * DIM, (head + 1) * DIM)
        if "q_weight" in p:
            yield [(p[f"{n}_weight"][mine], p.get(f"{n}_bias", zero)[mine]) for n in "qkv"]
        elif "in_proj_weight" in p:
            rows = [slice((3 * head + i) * DIM, (3 * head + i + 1) * DIM) for i in range(3)]
            bias = p.get("in_proj_bias", zero)
            yield [(p["in_proj_weight"][each], bias[each]) for each in rows]
        else:
            rows = [slice((2 * head + i) * DIM, (2 * head + i + 1) * DIM) for i in range(2)]
            bias = p.get("in_proj_bias_kv", zero)
            yield [
                (p["in_proj_weight_q"][mine], p.get("in_proj_bias_q", zero)[mine]),
                *((p["in_proj_weight_kv"][each], bias[each]) for each in rows),
            ]


def _formula(layer, query, key, key_padding_mask=None, attn_mask=None):
    """Compute what the layer is defined as, by matrix products and exponentials, one by one."""
    x, memory = query, key
    if layer.include_norm_add:
        p = dict(layer.named_parameters())
        names = ("lyr_nrm_gamma_weights", "lyr_nrm_beta_weights")
        names = names if names[0] in p else ("lyr_nrm.weight", "lyr_nrm.bias")
        centered = query - query.mean(-1, keepdim=True)
        x = centered / (centered.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        x = x * p[names[0]] + p[names[1]]
    if isinstance(layer, SelfMultiheadAttn):
        memory = x
    rows = []
    for b in range(query.shape[1]):
        added = query.new_zeros(len(query), len(key))
        if key_padding_mask is not None and key_padding_mask.is_floating_point():
            added = added + key_padding_mask[b]
        elif key_padding_mask is not None:
            added = added.masked_fill(key_padding_mask[b].bool(), -math.inf)
        if attn_mask is not None:
            added = added.masked_fill(attn_mask, -math.inf)
        found = []
        for (wq, bq), (wk, bk), (wv, bv) in _projected(layer, query, key):
            q, k, v = x[:, b] @ wq.T + bq, memory[:, b] @ wk.T + bk, memory[:, b] @ wv.T + bv
            e = (q @ k.T / math.sqrt(DIM) + added).exp()
            found.append(e / e.sum(-1, keepdim=True).clamp(min=1e-300) @ v)
        rows.append(torch.cat(found, -1))
    out = torch.stack(rows, 1) @ layer.out_proj_weight.T
    if layer.bias:
        out = out + layer.out_proj_bias
    return query + out if layer.include_norm_add else out


def _results(function, layer, query, key, dy):
    """Return the output and gradients; the vectors' joined: that of a key's bias is always 0."""
    y = function()
    leaves = [query, *([key] if key is not query else []), *layer.parameters()]
    grads = torch.autograd.grad(y, leaves, dy.to(y.dtype))
    vectors = [y.new_zeros(1), *(grad for grad in grads if grad.dim() == 1)]
    return [y, *(grad for grad in grads if grad.dim() > 1), torch.cat(vectors)]


@pytest.mark.onednn
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float64) for name in CASES),
        *(
            (name, dtype)
            for name in ("self, norm", "self, additive, time", "encdec, bias")
            for dtype in (torch.float32, torch.float16, torch.bfloat16)
        ),
    ],
    ids=str,
)
def test_against_the_formula(name, dtype):
    layer, query, key, masks = _case(name, dtype)
    wide = copy.deepcopy(layer).double()
    wide_query = query.detach().double().requires_grad_()
    wide_key = wide_query if key is query else key.detach().double().requires_grad_()
    wide_masks = {n: m.double() if m.is_floating_point() else m for n, m in masks.items()}
    dy = torch.randn_like(query)
    found = _results(lambda: layer(query, key, key, **masks)[0], layer, query, key, dy)
    exact = _results(
        lambda: _formula(wide, wide_query, wide_key, **wide_masks), wide, wide_query, wide_key, dy
    )
    assert_close_in_rms(found[0], exact[0].detach(), PRODUCTS[dtype])
    for actual, wanted in zip(found[1:], exact[1:], strict=True):
        assert actual.dtype == dtype
        assert_close_in_rms(actual, wanted, ATTENTION_GRADIENTS[dtype])


PASSED = {  # argument of the original's functions -> parameter of the layer
    "lyr_nrm_gamma_weights": "lyr_nrm_gamma_weights",
    "lyr_nrm_beta_weights": "lyr_nrm_beta_weights",
    "input_weights": "in_proj_weight",
    "input_weights_q": "in_proj_weight_q",
    "input_weights_kv": "in_proj_weight_kv",
    "output_weights": "out_proj_weight",
    "input_biases": "in_proj_bias",
    "input_biases_q": "in_proj_bias_q",
    "input_biases_kv": "in_proj_bias_kv",
    "output_biases": "out_proj_bias",
}


@pytest.mark.parametrize(
    ("module", "name", "options", "masks"),
    [
        ("fast_self_multihead_attn", "self", {}, "padding"),
        ("fast_self_multihead_attn", "self", {"bias": True, "mask_additive": True}, "additive"),
        ("self_multihead_attn", "self", {"bias": True, "impl": "default"}, "time"),
        ("fast_self_multihead_attn_norm_add", "self", {"include_norm_add": True}, "time"),
        ("fast_encdec_multihead_attn", "encdec", {}, "padding"),
        ("encdec_multihead_attn", "encdec", {"bias": True, "impl": "default"}, "padding"),
        ("fast_encdec_multihead_attn_norm_add", "encdec", {"include_norm_add": True}, ""),
    ],
)
def test_the_functions_inside_of_layers(module, name, options, masks, monkeypatch):
    """Each is its layer, which is tested above, bit for bit; by the original's arguments."""
    monkeypatch.setitem(CASES, "this", (CASES[name][0], options, masks))
    layer, query, key, passed = _case("this", torch.float32)
    padding, time = passed.get("key_padding_mask"), passed.get("attn_mask")
    mask, parameters = padding if time is None else time, dict(layer.named_parameters())
    given = {
        "use_time_mask": time is not None, "is_training": True, "heads": HEADS, "inputs": query,
        "scale": layer.scaling, "inputs_q": query, "inputs_kv": key, "dropout_prob": 0.0,
        "mask": mask, "pad_mask": mask, "mask_additive": layer.mask_additive,
        "is_additive_mask": layer.mask_additive,
        **{argument: parameters.get(own) for argument, own in PASSED.items()},
    }  # fmt: skip
    found = importlib.import_module(f"apex.contrib.multihead_attn.{module}_func")
    function = getattr(found, f"{module.replace('multihead_', '')}_func")
    args = [given[argument] for argument in inspect.signature(function).parameters]
    dy = torch.randn_like(query)
    ours = _results(lambda: function(*args), layer, query, key, dy)
    wanted = _results(lambda: layer(query, key, key, **passed)[0], layer, query, key, dy)
    assert all(map(torch.equal, ours, wanted))


def test_arguments_of_these_functions():
    x, weight = torch.ones(3, 2, 8), torch.ones(24, 8)
    given = (False, True, 3, x, weight, weight[:8], None, None, None, False, 0.0)
    with pytest.raises(ValueError, match="fast_self_attn_func: heads is 3 for 8 features"):
        fast_self_attn_func(*given)
    mask = torch.ones(3, 5, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"fast_self_attn_func: key_padding_mask has shape"):
        fast_self_attn_func(*given[:2], 2, *given[3:8], mask, *given[9:])


def test_names_shapes_and_order_of_parameters():
    """Those of the original: checkpoints name them, and states of optimizers number them."""

    def shapes(layer):
        return {name: tuple(value.shape) for name, value in layer.state_dict().items()}

    def listed(layer):
        return " ".join(name for name, _ in layer.named_parameters())

    assert shapes(SelfMultiheadAttn(8, 2, bias=True)) == {
        "in_proj_weight": (24, 8),
        "out_proj_weight": (8, 8),
        "in_proj_bias": (24,),
        "out_proj_bias": (8,),
    }
    assert shapes(EncdecMultiheadAttn(8, 2, bias=True)) == {
        "in_proj_weight_q": (8, 8),
        "in_proj_weight_kv": (16, 8),
        "out_proj_weight": (8, 8),
        "in_proj_bias_q": (8,),
        "in_proj_bias_kv": (16,),
        "out_proj_bias": (8,),
    }
    everything = {"bias": True, "include_norm_add": True}
    separate = "q_weight k_weight v_weight out_proj_weight q_bias k_bias v_bias out_proj_bias"
    fast = "lyr_nrm_gamma_weights lyr_nrm_beta_weights"
    layer = SelfMultiheadAttn(8, 2, separate_qkv_params=True, **everything)
    assert listed(layer) == f"{separate} {fast}"
    assert layer.lyr_nrm is None
    layer = SelfMultiheadAttn(8, 2, separate_qkv_params=True, impl="default", **everything)
    assert listed(layer) == f"{separate} lyr_nrm.weight lyr_nrm.bias"
    assert layer.lyr_nrm_gamma_weights is layer.lyr_nrm_beta_weights is None
    assert listed(EncdecMultiheadAttn(8, 2, include_norm_add=True)) == (
        f"in_proj_weight_q in_proj_weight_kv out_proj_weight {fast}"
    )
    assert "8, 2, dropout=0.0, bias=True" in repr(layer)


@pytest.mark.parametrize("impl", ["fast", "default"])
def test_initial_weights(impl):
    """Every matrix as if its projections were square ones: uniform up to sqrt(6 / (2 E))."""
    options = {"bias": True, "include_norm_add": True, "impl": impl}
    layers = [
        SelfMultiheadAttn(64, 2, **options),
        SelfMultiheadAttn(64, 2, separate_qkv_params=True, **options),
        EncdecMultiheadAttn(64, 2, **options),
    ]
    for layer in layers:
        for parameter in layer.parameters():
            with torch.no_grad():
                parameter.fill_(5.0)
        layer.reset_parameters()
        for name, parameter in layer.named_parameters():
            if parameter.dim() == 2:
                limit = math.sqrt(6 / 128)
                assert 0.98 * limit < parameter.max() <= limit, name
                assert 0.98 * limit < -parameter.min() <= limit, name
            else:
                ones = name in ("lyr_nrm_gamma_weights", "lyr_nrm.weight")
                assert torch.equal(parameter, torch.full_like(parameter, float(ones))), name


def _shows_attention(**options):
    """Make a layer of one head whose output is its attention weights: queries 0, values x."""
    layer = SelfMultiheadAttn(50, 1, 0.25, separate_qkv_params=True, **options)
    with torch.no_grad():
        layer.q_weight.zero_()
        layer.v_weight.copy_(torch.eye(50))
        layer.out_proj_weight.copy_(torch.eye(50))
    return layer, torch.eye(50)[:, None, :].expand(50, 40, 50).contiguous()


def test_dropout_of_attention_weights():
    layer, x = _shows_attention()
    weights = layer(x, x, x)[0]
    kept = weights != 0
    torch.testing.assert_close(weights[kept], torch.full_like(weights[kept], 1 / 50 / 0.75))
    assert abs(kept.float().mean() - 0.75) < 5 * (0.25 * 0.75 / kept.numel()) ** 0.5
    every = torch.full_like(weights, 1 / 50)
    torch.testing.assert_close(layer(x, x, x, is_training=False)[0], every)
    torch.testing.assert_close(layer.eval()(x, x, x)[0], every)


def test_dropout_before_the_residual():
    layer, x = _shows_attention(include_norm_add=True, bias=True)
    with torch.no_grad():
        layer.v_weight.zero_()
        layer.out_proj_bias.fill_(3.0)  # all that the attention gives
    added = layer(x, x, x)[0] - x
    kept = added != 0
    torch.testing.assert_close(added[kept], torch.full_like(added[kept], 3.0 / 0.75))
    assert abs(kept.float().mean() - 0.75) < 5 * (0.25 * 0.75 / kept.numel()) ** 0.5
    assert torch.equal(layer(x, x, x, is_training=False)[0], x + 3.0)


def test_no_row_is_masked_as_a_whole_for_torch():
    """What torch makes of such a row is not the same in all its versions and kernels."""
    padding, time = torch.tensor([[1, 1], [0, 1]]), torch.tensor([[True, False], [False, False]])
    mask, empty = join_masks(padding, time, False, torch.float32)
    assert torch.equal(
        mask[:, 0], torch.tensor([[[True, True], [True, True]], [[True, True], [True, False]]])
    )
    assert empty.flatten().tolist() == [True, True, True, False]
    numbers = torch.tensor([[-math.inf, -1e9], [2.0, -math.inf]])
    mask, empty = join_masks(numbers, None, True, torch.float16)  # where -1e9 is -inf
    assert torch.equal(mask.flatten(), torch.tensor([0.0, 0.0, 2.0, -math.inf]).half())
    assert empty.flatten().tolist() == [True, False]


@pytest.mark.parametrize("sizes", [(0, 5, 2), (5, 0, 2), (5, 5, 0)], ids=str)
def test_empty(sizes):
    target, source, batch = sizes
    layer = EncdecMultiheadAttn(8, 2, bias=True, include_norm_add=True)
    query, key = torch.randn(target, batch, 8), torch.randn(source, batch, 8)
    for mask in (None, torch.zeros(batch, source, dtype=torch.bool)):
        y = layer(query, key, key, mask)[0]
        y.sum().backward()
        assert y.shape == query.shape
        assert torch.isfinite(y).all()


class _Caller(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(
        self, query, key, padding: torch.Tensor | None = None, time: torch.Tensor | None = None
    ):
        return self.layer(query, key, key, padding, False, time, True)[0]


@pytest.mark.parametrize("name", ["self, norm", "self, additive, time", "encdec, default"])
def test_compiled_and_scripted(name):
    layer, query, key, masks = _case(name, torch.float32)
    masks = [masks.get("key_padding_mask"), False, masks.get("attn_mask"), True]
    y = layer(query, key, key, *masks)[0]
    assert torch.equal(layer(query, key, key, *masks)[0], y)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(query, key, key, *masks)[0], y)

    scripted = torch.jit.script(_Caller(layer))
    assert torch.equal(scripted(query, key, masks[0], masks[2]), y)


def test_traced():
    """Sizes may be others than in the call that was traced."""
    layer, query, key, _ = _case("encdec, bias", torch.float32)
    mask = torch.zeros(BATCH, SOURCE, dtype=torch.bool)
    traced = torch.jit.trace(_Caller(layer), (query, key, mask))
    query, key = torch.randn(3, BATCH + 1, EMBED), torch.randn(SOURCE + 2, BATCH + 1, EMBED)
    mask = torch.rand(BATCH + 1, SOURCE + 2) < 0.3
    torch.testing.assert_close(traced(query, key, mask), layer(query, key, key, mask)[0])


@pytest.mark.onednn
def test_under_autocast():
    """Products and norm in 16 bits; a float32 residual makes the sum float32."""
    for name, wanted in (("self, additive", torch.bfloat16), ("self, norm", torch.float32)):
        layer, query, key, masks = _case(name, torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(query, key, key, **masks)[0]
        y.sum().backward()
        assert (y.dtype, layer.in_proj_weight.grad.dtype) == (wanted, torch.float32)
        wide = query.double()
        exact = _formula(copy.deepcopy(layer).double(), wide, wide, **masks).detach()
        found = errors_in_eps(y, exact, torch.bfloat16)
        assert found <= PRODUCTS[torch.bfloat16]


def test_autocast_casts_no_float64():
    layer = EncdecMultiheadAttn(8, 2)
    with torch.autocast("cpu", torch.bfloat16):
        for query, key in ((X.double(), X), (X, X.double())):
            with pytest.raises(ArgumentError, match="float64.* Pass one floating dtype for all.$"):
                layer(query, key, key)
        x = X.double()
        assert layer.double()(x, x, x)[0].dtype == torch.float64


@pytest.mark.onednn
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_under_amp(level):
    layer, query, key, masks = _case("self, norm", torch.float32)
    exact = layer(query, key, key, **masks)[0].detach().double()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    try:
        layer, optimizer = amp.initialize(layer, optimizer, opt_level=level, verbosity=0)
        y = layer(query, key, key, **masks)[0]
        with amp.scale_loss(y.float().square().mean(), optimizer) as loss:
            loss.backward()
        assert errors_in_eps(y, exact, torch.float16) <= PRODUCTS[torch.float16]
        optimizer.step()
        after = layer(query, key, key, **masks)[0]
        assert after.square().mean() < y.square().mean()
    finally:
        amp.reset()


@pytest.mark.filterwarnings(
    "ignore:There is a performance drop because we have not yet:UserWarning"
)
def test_vmap():
    """On a CPU torch warns that it computes one element after the other."""
    layer, query, key, masks = _case("encdec, bias", torch.float32)
    assert_backward_under_vmap(
        layer(query, key, key, **masks)[0], [query, key, *layer.parameters()]
    )
    queries = torch.randn(3, *query.shape)
    found = torch.vmap(lambda each: layer(each, key, key, **masks)[0])(queries)
    torch.testing.assert_close(found[1], layer(queries[1], key, key, **masks)[0])


def test_gradients_of_gradients():
    """Torch's fused kernels refuse; its composed one is right."""
    layer = SelfMultiheadAttn(4, 2, include_norm_add=True, mask_additive=True).double()
    mask = torch.tensor([[-math.inf, -math.inf], [0.5, -math.inf]], dtype=torch.float64)
    x = torch.randn(2, 2, 4, dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(layer(x, x, x, mask)[0].square().sum(), x, create_graph=True)
    if x.is_cpu:
        with pytest.raises(RuntimeError, match="flash_attention.*backward is not implemented"):
            grad.sum().backward()
    with sdpa_kernel(SDPBackend.MATH):
        assert torch.autograd.gradgradcheck(lambda x: layer(x, x, x, mask)[0], x)


X = torch.zeros(5, 3, 8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"query": X[0]}, r"query has shape \[3, 8\]; pass \(time, batch, embed_dim\)"),
        ({"query": X[..., :4]}, "with embed_dim 8"),
        ({"query": X.double()}, "query torch.float64, key torch.float32, out_proj_weight torch.f"),
        ({"query": X.long()}, "query is torch.int64; allowed are"),
        ({"query": X.to("meta")}, "key is on cpu and query on meta"),
        ({"key": None}, "key is a NoneType; pass a tensor"),
        ({"key": X[:, :2]}, r"key has shape \[5, 2, 8\].*Pass \[5, 3, 8\]"),
        ({"value": X[:4]}, r"value has shape \[4, 3, 8\].*one tensor.*Pass \[5, 3, 8\]"),
        ({"key_padding_mask": torch.zeros(5, 3).bool()}, r"shape \[5, 3\].*Pass \[3, 5\]"),
        ({"key_padding_mask": torch.zeros(3, 5)}, "is torch.float32; pass torch.bool or"),
        ({"key_padding_mask": torch.ones(3, 5).long()}, "is torch.int64; pass torch.bool or"),
        ({"attn_mask": torch.zeros(3, 5).bool()}, r"attn_mask has shape.*Pass \[5, 5\]"),
        ({"attn_mask": torch.zeros(5, 5)}, "attn_mask is torch.float32"),
        ({"attn_mask": torch.zeros(5, 5, device="meta").bool()}, "attn_mask is on meta"),
    ],
    ids=str,
)
def test_refused_arguments(arguments, message):
    layer = EncdecMultiheadAttn(8, 2)
    with pytest.raises(ArgumentError, match=f"EncdecMultiheadAttn: .*{message}"):
        layer(**{"query": X, "key": X, "value": X, **arguments})


def test_self_attention_refuses_another_sequence():
    layer = SelfMultiheadAttn(8, 2)
    y, weights = layer(X, X, X, need_weights=True)
    assert weights is None
    assert torch.equal(layer(X, None, None)[0], y)
    with pytest.raises(ArgumentError, match="key has shape.*one tensor, of shape"):
        layer(X, X[:4], X[:4])


def test_additive_mask_must_be_numbers():
    layer = SelfMultiheadAttn(8, 2, mask_additive=True)
    with pytest.raises(ArgumentError, match="is torch.bool and mask_additive is True. Pass float"):
        layer(X, X, X, torch.zeros(3, 5).bool())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((8, 3), "embed_dim is 8 and num_heads 3"),
        ((8, 0), "embed_dim is 8 and num_heads 0"),
        ((8, 2, 1.5), "dropout is 1.5; pass a number from 0 to 1"),
        ((8, 2, 0.0, False, False, "faster"), "impl is 'faster'; allowed are 'fast' and 'default'"),
    ],
)
def test_refused_options(options, message):
    with pytest.raises(ArgumentError, match=f"SelfMultiheadAttn: {message}"):
        SelfMultiheadAttn(*options)


# -- fast_mask_softmax_dropout_func ---------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["none", "padding", "additive"])
def test_softmax(kind, dtype):
    scores = torch.randn(BATCH * HEADS, TARGET, SOURCE).to(dtype).requires_grad_()
    padding = torch.rand(BATCH, SOURCE) < 0.3
    padding[0] = True
    numbers = torch.randn(BATCH, SOURCE).masked_fill(padding, -math.inf).to(dtype)
    mask = {"none": None, "padding": padding.to(torch.uint8), "additive": numbers}[kind]
    y = fast_mask_softmax_dropout_func(True, HEADS, scores, mask, kind == "additive", 0.0)
    e = scores.double().exp()
    if kind != "none":
        added = numbers.double() if kind == "additive" else torch.zeros(BATCH, SOURCE).double()
        added = added.masked_fill(padding, -math.inf)
        e = e * added.exp().repeat_interleave(HEADS, 0)[:, None]
    exact = e / e.sum(-1, keepdim=True).clamp(min=1e-300)
    assert y.dtype == dtype
    assert_one_rounding(y, exact.detach())
    dy = torch.randn_like(y)
    found, wanted = torch.autograd.grad(y, scores, dy), torch.autograd.grad(exact, scores, dy)
    assert_close_in_rms(found[0], wanted[0].double(), ATTENTION_GRADIENTS[dtype])
    with torch.autocast("cpu", torch.bfloat16):
        again = fast_mask_softmax_dropout_func(True, HEADS, scores, mask, kind == "additive", 0.0)
    assert torch.equal(again, y)


def test_softmax_drops():
    scores = torch.zeros(40, 50, 50)
    kept = fast_mask_softmax_dropout_func(True, 4, scores, None, False, 0.25)
    every = torch.full_like(kept, 1 / 50)
    torch.testing.assert_close(kept, (every / 0.75) * (kept != 0))
    share = (kept != 0).float().mean()
    assert abs(share - 0.75) < 5 * (0.25 * 0.75 / kept.numel()) ** 0.5
    found = fast_mask_softmax_dropout_func(False, 4, scores, None, False, 0.25)
    torch.testing.assert_close(found, every)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3, X[:4], None, False, 0.0), r"inputs has shape \[4, 3, 8\] and there are 3 heads"),
        ((2, X[0], None, False, 0.0), r"pass \(batch \* heads, target, source\)"),
        ((2, X[:4].int(), None, False, 0.0), "inputs is torch.int32"),
        ((2, X[:4], None, False, -0.1), "dropout_prob is -0.1; pass a number from 0 to 1"),
        ((2, X[:4], torch.zeros(4, 8).bool(), False, 0.0), r"pad_mask has.*Pass \[2, 8\]"),
        ((2, X[:4], torch.zeros(2, 8), False, 0.0), "pad_mask is torch.float32; pass torch.bool"),
        ((2, X[:4], torch.zeros(2, 8).bool(), True, 0.0), "is torch.bool and mask_additive is"),
    ],
)
def test_refused_by_the_softmax(arguments, message):
    with pytest.raises(ArgumentError, match=f"fast_mask_softmax_dropout_func: .*{message}"):
        fast_mask_softmax_dropout_func(True, *arguments)


@pytest.mark.parametrize("separate", [False, True])
def test_a_layer_that_apex_has_pickled(separate):
    """Its attributes are these; parameters say what is projected from what."""
    layer = SelfMultiheadAttn(16, 2, bias=True, separate_qkv_params=separate)
    x = torch.randn(3, 2, 16)
    expected, _ = layer(x, x, x)
    kept = "embed_dim num_heads dropout head_dim bias include_norm_add impl scaling mask_additive"
    for name in vars(layer).keys() - vars(torch.nn.Module()).keys() - {*kept.split()}:
        delattr(layer, name)
    assert torch.equal(layer(x, x, x)[0], expected)

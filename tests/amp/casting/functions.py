"""A call of every function on NVIDIA's lists: name and arguments in float32."""

import torch
import torch.nn.functional as F


def _normal(*shape):
    return torch.randn(*shape)


def _unit(*shape):
    return torch.rand(*shape) * 0.8 + 0.1  # inside the domain of acos, log and erfinv


def _classes(*shape):
    return torch.randint(0, 4, shape)


def _signs(*shape):
    return torch.randint(0, 2, shape) * 2 - 1


def _functional_half():
    image, volume, line = _normal(2, 3, 6, 6), _normal(1, 2, 4, 4, 4), _normal(2, 3, 7)
    return {
        "conv1d": (line, _normal(4, 3, 3), _normal(4)),
        "conv2d": (image, _normal(4, 3, 3, 3), _normal(4)),
        "conv3d": (volume, _normal(3, 2, 2, 2, 2), _normal(3)),
        "conv_transpose1d": (line, _normal(3, 4, 3), _normal(4)),
        "conv_transpose2d": (image, _normal(3, 4, 3, 3), _normal(4)),
        "conv_transpose3d": (volume, _normal(2, 3, 2, 2, 2), _normal(3)),
        "conv_tbc": (_normal(5, 2, 3), _normal(3, 3, 4), _normal(4)),
        "linear": (_normal(2, 3, 5), _normal(4, 5), _normal(4)),
    }


def _functional_float():
    image, rows = _normal(2, 4, 6, 6), _normal(5, 4)
    log_probabilities = F.log_softmax(_normal(6, 2, 5), -1)
    return {
        "interpolate": (image, None, 2, "bilinear"),
        "grid_sample": (image, _unit(2, 3, 3, 2), "bilinear", "zeros", False),
        "softplus": (rows,),
        "softmin": (rows, -1),
        "log_softmax": (rows, -1),
        "softmax": (rows, -1),
        "gelu": (rows,),
        "layer_norm": (rows, (4,), _normal(4), _normal(4)),
        "group_norm": (image, 2, _normal(4), _normal(4)),
        "local_response_norm": (image, 3),
        "normalize": (rows,),
        "cosine_similarity": (rows, _normal(5, 4)),
        "poisson_nll_loss": (rows, _unit(5, 4)),
        "cosine_embedding_loss": (rows, _normal(5, 4), _signs(5)),
        "cross_entropy": (rows, _classes(5)),
        "hinge_embedding_loss": (rows, _signs(5, 4)),
        "kl_div": (rows, _unit(5, 4), None, None, "batchmean"),
        "l1_loss": (rows, _normal(5, 4)),
        "mse_loss": (rows, _normal(5, 4)),
        "margin_ranking_loss": (_normal(5), _normal(5), _signs(5)),
        "multilabel_margin_loss": (rows, _classes(5, 4)),
        "multilabel_soft_margin_loss": (rows, _signs(5, 4).clamp(0)),
        "multi_margin_loss": (rows, _classes(5)),
        "nll_loss": (rows, _classes(5)),
        "binary_cross_entropy_with_logits": (rows, _unit(5, 4)),
        "smooth_l1_loss": (rows, _normal(5, 4)),
        "soft_margin_loss": (rows, _signs(5, 4)),
        "triplet_margin_loss": (rows, _normal(5, 4), _normal(5, 4)),
        "ctc_loss": (log_probabilities, _classes(2, 3) + 1, (6, 6), (3, 3)),
    }


def _torch_half():
    batch = _normal(2, 3, 4)
    return {
        **{name: args for name, args in _functional_half().items() if name != "linear"},
        "prelu": (_normal(2, 3, 4), _unit(3)),
        "addmm": (_normal(3, 5), _normal(3, 4), _normal(4, 5)),
        "addmv": (_normal(3), _normal(3, 4), _normal(4)),
        "addr": (_normal(3, 4), _normal(3), _normal(4)),
        "matmul": (batch, _normal(4, 5)),
        "mm": (_normal(3, 4), _normal(4, 5)),
        "mv": (_normal(3, 4), _normal(4)),
        "addbmm": (_normal(3, 5), batch, _normal(2, 4, 5)),
        "baddbmm": (_normal(2, 3, 5), batch, _normal(2, 4, 5)),
        "bmm": (batch, _normal(2, 4, 5)),
    }


def _torch_float():
    pointwise = "acos asin cosh erfinv exp expm1 log log10 log2 reciprocal rsqrt sinh tan"
    return {
        **{name: (_unit(3, 5),) for name in pointwise.split()},
        **{name: (_normal(3, 5),) for name in ("norm", "prod", "std", "sum", "var")},
        "pow": (_unit(3, 5), 2.5),
        "cumprod": (_unit(3, 5), 0),
        "cumsum": (_normal(3, 5), 1),
        "dist": (_normal(3, 5), _normal(3, 5)),
        "renorm": (_normal(3, 5), 2, 0, 0.5),
    }


def _torch_promote():
    pairs = "atan2 add div mul eq equal ge gt le lt ne"
    return {
        **{name: (_normal(3, 4), _unit(3, 4)) for name in pairs.split()},
        "addcdiv": (_normal(3, 4), _normal(3, 4), _unit(3, 4)),
        "addcmul": (_normal(3, 4), _normal(3, 4), _unit(3, 4)),
        "cross": (_normal(4, 3), _normal(4, 3), 1),
        "bilinear": (_normal(2, 3), _normal(2, 4), _normal(5, 3, 4), _normal(5)),
        "dot": (_normal(6), _normal(6)),
    }


def _methods(calls):
    return {name: args for name, args in calls.items() if hasattr(torch.Tensor, name)}


_OPERATORS = (
    "__add__ __div__ __eq__ __ge__ __gt__ __le__ __lt__ __mul__ __ne__ __radd__ __rdiv__ __rmul__ "
    "__rsub__ __rtruediv__ __sub__ __truediv__"
)


def calls():
    """Return ``{kind: {(namespace, name): arguments}}`` with the same values every time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        half, wide, promote = _torch_half(), _torch_float(), _torch_promote()
        operators = {name: (_normal(3, 4), _unit(3, 4)) for name in _OPERATORS.split()}
        power = (_unit(3, 5), 1.5)
        listed = {
            "half": {
                F: _functional_half(),
                torch: half,
                torch.Tensor: {"__matmul__": (_normal(3, 4), _normal(4, 5)), **_methods(half)},
            },
            "float": {
                F: _functional_float(),
                torch: wide,
                torch.Tensor: {"__pow__": power, "__rpow__": power, "cpu": power[:1]}
                | _methods(wide),
            },
            "promote": {
                F: {},
                torch: promote,
                torch.Tensor: _methods(operators) | _methods(promote),
            },
            "sequence": {
                torch: {name: ([_normal(2, 3), _normal(2, 3)],) for name in ("cat", "stack")},
            },
        }
    return {
        kind: {(space, name): args for space, by in spaces.items() for name, args in by.items()}
        for kind, spaces in listed.items()
    }


def convert(value, *dtypes):
    """Cast floating tensors to ``dtypes`` in turn, the last one for all the rest."""
    left = list(dtypes)

    def walk(item):
        if isinstance(item, list):
            return [walk(each) for each in item]
        if not isinstance(item, torch.Tensor) or not item.is_floating_point():
            return item
        return item.to(left.pop(0) if len(left) > 1 else left[0])

    return tuple([walk(item) for item in value])

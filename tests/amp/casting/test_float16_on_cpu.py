"""float16 on a CPU: operands in float16, products and sums in float32, the result rounded once."""

import subprocess
import sys
import textwrap

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from apex import amp, fp16_utils
from apex.amp.casting import cpu_float16
from apex.commands.bench.training import process_state
from tests.amp.levels import cast
from tests.amp.training import same, started
from tests.tolerance import RECURRENT_16_BIT, ROUNDED_ONCE, assert_close_in_rms


def operands(shapes):
    return [torch.randn(shape).half().requires_grad_() for shape in shapes]


def widened(tensors, dtype):
    return [tensor.detach().to(dtype).requires_grad_() for tensor in tensors]


ATEN = torch.ops.aten


def products():
    """Name, function, shapes of its operands, and what is done to the first of them."""
    like = torch.channels_last
    image, weight, bias = (4, 8, 9, 9), (12, 8, 3, 3), (12,)
    strided = {"stride": 2, "padding": 1, "dilation": 2}
    return {
        "linear": (F.linear, (32, 70), (33, 70), (33,)),
        "linear of 3-D, no bias": (F.linear, (3, 16, 70), (33, 70)),
        "linear of no row": (F.linear, (0, 70), (33, 70), (33,)),
        "matmul": (torch.matmul, (3, 20, 70), (3, 70, 30)),
        "matmul of a transposed view": (lambda a, b: a.mT @ b, (70, 20), (70, 30)),
        "mv": (torch.mv, (33, 70), (70,)),
        "dot": (torch.dot, (70,), (70,)),
        "vdot": (torch.vdot, (70,), (70,)),
        "addmm": (lambda *t: torch.addmm(*t, beta=0.5, alpha=2), (20, 30), (20, 70), (70, 30)),
        "addmv": (torch.addmv, (33,), (33, 70), (70,)),
        "baddbmm": (torch.baddbmm, (3, 20, 30), (3, 20, 70), (3, 70, 30)),
        "addbmm": (torch.addbmm, (20, 30), (3, 20, 70), (3, 70, 30)),
        "conv2d": (F.conv2d, image, weight, bias),
        "conv2d, strided, no bias": (lambda *t: F.conv2d(*t, **strided), image, weight),
        "conv2d, channels_last": (
            lambda x, *t: F.conv2d(x.to(memory_format=like), *t), image, weight, bias
        ),
        "conv2d, not contiguous": (lambda x, *t: F.conv2d(x.mT, *t), image, weight, bias),
        "conv2d, groups": (lambda *t: F.conv2d(*t, groups=4), image, (12, 2, 3, 3), bias),
        "conv2d, no batch": (F.conv2d, image[1:], weight, bias),
        "conv2d of nothing": (F.conv2d, (0, 8, 9, 9), weight, bias),
        "conv3d": (F.conv3d, (2, 4, 6, 6, 6), (6, 4, 3, 3, 3), (6,)),
        "conv_transpose1d, groups": (
            lambda *t: F.conv_transpose1d(*t, groups=2), (4, 8, 20), (8, 6, 3), bias
        ),
    }  # fmt: skip


def test_only_the_gradients_that_are_asked_for():
    on()
    x, weight, bias = operands([(4, 8, 9, 9), (12, 8, 3, 3), (12,)])
    for wanted in ([weight], [x], [bias], [x, bias]):
        found = torch.autograd.grad(F.conv2d(x, weight, bias).sum(), wanted)
        assert [t.dtype for t in found] == [torch.float16] * len(wanted)
        assert [t.shape for t in found] == [t.shape for t in wanted]


PRODUCTS = products()


def on(dtype=torch.float16):
    cpu_float16.begin(dtype, ["cpu"])


def with_gradients(function, tensors, grad=None):
    result = function(*tensors)
    grad = torch.randn_like(result) if grad is None else grad.to(result.dtype)
    return [result, *torch.autograd.grad(result, tensors, grad)], grad


def share(ours, definition):
    """The share of elements that are the definition's, rounded once."""
    equal = [(a == b.half()).flatten() for a, b in zip(ours, definition, strict=True)]
    found = torch.cat(equal).double()
    return found.mean().item() if found.numel() else 1.0


# -- values ---------------------------------------------------------------------------------------


@pytest.mark.onednn
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_is_the_float64_one_rounded_once(name):
    on()
    function, *shapes = PRODUCTS[name]
    tensors = operands(shapes)
    ours, grad = with_gradients(function, tensors)
    exact, _ = with_gradients(function, widened(tensors, torch.float64), grad)
    assert share(ours, exact) >= ROUNDED_ONCE
    assert all(a.dtype == torch.float16 for a in ours)
    assert [a.stride() for a in ours] == [a.stride() for a in exact]
    with torch.no_grad():
        assert torch.equal(function(*tensors), ours[0])
    with torch.inference_mode():
        assert torch.equal(function(*tensors), ours[0])
    again, _ = with_gradients(function, tensors, grad)
    assert all(torch.equal(a, b) for a, b in zip(ours, again, strict=True))


# That of an add... and of a matrix by a vector has elementwise products, which round.
TWICE = [n for n in PRODUCTS if n.startswith(("linear", "matmul", "conv")) and "nothing" not in n]


@pytest.mark.onednn
@pytest.mark.parametrize("name", TWICE)
def test_a_second_derivative_is_the_float64_one_rounded_once(name):
    on()
    function, *shapes = PRODUCTS[name]

    def second(tensors, grad, other):
        grad = grad.to(tensors[0].dtype).requires_grad_()
        first = torch.autograd.grad(function(*tensors), tensors[0], grad, create_graph=True)
        return torch.autograd.grad(first, (tensors[1], grad), other.to(grad.dtype))

    tensors = operands(shapes)
    with torch.no_grad():
        grad, other = torch.randn_like(function(*tensors)), torch.randn_like(tensors[0])
    exact = second(widened(tensors, torch.float64), grad, other)
    assert share(second(tensors, grad, other), exact) >= ROUNDED_ONCE


def test_a_result_above_the_range_is_inf_and_a_sum_through_it_is_not():
    on()
    big = torch.full((1, 4), 60000.0).half()
    assert (big @ torch.ones(4, 1).half()).item() == float("inf")
    assert (big @ torch.tensor([[1.0], [1.0], [-1.0], [-1.0]]).half()).item() == 0


MASKS = {
    "none": {},
    "causal": {"is_causal": True},
    "bool": {"attn_mask": torch.arange(16).lt(11).expand(1, 1, 16, 16)},
    "float16": {"attn_mask": torch.linspace(-2, 0, 256).half().view(1, 1, 16, 16)},
}


@pytest.mark.onednn
@pytest.mark.parametrize("options", MASKS.values(), ids=MASKS)
def test_attention(options):
    on()
    tensors = operands([(2, 3, 16, 8)] * 3)
    ours, grad = with_gradients(lambda *t: F.scaled_dot_product_attention(*t, **options), tensors)
    # What is kept between the passes is the rounded result and the float32 logsumexp.
    wide = [t.detach().float() for t in tensors]
    mask, is_causal = options.get("attn_mask"), options.get("is_causal", False)
    if mask is not None:
        mask = mask.float() if mask.is_floating_point() else mask.float().log()  # 0 and -inf
    result, logsumexp = ATEN._scaled_dot_product_flash_attention_for_cpu(
        *wide, 0.0, is_causal, attn_mask=mask
    )
    result = result.half()
    grads = ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
        grad.float(), *wide, result.float(), logsumexp, 0.0, is_causal, attn_mask=mask
    )
    definition = [result, *(g.half() for g in grads)]
    assert all(torch.equal(a, b) for a, b in zip(ours, definition, strict=True))


RECURRENT = {
    "LSTM": lambda: nn.LSTM(12, 16, 2, bidirectional=True),
    "LSTM, projected": lambda: nn.LSTM(12, 16, proj_size=5, bias=False),
    "GRU": lambda: nn.GRU(12, 16, batch_first=True),
    "RNN": lambda: nn.RNN(12, 16, nonlinearity="relu"),
}


def flat(value):
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for item in value for tensor in flat(item)]


@pytest.mark.onednn
@pytest.mark.filterwarnings("ignore:LSTM with projections")  # of torch, in float32
@pytest.mark.skipif(
    cpu_float16.has_float16_instructions(),
    reason="torch's own kernels run on a CPU with float16 instructions",
)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", RECURRENT)
def test_a_recurrent_layer_is_the_float32_one_rounded_once(name, packed):
    on()
    layer = RECURRENT[name]().half()
    x = torch.randn(7, 5, 12).half()

    def run(dtype):
        layer.to(dtype).zero_grad()
        given = x.to(dtype).requires_grad_()
        source = given
        if packed:
            lengths = [5] * 4 + [3] * 3 if layer.batch_first else [7, 6, 6, 3, 1]
            source = nn.utils.rnn.pack_padded_sequence(given, lengths, layer.batch_first)
        output, hidden = layer(source)
        results = flat([output.data if packed else output, hidden])
        ones = [torch.ones_like(r) for r in results]
        return results, torch.autograd.grad(results, [given, *layer.parameters()], ones)

    ours, our_grads = run(torch.float16)
    with torch.no_grad():
        plain = flat(layer(x))
    with torch.inference_mode():  # torch decomposes the layer
        for one, other in zip(flat(layer(x)), plain, strict=True):
            assert_close_in_rms(one, other.double(), RECURRENT_16_BIT)
    theirs, their_grads = run(torch.float32)
    for one, other in zip([*ours, *our_grads], [*theirs, *their_grads], strict=True):
        assert one.dtype == torch.float16
        assert torch.equal(one, other.half())
    if not packed:
        assert same(plain, ours)


# -- what is left alone ---------------------------------------------------------------------------


def test_what_is_left_alone():
    def left_alone():
        torch.manual_seed(1)
        half, ints = torch.randn(6, 6).half(), torch.arange(36).view(6, 6)
        image, weight = torch.randn(1, 2, 5, 5), torch.randn(3, 2, 3, 3)
        return [
            torch.mm(half, half, out=torch.empty(6, 6).half()),
            torch.ones(6, 6).half().addmm_(half, half),
            ints @ ints,
            *(half.to(d) @ half.to(d) for d in (torch.bfloat16, torch.float32, torch.float64)),
            *(F.conv2d(image.to(d), weight.to(d)) for d in (torch.bfloat16, torch.float32)),
            F.scaled_dot_product_attention(*[torch.randn(1, 1, 4, 8)] * 3),
            half + half,
        ]

    before = left_alone()
    on()
    after = left_alone()
    assert [t.dtype for t in before] == [t.dtype for t in after]
    assert same(before, after)


def autocast_at_o4():
    started("O4", nn.Linear(2, 2))
    assert not cpu_float16.is_on()
    with amp.autocast(dtype=torch.float16):
        pass


MIXED = {
    "mm": lambda half, wide: torch.mm(half, wide),
    "addmm": lambda half, wide: torch.addmm(half, half, wide),
    "bmm": lambda half, wide: torch.bmm(half[None], wide[None]),
    "conv1d": lambda half, wide: F.conv1d(half, wide[None]),
    "LSTM": lambda half, wide: nn.LSTM(3, 3)(half),
}


@pytest.mark.parametrize("name", MIXED)
def test_mixed_dtypes_are_refused_as_by_torch(name):
    tensors = torch.ones(3, 3).half(), torch.ones(3, 3)
    amp.reset()
    with pytest.raises((RuntimeError, ValueError)) as plain:
        MIXED[name](*tensors)
    on()
    with pytest.raises(plain.type) as ours:
        MIXED[name](*tensors)
    assert str(ours.value) == str(plain.value)


def test_what_autograd_saves_stays_float16():
    on()
    saved = []
    x, weight, image, kernel = operands([(5, 8), (8, 8), (1, 2, 5, 5), (3, 2, 3, 3)])
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        F.linear(x, weight)
        F.conv2d(image, kernel)
        x @ weight
    assert len(saved) >= 6
    assert {t.dtype for t in saved} == {torch.float16}


# -- when -----------------------------------------------------------------------------------------


BEGINNINGS = {
    **{level: lambda level=level: started(level, nn.Linear(2, 2)) for level in ("O1", "O2", "O3")},
    "init": amp.init,
    "autocast": amp.autocast()(lambda: None),
    "autocast at O4": autocast_at_o4,
    "network_to_half": lambda: fp16_utils.network_to_half(nn.Linear(2, 2)),
    "FP16Model": lambda: fp16_utils.FP16Model(nn.Linear(2, 2)),
    "FP16_Optimizer": lambda: fp16_utils.FP16_Optimizer(
        torch.optim.SGD(nn.Linear(2, 2).half().parameters(), 0.1), verbose=False
    ),
}


@pytest.mark.parametrize("begin", BEGINNINGS.values(), ids=BEGINNINGS)
def test_on_from_the_first_float16_until_reset(begin):
    assert not cpu_float16.is_on()
    begin()
    assert cpu_float16.is_on()
    amp.reset()
    assert not cpu_float16.is_on()


def test_off_without_float16_and_on_other_devices():
    for level in ("O0", "O4", "O5"):
        started(level, nn.Linear(2, 2))
    fp16_utils.convert_network(nn.Linear(2, 2), torch.bfloat16)
    cast("O3", nn.Linear(2, 2, device="meta"))
    assert not cpu_float16.is_on()


@pytest.mark.onednn
def test_off_gives_torchs_own_numbers():
    x, weight = torch.randn(32, 600).half(), torch.randn(600, 32).half()
    image, kernel = torch.randn(2, 8, 9, 9).half(), torch.randn(12, 8, 3, 3).half()

    def run():
        return [x @ weight, F.conv2d(image, kernel)]

    plain = run()
    on()
    run()
    process_state.take_off()  # as for the benchmark's rival
    assert not cpu_float16.is_on()
    assert same(run(), plain)


# -- the process ----------------------------------------------------------------------------------


def run_program(text, *words):
    program = [sys.executable, "-W", "error", "-c", textwrap.dedent(text), *words]
    done = subprocess.run(program, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.split()


WITH_INSTRUCTIONS = """
    import torch
    from apex.amp.casting import cpu_float16
    cpu_float16.has_float16_instructions = lambda: True
    def gradients(x, w):
        return torch.autograd.grad(torch.nn.functional.conv2d(x, w).sum(), (x, w))
    torch.manual_seed(0)
    tensors = [torch.rand(s).half().requires_grad_() for s in ((4, 8, 30, 30), (16, 8, 3, 3))]
    a = torch.rand(60, 60).half()
    native = a @ a
    cpu_float16.begin(torch.float16, ["cpu"])
    wide = gradients(*[t.detach().float().requires_grad_() for t in tensors])
    assert all(torch.equal(g, w.half()) for g, w in zip(gradients(*tensors), wide))
    assert torch.equal(a @ a, native)
    print(*cpu_float16.widened())
"""


@pytest.mark.slow
def test_with_float16_instructions_torchs_products_stay():
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    wanted = ["convolution_backward", attention, f"{attention}_backward", "addbmm"]
    assert run_program(WITH_INSTRUCTIONS) == wanted


THREADS = """
    import sys, threading, time
    import torch
    from torch import nn
    from apex import amp
    torch.set_num_threads(1)
    end = time.monotonic() + float(sys.argv[1])
    counts = [0, 0, 0, 0]
    def is_going():  # on a busy machine longer than that
        return time.monotonic() < end or min(counts) < 2
    def train(number, dtype):
        model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(36, 4)).to(dtype)
        rnn = nn.LSTM(4, 4).to(dtype)
        x = torch.randn(3, 2, 5, 5).to(dtype)
        while is_going():
            rnn(model(x)[None])[0].sum().backward()
            counts[number] += 1
    dtypes = (torch.float16, torch.float32, torch.float16)
    threads = [threading.Thread(target=train, args=each) for each in enumerate(dtypes)]
    for thread in threads:
        thread.start()
    while is_going():
        amp.initialize(nn.Linear(2, 2), opt_level=("O1", "O2", "O3")[counts[3] % 3], verbosity=0)
        amp.reset()
        counts[3] += 1
    for thread in threads:
        thread.join()
    print(*counts)
"""


@pytest.mark.parametrize("seconds", [1, pytest.param(10, marks=pytest.mark.exhaustive)])
@pytest.mark.slow
def test_initialize_and_reset_beside_threads_that_train(seconds):
    assert min(map(int, run_program(THREADS, str(seconds)))) > 1


def test_off_hands_gradients_of_convolutions_to_torch(monkeypatch):
    x, weight = torch.randn(2, 3, 6, 6).half(), torch.randn(4, 3, 3, 3).half().requires_grad_()
    widened, own = [], cpu_float16._rounded
    monkeypatch.setattr(cpu_float16, "_rounded", lambda found: widened.append(found) or own(found))
    on()
    F.conv2d(x, weight).sum().backward()
    assert widened
    amp.reset()
    widened.clear()
    F.conv2d(x, weight).sum().backward()
    assert not widened


def test_torch_export_still_decomposes_recurrent_layers():
    """It does not where an operator has a kernel of a device."""
    on()
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    assert not any(has(f"aten::{name}", "CPU") for name in ("gru.input", "lstm.data"))


def test_a_recurrent_layer_in_forward_mode_and_with_other_types():
    on()
    lstm, gru = nn.LSTM(4, 5).half(), nn.GRU(4, 5).half()
    x = torch.randn(3, 2, 4).half()
    out, tangent = torch.func.jvp(lambda x: lstm(x)[0], (x,), (torch.ones_like(x),))
    assert out.dtype == tangent.dtype == torch.float16
    with pytest.raises((RuntimeError, ValueError), match="dtype|type"):
        gru(x, torch.zeros(1, 2, 5))


def test_on_for_a_module_without_weights():
    cast("O1", nn.ReLU())
    assert cpu_float16.is_on()

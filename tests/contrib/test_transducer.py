"""``apex.contrib.transducer`` against the recurrence in float64, cell by cell."""

import itertools

import pytest
import torch
import transducer_joint_cuda
import transducer_loss_cuda

from apex.contrib.transducer import TransducerJoint, TransducerLoss, _transducer_ref
from apex.contrib.transducer.transducer import TransducerLossFunc
from apex.ops import _runtime
from tests.tolerance import (
    TORCH_IN_FLOAT64,
    TRANSDUCER,
    assert_close_to_largest,
    assert_one_rounding,
)

HALF, BFLOAT, FLOAT, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64
DTYPES = [HALF, BFLOAT, FLOAT, DOUBLE]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
T, U, V, H = 7, 5, 6, 9
LENGTHS = torch.tensor([T, 3, 1, 4, 1]), torch.tensor([U, 1, 3, 4, 1])  # steps, positions
USED = torch.stack([(torch.arange(T)[:, None] < t) & (torch.arange(U) < u)
                    for t, u in zip(*LENGTHS, strict=True)])  # fmt: skip
OFFSET = (LENGTHS[0] * LENGTHS[1]).cumsum(0)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def logits(dtype):
    """Logits, their labels, and the gradient of the losses."""
    labels = torch.randint(1, V, (5, U - 1), generator=torch.Generator().manual_seed(1))
    return (3 * normal(5, T, U, V)).to(dtype), labels, normal(5, seed=2).to(dtype)


def loss_of(x, labels, dloss, blank=0, packed=False, **options):
    given = x.clone().requires_grad_()
    more = {"batch_offset": OFFSET, "max_f_len": T} if packed else {}
    layer = TransducerLoss(packed_input=packed, **options)
    losses = layer(given, labels, LENGTHS[0], LENGTHS[1] - 1, blank, **more)
    return losses.detach(), *torch.autograd.grad(losses, given, dloss)


def exact_loss(x, labels, dloss, blank=0):
    x = x.detach().double().clone().requires_grad_()
    lengths = (LENGTHS[0], LENGTHS[1] - 1)
    return _transducer_ref.transducer_loss_reference(x, labels, *lengths, blank, dloss.double())


def test_long_sequences_lose_no_digits():
    """In float32 lattices a gradient would be off by 1e-4: losses are 600 here."""
    x = normal(1, 80, 30, 40)
    labels, lengths = torch.arange(1, 30)[None], (torch.tensor([80]), torch.tensor([29]))
    found = []
    for dtype in (FLOAT, DOUBLE):
        given = x.float().to(dtype).requires_grad_()
        losses = TransducerLoss()(given, labels, *lengths, 0)
        found += torch.autograd.grad(losses.sum(), given)
    assert_close_to_largest(*found, TRANSDUCER)


@dtypes
@pytest.mark.parametrize("packed", [False, True])
def test_loss(dtype, packed):
    x, labels, dloss = logits(dtype)
    _, _, gradient, losses = exact_loss(x, labels, dloss)
    # Cells that are not used are not read.
    given = x[USED] if packed else x.masked_fill(~USED[..., None], float("nan"))
    found, dx = loss_of(given, labels, dloss, packed=packed)
    assert (found.dtype, dx.dtype) == (dtype, dtype)
    if not packed:
        assert (dx[~USED] == 0).all()
        dx = dx[USED]
    if dtype in (HALF, BFLOAT):
        assert_one_rounding(found, losses)
        assert_one_rounding(dx, gradient[USED])
        return
    allowed = TRANSDUCER if dtype == FLOAT else 100 * TORCH_IN_FLOAT64  # e to the power of a sum
    assert_close_to_largest(found, losses, allowed)
    assert_close_to_largest(dx, gradient[USED], allowed)


def test_loss_of_another_blank_and_options_without_effect():
    x, labels, dloss = logits(DOUBLE)
    labels = labels.int() % 5  # beside the blank, 5; labels may repeat
    _, _, gradient, losses = exact_loss(x, labels, dloss, 5)
    found = loss_of(x, labels, dloss, 5)
    assert_close_to_largest(found[0], losses, TORCH_IN_FLOAT64)
    assert_close_to_largest(found[1], gradient, 100 * TORCH_IN_FLOAT64)
    other = loss_of(x, labels, dloss, 5, fuse_softmax_backward=False, opt=0)
    assert all(map(torch.equal, found, other))


def test_alpha_and_beta_of_the_debug_list():
    x, labels, dloss = logits(DOUBLE)
    alpha, beta, _, _ = exact_loss(x, labels, dloss)
    found = []
    TransducerLoss()(x, labels, LENGTHS[0], LENGTHS[1] - 1, 0, debug_list=found)
    for one, other in zip(found, (alpha, beta), strict=True):
        assert_close_to_largest(one[USED], other[USED], TORCH_IN_FLOAT64)
        assert (one[~USED] == -torch.inf).all()


@pytest.mark.parametrize("dtype", [HALF, BFLOAT], ids=str)
def test_16_bit_losses_are_rounded_behind_alpha_and_beta(dtype):
    """A rounded loss of 100 is off by up to 0.03 in float16, and a gradient by as much."""
    x, labels = normal(1, 40, 10, 8).log_softmax(-1).to(dtype), torch.arange(1, 10)[None] % 7 + 1
    lengths, more = (torch.tensor([40]), torch.tensor([9])), (torch.empty(0), 0, 0, 1)
    found, dlosses = [], torch.ones(1)
    for to in (dtype, DOUBLE):
        alpha, beta, losses = transducer_loss_cuda.forward(x.to(to), labels, *lengths, *more, False)
        given = (x.to(to), dlosses.to(to), alpha, beta, *lengths, labels, *more)
        found.append((transducer_loss_cuda.backward(*given, False, False), losses, alpha, beta))
    assert [one.dtype for one in found[0]] == [dtype, dtype, FLOAT, FLOAT]
    for actual, exact in zip(*found, strict=True):
        if actual.dtype == FLOAT:
            assert_close_to_largest(actual, exact, TRANSDUCER)
        elif actual.numel() > 1:
            assert_one_rounding(actual, exact)
    debug_list = []
    TransducerLoss()(x, labels, *lengths, 0, debug_list=debug_list)
    assert [one.dtype for one in debug_list] == [FLOAT, FLOAT]


def test_a_label_that_is_the_blank_and_impossible_labels():
    """Two ways into a cell by one class; a loss of inf that does not touch other samples."""
    x, labels, dloss = logits(DOUBLE)
    labels[0, 1] = 0
    _, _, gradient, _ = exact_loss(x, labels, dloss)
    assert_close_to_largest(loss_of(x, labels, dloss)[1], gradient, 100 * TORCH_IN_FLOAT64)
    x[0, :, 0, 1:] = -torch.inf  # nothing but blanks
    losses, dx = loss_of(x, labels, dloss)
    assert losses[0] == torch.inf
    assert torch.equal(losses[1:], loss_of(logits(DOUBLE)[0], labels, dloss)[0][1:])
    assert dx[1:].isfinite().all()


def test_no_time_steps():
    """There is nothing to emit: certain without labels, impossible with some."""
    x, labels, dloss = logits(FLOAT)
    times, count = torch.tensor([0, 0, 2, 2, 2]), torch.tensor([0, 1, 0, 1, 2])
    given = x.requires_grad_()
    losses = TransducerLoss()(given, labels, times, count, 0)
    assert losses[:2].tolist() == [0.0, torch.inf]
    (dx,) = torch.autograd.grad(losses, given, dloss)
    assert not dx[:2].any()
    assert dx[2:, 0, 0].abs().min() > 0


def test_the_backward_has_no_derivative():
    x, labels, _ = logits(FLOAT)
    losses = TransducerLoss()(x.requires_grad_(), labels, LENGTHS[0], LENGTHS[1] - 1, 0)
    with pytest.raises(RuntimeError, match="TransducerLoss: its gradients have no derivative"):
        torch.autograd.grad(losses.sum(), x, create_graph=True)


def joint_of(layer, f, g, dh):
    leaves = [f.clone().requires_grad_(), g.clone().requires_grad_()]
    torch.manual_seed(3)
    h = layer(*leaves, *LENGTHS, OFFSET, int(OFFSET[-1]))
    return h.detach(), *torch.autograd.grad(h, leaves, dh)


@dtypes
@pytest.mark.parametrize(
    ("pack", "relu", "dropout"), [*itertools.product([False, True], repeat=3)], ids=str
)
def test_joint(dtype, pack, relu, dropout):
    f, g = normal(5, T, H).to(dtype), normal(5, U, H, seed=1).to(dtype)
    dh = normal(5, T, U, H, seed=2).to(dtype).masked_fill(~USED[..., None], 0.0)
    layer = TransducerJoint(pack, relu, dropout, dropout_prob=0.3, probe_mask=True)
    # The gradient of cells that are not used is not read.
    given = dh[USED] if pack else dh.masked_fill(~USED[..., None], float("nan"))
    found = joint_of(layer, f, g, given)
    mask = torch.ones(dh.shape, dtype=torch.bool)
    if relu or dropout:
        (probed,) = layer.mask_probe
        assert probed.shape == found[0].shape
        mask = torch.zeros_like(mask).masked_scatter(USED[..., None], probed) if pack else probed
        assert 0.2 < mask[USED].float().mean() < 0.8
    wide = [x.double().clone().requires_grad_() for x in (f, g)]
    exact = _transducer_ref.transducer_joint_reference(
        *wide, dh.double(), *LENGTHS, pack, relu, dropout, 0.3, mask
    )
    for actual, wanted in zip(found, exact, strict=True):
        assert actual.dtype == dtype
        if dtype == DOUBLE:
            assert_close_to_largest(actual, wanted.detach(), TORCH_IN_FLOAT64)
        else:
            assert_one_rounding(actual, wanted.detach())
    assert all(map(torch.equal, found, joint_of(layer, f, g, given)))  # the same dropout


def test_joint_drops_nothing_in_evaluation_and_all_with_probability_1():
    f, g, lengths = torch.ones(2, 3, 4), torch.ones(2, 2, 4), (torch.tensor([3, 3]),) * 2
    lengths = (torch.tensor([3, 3]), torch.tensor([2, 2]))
    layer = TransducerJoint(dropout=True, dropout_prob=1)
    assert (layer(f, g, *lengths) == 0).all()
    assert (layer.eval()(f, g, *lengths) == 2).all()
    assert layer.mask_probe is None


def test_packed_joint_and_loss_are_those_of_the_whole_grid():
    """With a linear layer between them; a sample without a time step; offsets as int32."""
    times, count = torch.tensor([4, 0, 2]).int(), torch.tensor([2, 1, 0]).int()
    f, g = (normal(3, n, H, seed=n).requires_grad_() for n in (4, 3))
    weight, labels = normal(V, H, seed=9), torch.tensor([[1, 2], [3, 1], [1, 1]])
    offset = (times * (count + 1)).cumsum(0)
    found = []
    for packed in (False, True):
        h = TransducerJoint(packed)(f, g, times, count + 1, offset, offset[-1])
        more = (offset, torch.tensor(4)) if packed else ()
        losses = TransducerLoss(packed_input=packed)(h @ weight.T, labels, times, count, 5, *more)
        found.append((losses, *torch.autograd.grad(losses[[0, 2]].sum(), (f, g))))
    assert found[0][0][1] == torch.inf
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.exhaustive  # 3 s for the compiler
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # Dynamo reads it
def test_compiled_programs_call_them_between_two_graphs():
    x, labels, _ = logits(FLOAT)

    @torch.compile(backend="eager")
    def program(x):
        return TransducerLoss()(x, labels, LENGTHS[0], LENGTHS[1] - 1, 0).sum() * 2

    found = torch.autograd.grad(program(x.requires_grad_()), x)
    losses = TransducerLoss()(x, labels, LENGTHS[0], LENGTHS[1] - 1, 0)
    assert torch.equal(found[0], torch.autograd.grad(losses.sum() * 2, x)[0])


@pytest.mark.parametrize("packed", [False, True])
def test_compiled_modules(packed):
    """``transducer_joint_cuda`` and ``transducer_loss_cuda`` are what the layers compute."""
    f, g = normal(5, T, H).half(), normal(5, U, H, seed=1).half()
    dh = normal(*((int(OFFSET[-1]), H) if packed else (5, T, U, H)), seed=2).half()
    args = (*LENGTHS, OFFSET, int(OFFSET[-1]), 1, packed, True, False, 0.0, 4)
    h, mask = transducer_joint_cuda.forward(f, g, *args)
    given = ([dh, mask], *LENGTHS, OFFSET, T, U, packed, 1.0)
    found = (h, *transducer_joint_cuda.backward(*given))
    assert all(map(torch.equal, found, joint_of(TransducerJoint(packed, True), f, g, dh)))
    x, labels, dloss = logits(DOUBLE)
    x, lengths = (x[USED] if packed else x), (LENGTHS[0], LENGTHS[1] - 1)
    wanted = loss_of(x, labels, dloss, packed=packed)
    x.requires_grad_()
    logs = x.log_softmax(-1)
    given = (logs.detach(), labels, *lengths, OFFSET, T, 0, 1, packed)
    alpha, beta, losses = transducer_loss_cuda.forward(*given)
    assert_close_to_largest(losses, wanted[0], TORCH_IN_FLOAT64)
    given = (logs.detach(), dloss, alpha, beta, *lengths, labels, OFFSET, T, 0, 1)
    dlogs = transducer_loss_cuda.backward(*given, False, packed)
    for dx in (transducer_loss_cuda.backward(*given, True, packed),
               torch.autograd.grad(logs, x, dlogs)[0]):  # fmt: skip
        assert_close_to_largest(dx, wanted[1], 100 * TORCH_IN_FLOAT64)


def change(tensor, at, value):
    tensor = tensor.clone()
    tensor[at] = value
    return tensor


BAD = [  # of the loss, packed or not: what is passed, what is said
    ({"f_len": change(LENGTHS[0], 1, 8)}, "sample 1 has f_len 8 and y_len 0; allowed are 0 to 7"),
    ({"y_len": change(LENGTHS[1] - 1, 2, -1)}, "sample 2 has f_len 1 and y_len -1; .* 0 to 4"),
    ({"label": torch.full((5, U - 1), V)}, "label 0 of sample 0 is 6; allowed are 0 to 5"),
]


@pytest.mark.parametrize(("bad", "said"), BAD, ids=["f_len", "y_len", "label"])
@pytest.mark.parametrize("packed", [False, True])
def test_lengths_and_labels_out_of_range(bad, said, packed, monkeypatch):
    """An error where it costs nothing to look; elsewhere nan, and nothing out of bounds."""
    x, labels, _ = logits(FLOAT)
    more = {"batch_offset": OFFSET, "max_f_len": T} if packed else {}
    given = {"x": x[USED] if packed else x, "label": labels, "f_len": LENGTHS[0],
             "y_len": LENGTHS[1] - 1, "blank_idx": 0, **more}  # fmt: skip
    layer = TransducerLoss(packed_input=packed)
    wanted = layer(**given)
    with pytest.raises(IndexError, match=said):
        layer(**(given | bad))
    monkeypatch.setattr(_runtime, "waits", lambda device: True)
    losses = layer(**(given | bad))
    right = ~losses.isnan()
    assert not right.all()
    assert right.sum() >= (0 if "label" in bad or packed else 4)
    assert torch.equal(losses[right], wanted[right])


def test_lengths_below_zero_with_offsets_that_fit_them(monkeypatch):
    """Rows before the first are not read."""
    x, labels, _ = logits(FLOAT)
    times, lengths = change(LENGTHS[0], 0, -7), LENGTHS[1] - 1
    monkeypatch.setattr(_runtime, "waits", lambda device: True)
    offset = (times * LENGTHS[1]).cumsum(0)
    losses = TransducerLoss(packed_input=True)(x[USED], labels, times, lengths, 0, offset, T)
    assert losses[0].isnan()


@pytest.mark.parametrize("packed", [False, True])
def test_lengths_of_the_joint_out_of_range(packed, monkeypatch):
    f, g, bad = torch.ones(5, T, H), torch.ones(5, U, H), (LENGTHS[0], change(LENGTHS[1], 4, 6))
    layer = TransducerJoint(packed)
    with pytest.raises(IndexError, match="sample 4 has f_len 1 and g_len 6; .* and 0 to 5"):
        layer(f, g, *bad, OFFSET, int(OFFSET[-1]))
    monkeypatch.setattr(_runtime, "waits", lambda device: True)
    h = layer(f, g, *bad, OFFSET, int(OFFSET[-1]))
    wanted = TransducerJoint(packed)(f, g, *LENGTHS, OFFSET, int(OFFSET[-1]))
    last = -1 if packed else 4
    assert h[last].isnan().all()
    assert torch.equal(h[:last], wanted[:last])


def test_offsets_that_are_not_the_lengths():
    x, labels, _ = logits(FLOAT)
    layer, lengths = TransducerLoss(packed_input=True), (LENGTHS[0], LENGTHS[1] - 1)
    for offset, rows in ((OFFSET - 1, x[USED]), (OFFSET, x[USED][1:]), (OFFSET, x.flatten(0, 2))):
        with pytest.raises(IndexError, match=r"batch_offset is \[.*rows; pass the cumulative sum"):
            layer(rows, labels, *lengths, 0, offset, T)


def test_arguments_that_cannot_be_computed_with():
    x, labels, _ = logits(FLOAT)
    lengths, loss = (LENGTHS[0], LENGTHS[1] - 1), TransducerLoss()
    for given, said in (
        ((x, labels[:, 1:], *lengths, 0), r"label has shape \[5, 3\].*Pass \[5, 4\]"),
        ((x[0], labels, *lengths, 0), r"x has shape \[7, 5, 6\]"),
        ((x, labels, lengths[0][1:], lengths[1], 0), r"f_len has shape \[4\].*5 samples"),
        ((x, labels.float(), *lengths, 0), "label is torch.float32; pass an integer"),
        ((x, labels, lengths[0].float(), lengths[1], 0), "f_len is torch.float32; pass an integer"),
        ((x.long(), labels, *lengths, 0), "x is torch.int64; allowed are float16"),
        ((x, labels, *lengths, 6), "blank_idx is 6; allowed are 0 to 5"),
        ((x[:, :0], labels, *lengths, 0), "5 samples, 0 time steps"),
    ):
        with pytest.raises(ValueError, match=said):
            loss(*given)
    with pytest.raises(ValueError, match="max_f_len is None; pass the largest f_len"):
        TransducerLoss(packed_input=True)(x[USED], labels, *lengths, 0)
    f, g = torch.ones(5, T, H), torch.ones(5, U, H)
    with pytest.raises(ValueError, match="batch_offset is a NoneType; pass a tensor"):
        TransducerJoint(True)(f, g, *LENGTHS, None, 9)
    with pytest.raises(ValueError, match="packed_batch is 0; to pack, pass"):
        TransducerJoint(True)(f, g, *LENGTHS, OFFSET)
    with pytest.raises(TypeError, match="f is torch.float32 of .* g torch.float64.*of one dtype"):
        TransducerJoint()(f, g.double(), *LENGTHS)
    with pytest.raises(ValueError, match=r"f is .* of shape \[5, 7, 9\] and g .* of \[5, 5, 8\]"):
        TransducerJoint()(f, g[:, :, 1:], *LENGTHS)
    for name, value in (("opt", 1.0), ("fwd_tile_size", None), ("dropout_prob", 1.5)):
        with pytest.raises(ValueError, match=f"TransducerJoint: {name} is {value}; pass"):
            TransducerJoint(**{name: value})
    with pytest.raises(ValueError, match="opt is 'x'"):
        TransducerLoss(opt="x")
    assert issubclass(TransducerLossFunc, torch.autograd.Function)

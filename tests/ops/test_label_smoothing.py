"""Label smoothing wherever it is computed: cross-entropy with the smoothed target, in float64."""

import functools
import threading

import pytest
import torch
import torch.nn.functional as F

from apex.contrib.xentropy import SoftmaxCrossEntropyLoss
from apex.ops import _runtime
from apex.ops.losses import cross_entropy, focal_loss, linear_cross_entropy
from apex.transformer import parallel_state, tensor_parallel
from tests.tolerance import assert_one_rounding

ROWS, CLASSES, PADDING, RANKS = 11, 12, 5, 3
SMOOTHINGS = (0.0, 0.1, 0.7)


def _data():
    logits = 3 * torch.randn(ROWS, CLASSES)
    target = torch.arange(ROWS) * 7 % CLASSES
    return logits.requires_grad_(), target, torch.rand(ROWS) + 0.5


def _exact(logits, target, others, own):
    """The cross-entropy with a target of ``own`` for the label and ``others`` for each other."""
    x = logits.detach().double().requires_grad_()
    wanted = torch.full_like(x, others).scatter(-1, target[:, None], own)
    return x, -(wanted * x.log_softmax(-1)).sum(-1)


def _even(smoothing):
    """A share for all classes alike, the label's too."""
    return smoothing / CLASSES, 1 - smoothing + smoothing / CLASSES


def _of_others(smoothing):
    """A share for the classes that are not the label, as in Megatron."""
    return smoothing / (CLASSES - 1), 1 - smoothing


def by_path(path, logits, target, smoothing):
    with _runtime.use(path):
        return SoftmaxCrossEntropyLoss.apply(logits, target, smoothing, -1)


def in_pieces(logits, target, smoothing):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cross_entropy, "PIECE", 2 * CLASSES)
        return cross_entropy.OP.operator(logits, target, smoothing, -1)[0]


def linear(options, logits, target, smoothing):
    """The layer whose weight is the identity."""
    return linear_cross_entropy.linear_cross_entropy(
        logits, torch.eye(CLASSES), target, label_smoothing=smoothing, reduction="none", **options
    )


class Ranks:
    """Threads that take themselves for tensor-parallel ranks; all they call is an all-reduce."""

    def __init__(self, patch):
        self.barrier, self.parts, self.rank = threading.Barrier(RANKS), {}, threading.local()
        name = "get_tensor_model_parallel"
        patch.setattr(parallel_state, f"{name}_group", lambda: None)
        patch.setattr(parallel_state, f"{name}_world_size", lambda: RANKS)
        patch.setattr(parallel_state, f"{name}_rank", lambda: self.rank.number)
        patch.setattr(torch.distributed, "all_reduce", self.all_reduce)

    def all_reduce(self, tensor, op=torch.distributed.ReduceOp.SUM, group=None):
        self.parts[self.rank.number] = tensor.clone()
        self.barrier.wait(60)
        every = torch.stack([self.parts[rank] for rank in range(RANKS)])
        self.barrier.wait(60)
        tensor.copy_(every.sum(0) if op == torch.distributed.ReduceOp.SUM else every.amax(0))

    def run(self, function):
        """What ``function(rank)`` returns on each."""
        found = {}

        def work(rank):
            self.rank.number = rank
            try:
                found[rank] = function(rank)
            finally:
                if rank not in found:
                    self.barrier.abort()

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(RANKS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [found[rank] for rank in range(RANKS)]


CASES = {
    "definition": functools.partial(by_path, "reference"),
    "kernel": functools.partial(by_path, "triton"),
    "pieces": in_pieces,
    "linear": functools.partial(linear, {}),
    "linear in pieces": functools.partial(linear, {"chunk_size": 4}),
    "linear, compact": functools.partial(linear, {"chunk_size": 4, "acc_policy": "compact"}),
}


@pytest.mark.parametrize("name", CASES)
def test_an_even_share_for_all_classes(name):
    if name == "kernel":
        pytest.importorskip("triton")
    for smoothing in SMOOTHINGS:
        logits, target, dy = _data()
        losses = CASES[name](logits, target, smoothing)
        x, exact = _exact(logits, target, *_even(smoothing))
        assert_one_rounding(losses.detach(), exact.detach())
        (dx,) = torch.autograd.grad(losses, logits, dy)
        assert_one_rounding(dx, *torch.autograd.grad(exact, x, dy.double()))


def test_a_share_for_the_other_classes_where_ranks_have_parts_of_them(monkeypatch):
    ranks = Ranks(monkeypatch)
    for smoothing in SMOOTHINGS:
        logits, target, dy = _data()
        parts = [part.clone().requires_grad_() for part in logits.detach().chunk(RANKS, -1)]

        def both(rank, parts=parts, target=target, dy=dy, smoothing=smoothing):
            loss = tensor_parallel.vocab_parallel_cross_entropy(parts[rank], target, smoothing)
            return loss.detach(), torch.autograd.grad(loss, parts[rank], dy)[0]

        losses, gradients = zip(*ranks.run(both), strict=True)
        x, exact = _exact(logits, target, *_of_others(smoothing))
        for loss in losses:
            assert_one_rounding(loss, exact.detach())
        (wanted,) = torch.autograd.grad(exact, x, dy.double())
        assert_one_rounding(torch.cat(gradients, -1), wanted)


@pytest.mark.parametrize("path", ["reference", "triton"])
def test_focal_loss_with_targets_between_0_and_1(path):
    """``1 - smoothing / 2`` for the class of an anchor, ``smoothing / 2`` for the others."""
    if path == "triton":
        pytest.importorskip("triton")
    for smoothing in SMOOTHINGS:
        logits, target, _ = _data()
        x, alpha, gamma = logits.detach().double().requires_grad_(), 0.25, 2.0
        y = F.one_hot(target, CLASSES).double()
        p, wanted = x.sigmoid(), smoothing / 2 + (1 - smoothing) * y
        weight = torch.where(y == 1, alpha * (1 - p) ** gamma, (1 - alpha) * p**gamma)
        entropy = -(wanted * F.logsigmoid(x) + (1 - wanted) * F.logsigmoid(-x))
        exact = (weight * entropy).sum() / 4
        with _runtime.use(path):
            loss = focal_loss.focal_loss(
                logits, target, torch.tensor([4.0]), CLASSES, alpha, gamma, smoothing
            )
            (dx,) = torch.autograd.grad(loss, logits)
        assert_one_rounding(loss.detach(), exact.detach())
        assert_one_rounding(dx, *torch.autograd.grad(exact, x))

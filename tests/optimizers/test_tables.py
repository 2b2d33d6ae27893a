"""The tables of sizes and addresses that a launch reads: whom they serve, how long they live."""

import gc
import weakref

import pytest
import torch

from apex.ops import _runtime, multi_tensor
from tests.optimizers.common import EVERY, give_grads, parameters, train

SMALL = ((7,), (33, 5))


@pytest.fixture
def built(monkeypatch):
    """What is built from here on."""
    from apex.kernels import multi_tensor as kernels

    made = []
    for name in ("_layouts", "_tables"):
        monkeypatch.setattr(multi_tensor, name, multi_tensor._Recent())
    monkeypatch.setattr(multi_tensor, "_captured", [])
    for kind in (kernels.Layout, kernels.Table):

        def build(*arguments, kind=kind):
            made.append(kind(*arguments))
            return made[-1]

        monkeypatch.setattr(kernels, kind.__name__, build)
    return made


def stepped():
    params = parameters(shapes=SMALL)
    optimizer = EVERY["FusedSGD"](params)
    train(optimizer, params, range(1), "triton")

    def again():
        with _runtime.use("triton"):
            optimizer.step()

    give_grads(params, 1)
    again()
    return again


def test_each_stream_uploads_its_own(built, monkeypatch):
    """Nobody waits on one stream for what was sent on another."""
    step = stepped()
    before = len(built)
    step()
    assert len(built) == before
    monkeypatch.setattr(multi_tensor, "_stream", lambda device: 7)
    step()
    assert len(built) == before + 4  # layout, gradients, weights, momenta
    step()
    assert len(built) == before + 4


def test_a_graph_keeps_what_it_reads(built, monkeypatch):
    """And copies from pinned memory again at each replay, if it was captured uploading."""
    step = stepped()
    before = len(built)
    monkeypatch.setattr(multi_tensor, "_stream", lambda device: 7)
    with monkeypatch.context() as patch:
        patch.setattr(_runtime, "capturing", lambda: True)
        step()  # all is there, from another stream
        assert len(built) == before
        for cache in (multi_tensor._layouts, multi_tensor._tables):
            cache.clear()
        step()  # uploads: nobody else may read that before the graph runs
    assert len(built) == before + 4
    captured = [weakref.ref(entry) for entry in built[before:]]
    step()
    assert len(built) == before + 8
    built.clear()
    multi_tensor._layouts.clear()
    multi_tensor._tables.clear()
    gc.collect()
    for entry in captured:
        hosts = getattr(entry(), "hosts", None) or [entry().host]
        assert all(isinstance(host, torch.Tensor) for host in hosts)

"""The tables of sizes and addresses that a launch reads: whom they serve, how long they live."""

import gc
import threading
import weakref

import pytest
import torch

from apex.multi_tensor_apply import release_captured
from apex.ops import _runtime
from apex.ops.lists import multi_tensor, pointer_tables
from apex.ops.lists.tensor_norms import square_sums
from apex.optimizers import FusedAdam
from tests.optimizers import common
from tests.optimizers.common import EVERY, give_grads, parameters, train

SMALL = ((7,), (33, 5))


@pytest.fixture
def built(monkeypatch):
    """What is built from here on."""
    made = []
    for kind in (pointer_tables.Layout, pointer_tables.Table):

        def build(*arguments, kind=kind):
            made.append(kind(*arguments))
            return made[-1]

        monkeypatch.setattr(pointer_tables, kind.__name__, build)
    return made


@pytest.fixture
def cache(monkeypatch):
    """Tables of this test alone."""
    fresh = pointer_tables.TableCache()
    monkeypatch.setattr(pointer_tables, "TABLES", fresh)
    monkeypatch.setattr(multi_tensor, "TABLES", fresh)
    return fresh


def stepped():
    params = parameters(shapes=SMALL)
    optimizer = EVERY["FusedSGD"](params)
    train(optimizer, params, range(1), "triton")

    def again():
        common.take_step("triton", optimizer)

    give_grads(params, 1)
    again()
    return again


def test_each_stream_uploads_its_own(built, cache, monkeypatch):
    """Nobody waits on one stream for what was sent on another."""
    step = stepped()
    before = len(built)
    step()
    assert len(built) == before
    monkeypatch.setattr(pointer_tables, "current_stream", lambda device: 7)
    step()
    assert len(built) == before + 4  # layout, gradients, weights, momenta
    step()
    assert len(built) == before + 4


def test_a_graph_keeps_what_it_reads_until_that_is_released(built, cache, monkeypatch):
    """And copies from pinned memory again at each replay, if it was captured uploading."""
    step = stepped()
    before = len(built)
    monkeypatch.setattr(pointer_tables, "current_stream", lambda device: 7)
    with monkeypatch.context() as patch:
        patch.setattr(_runtime, "capturing", lambda: True)
        step()  # all is there, from another stream
        assert len(built) == before
        cache._tables.clear()
        step()  # uploads: nobody else may read that before the graph runs
    assert len(built) == before + 4
    assert [len(entry.hosts) for entry in built] == [0] * before + [3, 1, 1, 1]
    captured = [weakref.ref(entry) for entry in built[before:]]
    step()
    assert len(built) == before + 8
    built.clear()
    cache._tables.clear()
    gc.collect()
    assert [len(entry().hosts) for entry in captured] == [3, 1, 1, 1]  # pinned, held
    release_captured()
    gc.collect()
    assert [entry() for entry in captured] == [None] * 4


def test_a_graph_uploads_anew_what_may_be_on_its_way(built, cache, monkeypatch):
    """``capture_begin`` without ``torch.cuda.graph``, which would synchronize first."""
    ended, queries = [False], []

    class Event:
        def query(self):
            assert not _runtime.capturing()  # CUDA refuses it there
            queries.append(self)
            return ended[0]

    monkeypatch.setattr(pointer_tables, "_event_on", lambda device: Event())
    step = stepped()
    before = len(built)

    def captured():
        with monkeypatch.context() as patch:
            patch.setattr(_runtime, "capturing", lambda: True)
            patch.setattr(pointer_tables, "current_stream", lambda device: 7)
            step()
            return len(built) - before

    assert captured() == 4
    step()
    assert captured() == 8  # it was asked, and was still on its way
    ended[0] = True
    assert captured() == 12  # nobody has seen the end
    step()
    assert captured() == 12
    asked = len(queries)
    step()
    assert len(queries) == asked  # never again


@pytest.mark.slow
def test_many_groups_upload_once(built, cache):
    """Layer-wise decay: 65 groups of one tensor, four columns and a layout each."""
    params = parameters(shapes=[(8,)] * 65)
    optimizer = FusedAdam([{"params": [p], "lr": 0.1 + n} for n, p in enumerate(params)])
    train(optimizer, params, range(1), "triton")
    common.take_step("triton", optimizer)
    built.clear()
    common.take_step("triton", optimizer)
    assert built == []


def test_tables_are_bounded_by_bytes_and_the_oldest_go_first(built):
    device = torch.device("cpu")
    cache = pointer_tables.TableCache(limit=3 * 2**20)
    sizes = [(number, *range(10_000)) for number in range(12)]  # 0.48 MB each
    for numels in sizes[:7]:
        cache.find(pointer_tables.Table, (0,), device)  # used all the time: stays
        cache.find(pointer_tables.Table, numels, device)
        assert cache._bytes <= cache._limit
    kept = {key[1] for key in cache._tables}
    assert kept == {(0,), *sizes[1:7]}
    large = tuple(range(100_000))
    assert cache.find(pointer_tables.Table, large, device) is not None  # alone too large
    assert [key[1] for key in cache._tables] == [large]
    cache.find(pointer_tables.Table, (1,), device)
    assert cache._bytes == sum(
        pointer_tables._size(numbers, one.table)
        for (_, numbers, _), tables in cache._tables.items()
        for one in tables.values()
    )


def test_other_addresses_and_sizes_are_other_tables(cache):
    """Where a tensor was freed another one may be, of another size or alignment."""
    memory = torch.zeros(64)
    for tensor in (memory[:16], memory[1:17], memory[:32]):
        with _runtime.use("triton"):
            assert square_sums([tensor]).item() == 0
        tensor.add_(1)
        with _runtime.use("triton"):
            assert square_sums([tensor]).item() == tensor.numel()
        memory.zero_()


def test_alignment_is_that_of_each_column():
    """One gradient that is not aligned leaves the other columns' accesses 128 bits wide."""
    inspection = pytest.importorskip("tools.kernels.case")
    params = parameters(shapes=SMALL)
    give_grads(params, 0)
    params[0].grad = torch.ones(8)[1:]
    with _runtime.use("triton"):
        launches = inspection.launches(FusedAdam(params).step)
    assert [given["ALIGNED"] for _, given in launches] == [(False, True, True, True)]


def test_threads_share_the_cache(cache):
    errors = []

    def work():
        try:
            for number in range(200):
                cache.find(pointer_tables.Table, (number % 7,), torch.device("cpu"))
        except RuntimeError as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(cache._tables) == 7

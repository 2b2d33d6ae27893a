"""Nothing is kept alive by amp."""

import functools
import gc
import weakref

import pytest

from apex import amp
from tests.amp.training import batches, sgd, started, train


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_models_optimizers_and_masters_are_freed(level):
    model, optimizer = started(level, optimizer=functools.partial(sgd, momentum=0.9))
    train(model, optimizer, batches(2))
    watched = [weakref.ref(o) for o in (model, optimizer, *amp.master_params(optimizer))]
    del model, optimizer
    gc.collect()
    assert [reference() for reference in watched] == [None] * len(watched)

"""Nothing is kept alive by amp."""

import gc
import weakref

import pytest
import torch

from apex import amp
from tests.amp.training import batches, net


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_models_optimizers_and_masters_are_freed(level):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    for x, y in batches(2):
        with amp.scale_loss(torch.nn.functional.cross_entropy(model(x), y), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    watched = [weakref.ref(o) for o in (model, optimizer, *amp.master_params(optimizer))]
    del model, optimizer, x, y, scaled
    gc.collect()
    assert [reference() for reference in watched] == [None] * len(watched)

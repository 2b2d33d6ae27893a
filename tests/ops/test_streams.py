"""Backward passes whose hooks run on several streams: what is sent has waited for all gradients.

Stand-ins for streams: each knows whose work it has waited for, on whatever device.
"""

import pytest
import torch

from apex.contrib.optimizers.distributed_fused_adam import DistributedFusedAdam
from apex.ops.lists import shards, streams
from apex.parallel import DistributedDataParallel, _bucket

pytestmark = pytest.mark.dist


class Stream:
    """Ids of the parameters whose gradients are behind whatever is launched next."""

    def __init__(self):
        self.behind, self.waits = set(), 0

    def wait_stream(self, other):
        self.behind |= other.behind
        self.waits += 1


@pytest.fixture
def group_of_one():
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def layers(monkeypatch):
    """Six weights whose gradients arrive on three streams, and these."""
    made = [Stream() for _ in range(3)]
    now = [made[0]]
    monkeypatch.setattr(streams, "_current_stream", lambda device: now[0])
    params = [torch.nn.Parameter(torch.ones(4)) for _ in range(6)]
    for number, param in enumerate(params):

        def arrived(param, stream=made[number // 2]):
            now[0] = stream
            stream.behind.add(id(param))

        param.register_post_accumulate_grad_hook(arrived)
    return torch.nn.ParameterList(params), made, now


def loss_of(params):
    total = torch.ones(4)
    for param in params:
        total = total * param
    return total.sum()


@pytest.mark.usefixtures("group_of_one")
def test_a_bucket_of_the_wrapper_waits_for_the_streams_of_its_gradients(layers, monkeypatch):
    params, made, now = layers
    sent, fill = [], _bucket.Bucket.fill

    def checked(bucket, without):
        sent.append(now[0].behind >= {*map(id, bucket.params)})
        return fill(bucket, without)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.params = params

        def forward(self):
            return loss_of(self.params)

    wrapper = DistributedDataParallel(Model(), message_size=12)  # two buckets
    wrapper().backward()  # learns the order; reduces at its end, behind all streams
    monkeypatch.setattr(_bucket.Bucket, "fill", checked)
    for stream in made:
        stream.behind.clear()
        stream.waits = 0
    wrapper().backward()
    assert sent == [True, True]
    assert [stream.waits for stream in made] == [1, 1, 0]  # the last weights come first


@pytest.mark.usefixtures("group_of_one")
def test_a_bucket_of_a_sharded_optimizer_is_written_and_sent_in_order(layers, monkeypatch):
    params, made, now = layers
    written, sent = {}, []
    add, send = shards.ShardBucket.add, shards.ShardBucket.send

    def added(bucket, place):
        before = written.setdefault(id(bucket), set())
        sent.append(now[0].behind >= before)
        before.add(id(bucket.params[place]))
        add(bucket, place)

    def checked(bucket, *arguments):
        sent.append(now[0].behind >= {*map(id, bucket.params)})
        return send(bucket, *arguments)

    optimizer = DistributedFusedAdam(params, bucket_cap_mb=48 / 2**20)
    monkeypatch.setattr(shards.ShardBucket, "add", added)
    monkeypatch.setattr(shards.ShardBucket, "send", checked)
    loss_of(params).backward()
    assert sent == [True] * 8  # six gradients, two buckets
    assert sum(stream.waits for stream in made) == 2
    optimizer.step()

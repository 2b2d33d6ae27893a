"""Pipelines of two and four stages beside one process, and the functions around them."""

import functools
import unittest

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from apex.transformer import _refused
from apex.transformer.layers import FusedLayerNorm
from apex.transformer.pipeline_parallel import utils
from apex.transformer.pipeline_parallel.schedules import common
from apex.transformer.testing.distributed_test_base import (
    DistributedTestBase,
    NcclDistributedTestBase,
    UccDistributedTestBase,
)
from tests.transformer import pipeline_ranks as jobs


@pytest.fixture
def no_calculator(monkeypatch):
    monkeypatch.setattr(utils, "_GLOBAL_NUM_MICROBATCHES_CALCULATOR", None)


CASES = [
    (1, {}),
    (1, {"wrapped": True, "grad_scaler": True}),
    (2, {"deallocate_pipeline_outputs": True, "grad_scaler": True}),
    (2, {"wrapped": True}),
    (4, {"async_comm": True, "deallocate_pipeline_outputs": True}),
    (4, {"num_micro_batches_with_partial_activation_checkpoints": 1}),
    (4, {"custom_grad_sync_func": True, "custom_sync_context_handler": True}),
    (4, {"forward_only": True}),
]


@pytest.mark.dist
@pytest.mark.parametrize(
    ("stages", "options"), CASES, ids=lambda x: "-".join(x) if isinstance(x, dict) else None
)
def test_schedules(four, stages, options):
    """Losses and gradients are those of one process, in float64."""
    answers = four.run(functools.partial(jobs.schedule, stages, options))
    has = [not options.get("forward_only")] * 2
    assert [found for found, _, _ in answers] == [has] * 4
    if "custom_grad_sync_func" in options:
        # the context ends before the last of six backwards
        assert [calls for _, calls, _ in answers] == [["enter", 5, 2]] * 4
    if "num_micro_batches_with_partial_activation_checkpoints" in options:
        # stage 0 keeps the activations of one micro-batch of four, the last stage all
        assert answers[0][2] == [False, True, True, True, False, True]
        assert answers[3][2] == [False] * 6


@pytest.mark.dist
def test_encoder_and_decoder(four):
    for text in four.run(jobs.encoder_and_decoder):
        assert "needs decoder_sequence_length" in text


@pytest.mark.dist
def test_stages_of_tensor_parallel_ranks(four):
    four.run(jobs.sequence_parallel)


@pytest.mark.dist
def test_neighbours(four):
    for missing, kind, overlap in four.run(jobs.neighbours):
        assert (
            missing
            == "recv_backward: tensor_shape is None; pass the shape of the tensor to receive."
        )
        assert kind == "recv_forward: async_comm is 1; pass a bool."
        assert "(overlap_p2p_comm=True) is not in apex" in overlap


@pytest.mark.dist
def test_norms_means_and_refusals(four):
    for rank, (numbers, texts) in enumerate(four.run(jobs.helpers)):
        assert numbers == [pytest.approx(16.0), rank % 2 + 1.0, rank == 3]
        for text, part in zip(
            texts,
            [
                "got 2 models for one stage; pass one",
                "tensor_shape is None; pass (sequence, micro_batch, features)",
                "there is no argument tensor_shap.",
                "micro-batch 5 of 2 samples is not in a batch of [11]; pass 6 micro-batches",
                "use torch.distributed.pipelining.ScheduleInterleaved1F1B",
                "use torch.distributed.pipelining.ScheduleInterleaved1F1B",
                "pipeline_model_parallel_split_rank_=...",
            ],
            strict=True,
        ):
            assert part in text


def test_freed_outputs():
    jobs.freed(0)


def test_groups_of_parameters():
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), FusedLayerNorm(3))
    decayed, rest = common._get_params_for_weight_decay_optimization([model])
    assert [id(p) for p in decayed["params"]] == [id(model[0].weight)]
    others = [model[0].bias, model[1].weight, model[1].bias]
    assert [id(p) for p in rest["params"]] == [id(p) for p in others]
    assert rest["weight_decay"] == 0.0


def test_calculator(no_calculator):
    with pytest.raises(ValueError, match="call setup_microbatch_calculator first"):
        utils.get_num_microbatches()
    utils.setup_microbatch_calculator(0, [4, 4, 100], 16, 2, 2)
    assert utils.get_num_microbatches() == 1
    utils.update_num_microbatches(60)
    assert (utils.get_num_microbatches(), utils.get_current_global_batch_size()) == (2, 8)
    calculator = utils._GLOBAL_NUM_MICROBATCHES_CALCULATOR
    with pytest.raises(ValueError, match="Replace it with _reconfigure_microbatch_calculator"):
        utils.setup_microbatch_calculator(0, None, 16, 2, 2)
    with pytest.raises(ValueError, match="global batch size 5 is not divisible"):
        utils._reconfigure_microbatch_calculator(0, None, 5, 2, 2)
    assert utils._GLOBAL_NUM_MICROBATCHES_CALCULATOR is calculator
    utils._reconfigure_microbatch_calculator(
        rank=0,
        rampup_batch_size=None,
        global_batch_size=12,
        micro_batch_size=3,
        data_parallel_size=2,
    )
    assert (utils.get_num_microbatches(), utils.get_micro_batch_size()) == (2, 3)
    batch = [torch.arange(6), torch.arange(6) * 2]
    assert [x.tolist() for x in utils.get_kth_microbatch(batch, 1)] == [[3, 4, 5], [6, 8, 10]]
    assert utils.get_kth_microbatch(None, 1) is None
    parts = list(utils._split_batch_into_microbatch(batch))
    assert [x.tolist() for x in parts[1]] == [[3, 4, 5], [6, 8, 10]]
    assert len(parts) == 2  # the batch of this rank, 6 of the 12
    few = utils._split_batch_into_microbatch(batch, _micro_batch_size=2, _global_batch_size=4)
    assert [x.tolist() for x, _ in few] == [[0, 1], [2, 3]]


def test_a_calculator_that_makes_batches_smaller(no_calculator):
    utils.setup_microbatch_calculator(0, None, 14, 3, 2, decrease_batch_size_if_needed=True)
    assert (utils.get_num_microbatches(), utils.get_current_global_batch_size()) == (2, 12)


def test_masks_and_positions():
    """Two rows: documents end after tokens 1 and 3, and after the last one."""
    data = torch.tensor([[5, 0, 6, 0, 7], [5, 6, 7, 8, 0]])
    mask, loss, positions = utils.get_ltor_masks_and_position_ids(data, 0, True, True, True)
    document = [[0, 0, 1, 1, 2], [0] * 5]
    for row in range(2):
        for query in range(5):
            for key in range(5):
                hidden = key > query or document[row][key] != document[row][query]
                assert mask[row, 0, query, key].item() == hidden
    assert loss.tolist() == [[1, 0, 1, 0, 1], [1, 1, 1, 1, 0]]
    assert positions.tolist() == [[0, 1, 0, 1, 0], [0, 1, 2, 3, 4]]
    mask, loss, positions = utils.get_ltor_masks_and_position_ids(data, 0, False, False, False)
    assert mask.shape == (1, 1, 5, 5)
    assert torch.equal(mask[0, 0], torch.ones(5, 5).triu(1) > 0)
    assert loss.sum() == 10
    assert positions.tolist() == [[0, 1, 2, 3, 4]] * 2


def test_lists_wrappers_and_lines(capsys):
    model = torch.nn.Linear(1, 1)
    assert utils.listify_model(model) == [model]
    assert utils.listify_model([model]) == [model]
    assert utils.unwrap_model(model) is model
    wrapper = torch.nn.DataParallel(model)
    assert utils.unwrap_model([wrapper], (torch.nn.DataParallel,)) == [model]
    assert issubclass(DistributedDataParallel, utils.unwrap_model.__defaults__[0])
    assert utils.param_is_not_shared(model.weight)
    model.weight.shared = True
    assert not utils.param_is_not_shared(model.weight)
    utils.print_rank_0("one")
    utils.print_rank_last("two")
    assert capsys.readouterr().out == "one\ntwo\n"
    assert utils.get_autoresume() is None


@pytest.mark.parametrize("name", [name for name in _refused.REFUSED if "(" not in name])
def test_what_is_refused_can_be_imported_and_says_what_to_use(name):
    module, _, function = f"apex.transformer.{name}".rpartition(".")
    found = getattr(__import__(module, fromlist=[function]), function)
    arguments = (
        [None]
        if function in ("init_nccl_net", "new_nccl_ib_group", "new_nccl_socket_group")
        else []
    )
    with pytest.raises(NotImplementedError, match="is not in apex .*; use ") as error:
        found(*arguments)
    assert _refused.REFUSED[name] in str(error.value)


class Cases(DistributedTestBase):
    """Run by the test below; pytest does not collect it by itself."""

    __test__ = False
    DISTRIBUTED_BACKEND = "gloo"
    world_size = 2

    def test_ranks(self):
        total = torch.ones(1)
        torch.distributed.all_reduce(total)
        self.assertEqual(total, torch.tensor([float(self.world_size)]))  # noqa: PT009
        self.assertEqual(self.rank, torch.distributed.get_rank())  # noqa: PT009
        self.assertEqual(total, [2.0])  # noqa: PT009
        self.assertNotEqual(total.long(), [2.5])  # noqa: PT009
        self.assertNotEqual(torch.ones(2), torch.zeros(2))  # noqa: PT009

    @unittest.expectedFailure
    def test_expected(self):
        self.fail("on all ranks")

    def test_failure(self):
        if self.rank == 1:
            raise KeyError("on one rank")
        torch.distributed.barrier()  # which the other never reaches

    def test_skipped(self):
        self.skipTest("not now")


class Ucc(UccDistributedTestBase):
    __test__ = False

    def test_nothing(self):
        pass


@pytest.mark.dist
def test_cases_on_several_ranks():
    passed = Cases("test_ranks").run()
    assert passed.wasSuccessful(), passed.failures + passed.errors
    ((_, text),) = Cases("test_failure").run().failures
    assert "rank 1: " in text
    assert "KeyError: 'on one rank'" in text
    assert len(Cases("test_expected").run().expectedFailures) == 1
    assert Cases("test_skipped").run().skipped[0][1] == "rank 0: not now\nrank 1: not now"
    assert len(Ucc("test_nothing").run().skipped) == 1
    if not torch.accelerator.is_available():
        assert NcclDistributedTestBase().world_size == 2

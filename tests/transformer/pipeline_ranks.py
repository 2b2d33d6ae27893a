"""What four ranks do with ``apex.transformer.pipeline_parallel``, beside one process."""

import contextlib
import functools

import torch
import torch.distributed as dist

from apex.transformer import parallel_state as state
from apex.transformer import pipeline_parallel
from apex.transformer.amp import GradScaler
from apex.transformer.enums import ModelType
from apex.transformer.pipeline_parallel import p2p_communication as p2p
from apex.transformer.pipeline_parallel import utils
from apex.transformer.pipeline_parallel.schedules import common
from apex.transformer.tensor_parallel import mappings
from apex.transformer.testing import commons
from tests import tolerance
from tests.transformer.parallel_ranks import equal, parallel, said

HIDDEN, SAMPLES, MICRO = 4, 2, 6  # features, samples of a micro-batch, micro-batches
SHAPE = (SAMPLES, HIDDEN)


class Stage(commons.MyModel):
    """A linear layer and a tanh, in float64."""

    def __init__(self, number, pre_process=True, post_process=True):
        super().__init__(HIDDEN, pre_process, post_process)
        torch.manual_seed(100 + number)
        self.layer = commons.MyLayer(HIDDEN, pre_process, post_process).double()

    def forward(self, x):
        return super().forward(x).tanh()


def _batch(copy=0):
    torch.manual_seed(20 + copy)
    return torch.randn(MICRO * SAMPLES, HIDDEN, dtype=torch.float64)


def _loss(output):
    return output.square().mean(), {"loss": output.detach().square().mean()}


def _step(batch, model, *flag):
    FLAGS.extend(flag)
    return model(batch[0]), _loss


FLAGS = []


def _plain(stages, batch):
    """Losses and gradients of all stages after one another, in one process."""
    model = torch.nn.Sequential(*(Stage(number) for number in range(stages)))
    for part in model:
        part.input_tensor = None
    losses = []
    for part in batch.split(SAMPLES):
        loss, _ = _loss(model(part))
        (loss / MICRO).backward()
        losses.append(loss.detach())
    return losses, [[p.grad for p in part.parameters()] for part in model]


def _calculator(data=1):
    utils._reconfigure_microbatch_calculator(
        dist.get_rank(), None, MICRO * SAMPLES * data, SAMPLES, data
    )


def schedule(stages, options, rank):
    """One step of a schedule beside plain PyTorch: losses, and gradients of this rank's stage."""
    options = dict(options)
    wrapped = options.pop("wrapped", False)
    scaled = options.pop("grad_scaler", False)
    with parallel(1, stages):
        _calculator(4 // stages)
        copy, number = state.get_data_parallel_rank(), state.get_pipeline_model_parallel_rank()
        models = pipeline_parallel.build_model(
            lambda **kwargs: Stage(number, **kwargs), wrap_with_ddp=wrapped
        )
        assert utils.get_model_type(models[0]) == ModelType.encoder_or_decoder
        run = pipeline_parallel.get_forward_backward_func(None, stages)
        FLAGS.clear()
        calls = []
        if "custom_grad_sync_func" in options:
            options["custom_grad_sync_func"] = lambda params: calls.append(len(list(params)))
        if "custom_sync_context_handler" in options:
            backwards = []
            next(models[0].parameters()).register_hook(backwards.append)

            @contextlib.contextmanager
            def context():
                calls.append("enter")
                yield
                calls.append(len(backwards))

            options["custom_sync_context_handler"] = context
        scaler = GradScaler(8.0) if scaled else None
        reported = run(
            _step, [_batch(copy)], models, tensor_shape=SHAPE, dtype=torch.float64,
            forward_only=options.pop("forward_only", False),
            grad_scaler=scaler, **options,
        )  # fmt: skip
        found = [p.grad for p in models[0].parameters()]
        alone = [_plain(stages, _batch(other)) for other in range(4 // stages)]
        losses, gradients = alone[copy]
        if number == stages - 1:
            close = [report["loss"] for report in reported]
            tolerance.assert_close_to_largest(torch.stack(close), torch.stack(losses), CLOSE)
        else:
            assert reported == []
        wanted = gradients[number]
        if wrapped:
            every = [gradient[number] for _, gradient in alone]
            wanted = [sum(parts) / len(parts) for parts in zip(*every, strict=True)]
        for gradient, exact in zip(found, wanted, strict=True):
            if gradient is not None:
                factor = 8 if scaled else 1
                tolerance.assert_close_to_largest(gradient, factor * exact, CLOSE)
        if scaler is not None:  # on stages without a loss, too
            scaler.step(torch.optim.SGD(models[0].parameters()))
        return [gradient is not None for gradient in found], calls, FLAGS


CLOSE = tolerance.TORCH_IN_FLOAT64


class Decoder(torch.nn.Module):
    """A stage of an encoder or a decoder that adds the encoder's mean."""

    def __init__(self, number, pre_process, post_process, add_encoder=True, add_decoder=True):
        super().__init__()
        torch.manual_seed(100 + number)
        self.layer = torch.nn.Linear(HIDDEN, HIDDEN).double()
        self.pre_process, self.add_decoder = pre_process, add_decoder
        self.inputs = None

    def set_input_tensor(self, inputs):
        self.inputs = inputs

    def forward(self, encoded, decoded):
        if not self.add_decoder:
            return self.layer(encoded if self.pre_process else self.inputs[0]).tanh()
        x = decoded if self.pre_process else self.inputs[0]
        return (self.layer(x) + self.inputs[-1].mean(0)).tanh()


def encoder_and_decoder(rank):
    """Two stages of an encoder, two of a decoder that all see its output."""
    with parallel(1, 4, None, 2):
        _calculator()
        number = state.get_pipeline_model_parallel_rank()
        models = pipeline_parallel.build_model(
            lambda **kwargs: Decoder(number, **kwargs), False, None, ModelType.encoder_and_decoder
        )
        encoded = _batch()
        decoded = _batch(1)[:, None].expand(-1, 3, -1)
        batch = [encoded, decoded]

        def step(batch, model):
            source, target = batch
            return model(
                source[:, None].expand(-1, 5, -1).transpose(0, 1), target.transpose(0, 1)
            ), _loss

        run = pipeline_parallel.get_forward_backward_func(None, 4)
        arguments = {"tensor_shape": (5, SAMPLES, HIDDEN), "dtype": torch.float64}
        reported = run(
            step, batch, models, forward_only=False, decoder_sequence_length=3, **arguments
        )
        parts = [Decoder(n, n in (0, 2), n in (1, 3), n < 2, n >= 2) for n in range(4)]
        losses = []
        for k in range(MICRO):
            source, target = (x[k * SAMPLES : (k + 1) * SAMPLES] for x in batch)
            source = source[:, None].expand(-1, 5, -1).transpose(0, 1)
            parts[1].inputs = [parts[0](source, None)]
            memory = parts[1](None, None)
            parts[2].inputs = [memory]
            parts[3].inputs = [parts[2](None, target.transpose(0, 1)), memory]
            loss, _ = _loss(parts[3](None, None))
            (loss / MICRO).backward()
            losses.append(loss.detach())
        for mine, plain in zip(models[0].parameters(), parts[number].parameters(), strict=True):
            tolerance.assert_close_to_largest(mine.grad, plain.grad, CLOSE)
        if number == 3:
            found = torch.stack([report["loss"] for report in reported])
            tolerance.assert_close_to_largest(found, torch.stack(losses), CLOSE)
        return said(run, step, batch, models, forward_only=True, **arguments)


def sequence_parallel(rank):
    """Two stages of two tensor-parallel ranks, with and without the sequence in parts."""
    with parallel(2, 2):
        _calculator()
        utils._reconfigure_microbatch_calculator(rank, None, MICRO * SAMPLES, SAMPLES, 1)
        results = []
        batch = torch.randn(MICRO * SAMPLES, 4, HIDDEN, generator=torch.Generator().manual_seed(3))
        for sequence in (False, True):
            number = state.get_pipeline_model_parallel_rank()
            torch.manual_seed(100 + number)
            models = pipeline_parallel.build_model(
                functools.partial(commons.mlp_provider_func, HIDDEN),
                wrap_with_ddp=False,
                sequence_parallel_enabled=sequence,
            )
            inner = commons.ToyParallelMLPFwdBwdStepFunc(sequence)

            def step(batch, model, inner=inner, sequence=sequence):
                output, _ = inner(batch[0].transpose(0, 1), model)

                def loss(x):
                    total = (
                        mappings.gather_from_sequence_parallel_region(x, to_model_parallel=False)
                        if sequence
                        else x
                    )
                    return total.square().sum(), total.detach()

                return output, loss

            run = pipeline_parallel.get_forward_backward_func(None, 2)
            run(step, [batch], models, forward_only=False, tensor_shape=(4, SAMPLES, HIDDEN),
                sequence_parallel_enabled=sequence)  # fmt: skip
            for param in models[0].parameters():
                if getattr(param, "sequence_parallel_enabled", False):
                    dist.all_reduce(param.grad, group=state.get_tensor_model_parallel_group())
            results.append([param.grad for param in models[0].parameters()])
        for whole, parts in zip(*results, strict=True):
            tolerance.assert_close_to_largest(parts, whole.double(), tolerance.PARALLEL)


def neighbours(rank):
    """Each function between four stages; as a ring where the caller says so."""
    with parallel(1, 4):
        stage = state.get_pipeline_model_parallel_rank()
        x = torch.full((2, 3), float(stage))
        named = []

        class Timer:
            def start(self):
                named.append("start")

            def stop(self):
                named.append("stop")

        before, after = float((stage - 1) % 4), float((stage + 1) % 4)
        p2p.send_forward(x)
        found = p2p.recv_forward((2, 3), timers=lambda name: named.append(name) or Timer())
        assert named == (["forward-recv", "start", "stop"])
        assert (found is None) if stage == 0 else (found == before).all() and found.requires_grad
        p2p.send_backward(x, (2, 3))
        found = p2p.recv_backward((2, 3))
        assert (found is None) if stage == 3 else (found == after).all()
        found = p2p.send_forward_recv_forward(x, True, (2, 3))
        assert (found == before).all()
        found = p2p.send_backward_recv_backward(x, True, (2, 3), async_comm=True)
        assert isinstance(found, p2p.FutureTensor)
        assert (found.get() == after).all()
        both = p2p.send_forward_backward_recv_forward_backward(
            x.double(), x.double(), True, True, (2, 3), dtype=torch.float64
        )
        assert [t[0, 0].item() for t in both] == [before, after]
        assert both[0].dtype == torch.float64
        assert p2p.send_forward_backward_recv_forward_backward(None, None, False, False, ()) == (
            None, None,
        )  # fmt: skip
        texts = [
            said(p2p.recv_backward),
            said(p2p.recv_forward, (2, 3), async_comm=1),
            said(p2p.send_forward_recv_forward, x, True, (2, 3), overlap_p2p_comm=True),
        ]
    with parallel(1, 2):  # the stage before is the next one
        other = 1.0 - state.get_pipeline_model_parallel_rank()
        both = p2p.send_forward_backward_recv_forward_backward(
            torch.tensor([1.0 - other]), torch.tensor([11.0 - other]), True, True, (1,)
        )
        assert [t.item() for t in both] == [other, 10.0 + other]
    return texts


def helpers(rank):
    """Norms and means over ranks; what is refused of a schedule."""
    with parallel(2, 1):
        model = torch.nn.Linear(2, 2)
        with torch.no_grad():
            model.weight.fill_(1.0)
            model.bias.fill_(2.0)
        model.weight.tensor_model_parallel = True
        norm = utils.calc_params_l2_norm([model], bf16=False)  # 2 * 4 parts, 2 * 2**2 once
        mean = utils.average_losses_across_data_parallel_group([torch.tensor(float(rank))])
        found = [norm**2, mean.item(), utils.is_last_rank()]
    with parallel(1, 2):
        _calculator(2)
        run = pipeline_parallel.get_forward_backward_func(None, 2)
        model.model_type = ModelType.encoder_or_decoder
        build = pipeline_parallel.build_model
        texts = [
            said(run, _step, None, [model, model], forward_only=True, tensor_shape=(1,)),
            said(run, _step, None, [model], forward_only=True),
            said(run, _step, None, [model], forward_only=True, tensor_shap=(1,)),
            said(utils.get_kth_microbatch, [torch.ones(11)], 5),
            said(pipeline_parallel.get_forward_backward_func, 2, 2),
            said(build, commons.model_provider_func, True, 2, ModelType.encoder_or_decoder, 4),
            said(build, lambda **k: model, True, None, ModelType.encoder_and_decoder),
        ]
    return found, texts


def freed(rank):
    """A freed output has one element and still leads back."""
    x = torch.ones(3, requires_grad=True)
    y = x.square()
    common.free_output_tensor([y, None], deallocate_pipeline_outputs=True)
    assert y.shape == (1,)
    common.custom_backward(y, torch.full((3,), 2.0))
    equal(x.grad, torch.full((3,), 4.0))
    z = x.square()
    common.free_output_tensor(z, deallocate_pipeline_outputs=False)
    assert z.shape == (3,)

"""The files of this folder: objects that programs save whole, saved by an older Apex.

A pickle of an object names the module and the class of each part. The files were made with commit
81bdddb, before classes and files were renamed, those with a policy and the options with 30a7871.
Add one for a new class that users save; do not make the old ones again, since they would hold
today's names. To add files, put the ``src`` of the version that they stand for first on
``PYTHONPATH`` and run ``python -m tests.saved_whole.make NAMES``.
"""

import contextlib
import sys
import warnings
from pathlib import Path

import torch
from torch import nn

from apex import RNN, amp, fp16_utils, mlp, normalization, optimizers, parallel, reparameterization
from apex.contrib import bottleneck, groupbn, multihead_attn, sparsity, xentropy
from apex.contrib import optimizers as old_optimizers
from apex.contrib.optimizers.fused_sgd import FusedSGD as OldSGD
from apex.fused_dense import FusedDense
from apex.transformer import AttnMaskType, parallel_state, tensor_parallel
from apex.transformer import amp as transformer_amp
from apex.transformer.functional import FusedScaleMaskSoftmax
from tests.ranks import alone

HERE = Path(__file__).parent
LEVELS = "O0", "O1", "O2", "O3", "O4", "O5"
POLICY = {"apex_precision_policy": 1, "formats": {"float16": {"modules": {"1": "float32"}}}}


# -- how what is saved is used ---------------------------------------------------------------------


def inputs(*shape):
    count = torch.Size(shape).numel()
    return torch.linspace(-1.0, 1.0, count, device="cpu", dtype=torch.float32).view(shape)


def loss_of(saved):
    model = saved["model"]
    linear = next(module for module in model.modules() if hasattr(module, "in_features"))
    dtype = None if saved["how"] == "amp" else next(model.parameters()).dtype
    return model(inputs(6, linear.in_features).to(dtype)).float().square().mean()


def step(saved):
    """One step of a training; the loss."""
    optimizer = saved["optimizer"]
    optimizer.zero_grad()
    loss = loss_of(saved)
    if saved["how"] == "amp":
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
    elif saved["how"] == "handle":
        with optimizer.scale_loss(loss) as scaled:
            scaled.backward()
    elif saved["how"] == "fp16":
        optimizer.backward(loss)
    elif saved["how"] == "scaler":
        saved["scaler"].scale(loss).backward()
        saved["scaler"].step(optimizer)
        saved["scaler"].update()
        return loss.item()
    else:
        loss.backward()
    optimizer.step()
    return loss.item()


# -- what is saved ---------------------------------------------------------------------------------


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 2))


def training(how, model, optimizer, **more):
    saved = {"how": how, "model": model, "optimizer": optimizer, **more}
    step(saved)
    optimizer.zero_grad()
    return saved


def sgd(params):
    return torch.optim.SGD(params, lr=0.1)


def at_level(level, make=sgd, wrap=None, **options):
    model = net()
    optimizer = make(model.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, optimizer = amp.initialize(
            model, optimizer, opt_level=level, verbosity=0, loss_scale=128.0, **options
        )
    return training("amp", wrap(model) if wrap else model, optimizer)


def with_optimizer(kind, model=None, **options):
    model = model or net()
    return training("plain", model, kind(model.parameters(), **options))


def of_model(make):
    torch.manual_seed(0)
    model = make()
    return training("plain", model, sgd(model.parameters()))


def ddp(**options):
    return of_model(lambda: parallel.DistributedDataParallel(net(), **options))


def half(kind, make):
    model = fp16_utils.network_to_half(net())
    return training("fp16", model, kind(make(model.parameters()), dynamic_loss_scale=True))


def handle():
    model = net()
    optimizer = amp.handle.AmpHandle().wrap_optimizer(sgd(model.parameters()))
    return {"how": "handle", "model": model, "optimizer": optimizer}


def scaler(made):
    model = net()
    return training("scaler", model, sgd(model.parameters()), scaler=made)


def sparse():
    model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 16))
    optimizer = sgd(model.parameters())
    sparsity.ASP.init_model_for_pruning(model, verbosity=0, allow_permutation=False)
    sparsity.ASP.init_optimizer_for_pruning(optimizer)
    sparsity.ASP.compute_sparse_masks()
    found = training("plain", model, optimizer)
    sparsity.ASP.reset()
    return found


def layers():
    torch.manual_seed(0)
    return nn.Sequential(
        parallel.SyncBatchNorm(4),
        parallel.convert_syncbn_model(nn.BatchNorm1d(4)),
        normalization.FusedLayerNorm(4),
        normalization.MixedFusedRMSNorm(4),
        mlp.MLP([4, 4]),
        FusedDense(4, 2),
    )


def modules():
    """Layers with an input of their own each; none is trained."""
    torch.manual_seed(0)
    return {
        "lstm": RNN.LSTM(4, 3, 1),
        "mlstm": RNN.mLSTM(4, 3, 1),
        "attention": multihead_attn.SelfMultiheadAttn(8, 2),
        "softmax": FusedScaleMaskSoftmax(
            False, True, AttnMaskType.causal, True, torch.Tensor.masked_fill, True, None
        ),
        "column": tensor_parallel.ColumnParallelLinear(4, 2, use_cpu_initialization=True),
        "bottleneck": bottleneck.Bottleneck(4, 2, 8),
        "batchnorm": groupbn.BatchNorm2d_NHWC(4),
        "cross-entropy": xentropy.LinearCrossEntropyLoss(4, 3),
    }


def adam(params):
    return optimizers.FusedAdam(params, lr=0.01)


OPTIMIZERS = {
    "adam": (optimizers.FusedAdam, {}),
    "adagrad": (optimizers.FusedAdagrad, {}),
    "lamb": (optimizers.FusedLAMB, {}),
    "lion": (optimizers.FusedLion, {}),
    "mixed-lamb": (optimizers.FusedMixedPrecisionLamb, {}),
    "muon": (optimizers.FusedMuon, {}),
    "novograd": (optimizers.FusedNovoGrad, {"lr": 0.02}),
    "sgd": (optimizers.FusedSGD, {"lr": 0.1, "momentum": 0.9}),
    "old-adam": (old_optimizers.FusedAdam, {}),
    "old-lamb": (old_optimizers.FusedLAMB, {}),
    "old-sgd": (OldSGD, {"lr": 0.1, "momentum": 0.9}),
}
TRAININGS = {
    **{f"amp-{x}": lambda x=x: at_level(x) for x in LEVELS},
    **{f"amp-{x}-adam": lambda x=x: at_level(x, adam) for x in ("O2", "O5")},
    **{f"amp-{x}-policy": lambda x=x: at_level(x, policy=POLICY) for x in ("O1", "O2")},
    "amp-O2-ddp": lambda: at_level("O2", wrap=parallel.DistributedDataParallel),
    "amp-O1-larc": lambda: at_level("O1", lambda params: parallel.LARC(sgd(params))),
    "amp-handle": handle,
    "ddp": ddp,
    "ddp-options": lambda: ddp(message_size=8, gradient_predivide_factor=2.0),
    "larc": lambda: with_optimizer(lambda params: parallel.LARC(sgd(params))),
    "fp16-optimizer": lambda: half(fp16_utils.FP16_Optimizer, sgd),
    "fp16-optimizer-fused": lambda: half(optimizers.FP16_Optimizer, adam),
    **{x: lambda x=x: with_optimizer(OPTIMIZERS[x][0], **OPTIMIZERS[x][1]) for x in OPTIMIZERS},
    "adam-low-bits": lambda: with_optimizer(
        optimizers.FusedAdam, net().bfloat16(), storage="low_bits"
    ),
    "adam-8bit": lambda: with_optimizer(
        optimizers.FusedAdam, nn.Linear(64, 64, bias=False), state="8bit"
    ),
    "weight-norm": lambda: of_model(lambda: reparameterization.apply_weight_norm(net())),
    "sparse": sparse,
    "layers": lambda: of_model(layers),
    "grad-scaler": lambda: scaler(amp.GradScaler("cpu", 128.0)),
    "transformer-grad-scaler": lambda: scaler(transformer_amp.GradScaler(128.0)),
}


def loss_scalers():
    return {
        "amp": amp.scaler.LossScaler("dynamic"),
        "static": fp16_utils.LossScaler(128.0),
        "dynamic": fp16_utils.DynamicLossScaler(128.0),
    }


def options():
    at_level("O2")
    return amp._amp_state.opt_properties


@contextlib.contextmanager
def one_rank():
    """Also the parallel state of apex.transformer."""
    with alone():
        parallel_state.initialize_model_parallel()
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()


def main(names):
    files = {**TRAININGS, "modules": modules, "loss-scalers": loss_scalers, "options": options}
    with one_rank():
        for name in names:
            torch.save(files[name](), HERE / f"{name}.pt")


if __name__ == "__main__":
    main(sys.argv[1:])

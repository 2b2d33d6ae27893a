"""A small network in which every kernel of the library runs, and some steps of its training."""

import torch
from amp_C import multi_tensor_l2norm
from torch import nn

from apex import amp
from apex.contrib.focal_loss import focal_loss
from apex.contrib.group_norm import GroupNorm
from apex.contrib.index_mul_2d import index_mul_2d
from apex.contrib.xentropy import SoftmaxCrossEntropyLoss
from apex.mlp import swiglu
from apex.normalization import FusedLayerNorm, FusedRMSNorm
from apex.optimizers import FusedLAMB
from apex.transformer.functional import fused_apply_rotary_pos_emb
from apex.transformer.functional.fused_softmax import scaled_upper_triang_masked_softmax

BATCH, LENGTH, FEATURES, CLASSES, STEPS = 4, 8, 64, 5, 3
WIDE = 40_008  # more than a norm keeps in registers, in a multiple of 8


class Network(nn.Module):
    """Images to classes, through attention and a gated layer."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(FEATURES, 1, 1))
        self.images = GroupNorm(4, FEATURES, act="silu")
        self.first, self.last = FusedLayerNorm(FEATURES), FusedRMSNorm(FEATURES)
        self.wide = FusedRMSNorm(WIDE)
        self.narrower = FusedLayerNorm(WIDE // 4, memory_efficient=True)
        self.qkv = nn.Linear(FEATURES, 3 * FEATURES)
        self.gate = nn.Linear(FEATURES, 2 * FEATURES)
        self.classes = nn.Linear(FEATURES, CLASSES)

    def forward(self, images, index):
        """``(batch, features, 2, 4)`` to ``(batch, length, classes)``."""
        images = images * self.scale
        x = self.images(images.contiguous(memory_format=torch.channels_last))
        x = self.first(x.flatten(2).permute(2, 0, 1))  # (length, batch, features)
        query, key, value = self.qkv(x).chunk(3, dim=-1)
        angles = torch.arange(LENGTH * FEATURES).view(LENGTH, 1, 1, FEATURES) / 50.0
        query, key = (
            fused_apply_rotary_pos_emb(t[:, :, None], angles)[:, :, 0] for t in (query, key)
        )
        scores = torch.bmm(query.transpose(0, 1), key.permute(1, 2, 0))
        weights = scaled_upper_triang_masked_softmax(scores, None, FEATURES**-0.5)
        x = torch.bmm(weights, value.transpose(0, 1).to(weights.dtype))
        x = self.last(x + swiglu(*self.gate(x).chunk(2, dim=-1)))
        rows = x.reshape(-1, FEATURES)
        x = index_mul_2d(rows, torch.ones_like(rows), index).view(x.shape)
        wide = self.wide(x.reshape(1, -1).repeat(1, WIDE // x.numel() + 1)[:, :WIDE])
        wide = self.narrower(wide.view(4, -1))
        return self.classes(x + 1e-3 * wide.sum())


def losses(level):
    """The losses and logits' norms of some steps at a level, with ``fused_step`` and clipping."""
    torch.manual_seed(0)
    model = Network()
    images, index = torch.randn(BATCH, FEATURES, 2, 4), torch.randperm(BATCH * LENGTH)
    labels = torch.randint(CLASSES, (BATCH * LENGTH,))
    optimizer = FusedLAMB(model.parameters(), lr=0.02, weight_decay=0.01, state="8bit")
    try:
        model, optimizer = amp.initialize(
            model, optimizer, opt_level=level, verbosity=0, fused_step=True
        )
        found, flag = [], torch.zeros(1, dtype=torch.int32)
        for _ in range(STEPS):
            logits = model(images, index).reshape(-1, CLASSES)
            entropy = SoftmaxCrossEntropyLoss.apply(logits, labels, 0.1, -1).mean()
            count = torch.tensor([float(len(labels))])
            focal = focal_loss(logits.float(), labels, count, CLASSES, 0.25, 2.0, 0.0)
            loss = entropy + focal
            optimizer.zero_grad()
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            amp.clip_grad_norm_(optimizer, 1.0)
            optimizer.step()
            norm, _ = multi_tensor_l2norm(65536, flag, [[logits.detach().float()]], False)
            found += [loss.item(), norm.item()]
        return found
    finally:
        amp.reset()

"""The definitions of joint and loss, cell by cell, with the results of the original's references.

For tests: they are slow, and take lengths and labels to be right.
"""

import torch

Tensor = torch.Tensor


def transducer_joint_reference(
    f: Tensor, g: Tensor, h_grad: Tensor, f_len: Tensor, g_len: Tensor, pack_output: bool,
    relu: bool, dropout: bool, dropout_prob: float = 0, mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute h, and the gradients of leaves f and g for ``h_grad`` ``(B, T, U, H)``."""
    h = f[:, :, None] + g[:, None]
    if relu:
        h = h.relu()
    if dropout:
        if mask is None:
            raise NotImplementedError("transducer_joint_reference: dropout needs a mask.")
        h = h * mask / (1 - dropout_prob)
    df, dg = torch.autograd.grad(h, (f, g), h_grad)
    used = list(zip(f_len.tolist(), g_len.tolist(), strict=True))
    if pack_output:
        return (
            torch.cat([x[:t, :u].flatten(0, 1) for x, (t, u) in zip(h, used, strict=True)]),
            df,
            dg,
        )
    h = h.detach()
    for x, (t, u) in zip(h, used, strict=True):
        x[t:], x[:, u:] = -1, -1
    return h, df, dg


def transducer_loss_reference(
    x: Tensor, label: Tensor, f_len: Tensor, y_len: Tensor, blank_idx: int, loss_grad: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute alpha, beta ``(B, T, U)``, the gradient of the leaf x, and losses in its dtype."""
    wide = x.double() if x.dtype == torch.float64 else x.float()
    logs, losses = torch.log_softmax(wide, -1), []
    alpha, beta = (logs.new_zeros(x.shape[:3]) for _ in range(2))
    for b, (times, labels) in enumerate(zip(f_len.tolist(), y_len.tolist(), strict=True)):
        p, y = logs[b], [*label[b, :labels].tolist(), blank_idx]
        one, other = {(0, 0): p.new_zeros(())}, {(times, labels): p.new_zeros(())}
        cells = [(t, u) for t in range(times) for u in range(labels + 1)]
        for t, u in cells[1:]:
            from_ = [(t - 1, u, blank_idx), (t, u - 1, y[u - 1])]
            paths = [one[i, j] + p[i, j, k] for i, j, k in from_ if (i, j) in one]
            one[t, u] = torch.stack(paths).logsumexp(0)
        for t, u in reversed(cells):
            to = [(t + 1, u, blank_idx), (t, u + 1, y[u])]
            paths = [other[i, j] + p[t, u, k] for i, j, k in to if (i, j) in other]
            other[t, u] = torch.stack(paths).logsumexp(0)
        for t, u in cells:
            alpha[b, t, u], beta[b, t, u] = one[t, u].detach(), other[t, u].detach()
        losses.append(-other[0, 0])
    loss = torch.stack(losses).to(x.dtype)
    return alpha, beta, torch.autograd.grad(loss, x, loss_grad)[0], loss.detach()

"""The kernels of group norm; what launches them is in :mod:`apex.kernels.group_norm`."""

import triton
import triton.language as tl


@triton.jit
def _place(parts, rows, step, CHANNELS: tl.constexpr):
    """Image, first and last row, and channels of a program."""
    image = (tl.program_id(0) // parts).to(tl.int64)
    first = (tl.program_id(0) % parts) * step
    last = tl.minimum(first + step, rows)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    return image, first, last, channel


@triton.jit
def _tile(image, at, last, rows, channels, channel, ROWS: tl.constexpr):
    """Offsets and mask of the tile of ``ROWS`` rows from ``at`` on."""
    row = at + tl.arange(0, ROWS)
    start = (image * rows + row.to(tl.int64)) * channels
    mask = (row < last)[:, None] & (channel < channels)[None, :]
    return start[:, None] + channel[None, :], mask


@triton.jit
def _of_channels(pointer, channel, channels, default):
    """Weights or biases of a tile's channels, or the default if there are none."""
    values = tl.full(channel.shape, default, tl.float32)
    if pointer is not None:
        values = tl.load(pointer + channel, mask=channel < channels, other=0.0).to(tl.float32)
    return values


@triton.jit
def _of_groups(stats_ptr, image, channel, channels, groups):
    """The two numbers that each channel's group has."""
    width = channels // groups
    inside = channel < channels
    at = (image * groups + channel // width) * 2
    first = tl.load(stats_ptr + at, mask=inside, other=0.0)
    second = tl.load(stats_ptr + at + 1, mask=inside, other=0.0)
    return first, second


@triton.jit
def _group(channels, groups, WIDTH: tl.constexpr):
    """Image and channels of the group of a program."""
    image = (tl.program_id(0) // groups).to(tl.int64)
    width = channels // groups
    lane = tl.arange(0, WIDTH)
    return image, tl.program_id(0) % groups * width + lane, lane < width, width


@triton.jit
def _store_pair(pointer, one, two):
    """Write a group's two numbers."""
    at = pointer + tl.program_id(0).to(tl.int64) * 2
    tl.store(at, one)
    tl.store(at + 1, two)


@triton.jit
def _store_sums(partial_ptr, channels, channel, one, two):
    """Write a program's sums as two rows of ``partial``."""
    at = partial_ptr + tl.program_id(0).to(tl.int64) * 2 * channels + channel
    tl.store(at, one, mask=channel < channels)
    tl.store(at + channels, two, mask=channel < channels)


@triton.jit
def _pair(partial_ptr, at, image, channel, inside, channels, parts, PARTS: tl.constexpr):
    """Numbers of programs of an image, from ``at`` on, and both rows that each has stored."""
    part = at + tl.arange(0, PARTS)
    mask = (part < parts)[:, None] & inside[None, :]
    start = (image * parts + part) * 2 * channels
    pointers = partial_ptr + start[:, None] + channel[None, :]
    one = tl.load(pointers, mask=mask, other=0.0)
    return part, one, tl.load(pointers + channels, mask=mask, other=0.0)


@triton.jit
def _merged(means, squares, counts, count):
    """Mean and sum of squared differences from it, of ``count`` numbers, merged along axis 0."""
    mean = tl.sum(means * counts, axis=0) / count
    apart = means - mean
    # The sum above has roundings of a large mean, this one has not.
    more = tl.sum(apart * counts, axis=0) / count
    return mean + more, tl.sum(squares + counts * (apart * apart), axis=0)


@triton.jit
def group_norm_moments(
    # data
    x_ptr, partial_ptr,
    # shape
    rows, channels, parts, step,
    # compile-time
    ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Mean over a program's rows, and sum of squared differences from it, for each channel.

    Each lane keeps both of what it has seen (Welford); lanes are merged at the end (Chan et al.).
    9 instructions an element on sm_90, 4.6 a byte of a 16-bit image; by separate roundings 11.
    """
    image, first, last, channel = _place(parts, rows, step, CHANNELS)
    means = tl.zeros((ROWS, CHANNELS), tl.float32)
    squares = tl.zeros((ROWS, CHANNELS), tl.float32)
    seen = 0.0
    for at in range(first, last, ROWS):
        offsets, mask = _tile(image, at, last, rows, channels, channel, ROWS)
        x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        seen += 1.0
        share = 1.0 / seen
        delta = tl.where(mask, x - means, 0.0)
        means = tl.fma(delta, share, means)
        squares = tl.fma(delta * delta, 1.0 - share, squares)
    counts = tl.cdiv(tl.maximum(last - first - tl.arange(0, ROWS), 0), ROWS).to(tl.float32)[:, None]
    mean, squared = _merged(means, squares, counts, last - first)
    _store_sums(partial_ptr, channels, channel, mean, squared)


@triton.jit
def group_norm_stats(
    # data
    partial_ptr, stats_ptr,
    # shape and scalars
    rows, channels, groups, parts, step, eps,
    # compile-time
    PARTS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Mean and reciprocal deviation of a group, merged from those of programs and channels."""
    image, channel, inside, width = _group(channels, groups, WIDTH)
    means = tl.zeros((PARTS, WIDTH), tl.float32)
    squares = tl.zeros((PARTS, WIDTH), tl.float32)
    seen = tl.zeros((PARTS, 1), tl.float32)
    for at in range(0, parts, PARTS):
        part, mean, squared = _pair(partial_ptr, at, image, channel, inside, channels, parts, PARTS)
        count = tl.minimum(tl.maximum(rows - part * step, 0), step).to(tl.float32)[:, None]
        total = seen + count
        share = count / tl.maximum(total, 1.0)
        delta = mean - means
        means += delta * share
        squares += squared + delta * (delta * (seen * share))
        seen = total
    mean, squared = _merged(means, squares, seen, rows)  # of each channel
    seen = tl.where(inside, 1.0, 0.0) * rows
    mean, squared = _merged(mean, squared, seen, rows * 1.0 * width)
    variance = squared / (rows * 1.0 * width)
    _store_pair(stats_ptr, mean, 1.0 / tl.sqrt_rn(variance + eps))


@triton.jit
def _sigmoid(x):
    """4 instructions on sm_90, and `tl.exp` and a division 14; `exp2` and `rsqrt` are one each."""
    root = tl.rsqrt(1.0 + tl.exp2(x * -1.4426950408889634))
    return root * root


@triton.jit
def group_norm_forward(
    # data
    x_ptr, weight_ptr, bias_ptr, stats_ptr, y_ptr,
    # shape
    rows, channels, groups, parts, step,
    # compile-time
    SILU: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """``y = act((x - mean) * rstd * weight + bias)``."""
    image, first, last, channel = _place(parts, rows, step, CHANNELS)
    mean, rstd = _of_groups(stats_ptr, image, channel, channels, groups)
    factor = rstd * _of_channels(weight_ptr, channel, channels, 1.0)
    bias = _of_channels(bias_ptr, channel, channels, 0.0)
    for at in range(first, last, ROWS):
        offsets, mask = _tile(image, at, last, rows, channels, channel, ROWS)
        x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        y = (x - mean[None, :]) * factor[None, :] + bias[None, :]
        if SILU:
            y = y * _sigmoid(y)
        tl.store(y_ptr + offsets, y, mask=mask)


@triton.jit
def _slope(dy_ptr, x_ptr, offsets, mask, mean, rstd, weight, bias, SILU: tl.constexpr):
    """Normalized input, and gradient with respect to what the activation is applied to."""
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    dz = tl.load(dy_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    x_hat = (x - mean[None, :]) * rstd[None, :]
    if SILU:
        z = x_hat * weight[None, :] + bias[None, :]
        gate = _sigmoid(z)
        dz = dz * gate * (1.0 + z * (1.0 - gate))
    return x_hat, dz


@triton.jit
def group_norm_grad_sums(
    # data
    dy_ptr, x_ptr, weight_ptr, bias_ptr, stats_ptr, partial_ptr,
    # shape
    rows, channels, groups, parts, step,
    # compile-time
    SILU: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Sums over rows of ``dz`` and of ``dz * x_hat``, for each channel."""
    image, first, last, channel = _place(parts, rows, step, CHANNELS)
    mean, rstd = _of_groups(stats_ptr, image, channel, channels, groups)
    weight = _of_channels(weight_ptr, channel, channels, 1.0)
    bias = _of_channels(bias_ptr, channel, channels, 0.0)
    one = tl.zeros((ROWS, CHANNELS), tl.float32)
    two = tl.zeros((ROWS, CHANNELS), tl.float32)
    for at in range(first, last, ROWS):
        offsets, mask = _tile(image, at, last, rows, channels, channel, ROWS)
        x_hat, dz = _slope(dy_ptr, x_ptr, offsets, mask, mean, rstd, weight, bias, SILU)
        one += dz  # 0 outside of the mask, as dy is
        two += dz * x_hat
    _store_sums(partial_ptr, channels, channel, tl.sum(one, axis=0), tl.sum(two, axis=0))


@triton.jit
def group_norm_grad_stats(
    # data
    partial_ptr, weight_ptr, sums_ptr, means_ptr,
    # shape
    rows, channels, groups, parts,
    # compile-time
    PARTS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Join partial sums: those of each channel, and the means over a group times the weight."""
    image, channel, inside, width = _group(channels, groups, WIDTH)
    one = tl.zeros((PARTS, WIDTH), tl.float32)
    two = tl.zeros((PARTS, WIDTH), tl.float32)
    for at in range(0, parts, PARTS):
        _, a, b = _pair(partial_ptr, at, image, channel, inside, channels, parts, PARTS)
        one += a
        two += b
    a, b = tl.sum(one, axis=0), tl.sum(two, axis=0)
    out = sums_ptr + image * 2 * channels + channel
    tl.store(out, a, mask=inside)
    tl.store(out + channels, b, mask=inside)
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + channel, mask=inside, other=0.0).to(tl.float32)
        a *= weight
        b *= weight
    count = rows * 1.0 * width
    _store_pair(means_ptr, tl.sum(a, axis=0) / count, tl.sum(b, axis=0) / count)


@triton.jit
def group_norm_backward(
    # data
    dy_ptr, x_ptr, weight_ptr, bias_ptr, stats_ptr, means_ptr, dx_ptr,
    # shape
    rows, channels, groups, parts, step,
    # compile-time
    SILU: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """``dx = rstd * (weight * dz - mean(weight * dz) - x_hat * mean(weight * dz * x_hat))``."""
    image, first, last, channel = _place(parts, rows, step, CHANNELS)
    mean, rstd = _of_groups(stats_ptr, image, channel, channels, groups)
    level, tilt = _of_groups(means_ptr, image, channel, channels, groups)
    weight = _of_channels(weight_ptr, channel, channels, 1.0)
    bias = _of_channels(bias_ptr, channel, channels, 0.0)
    factor, level, tilt = rstd * weight, rstd * level, rstd * tilt
    for at in range(first, last, ROWS):
        offsets, mask = _tile(image, at, last, rows, channels, channel, ROWS)
        x_hat, dz = _slope(dy_ptr, x_ptr, offsets, mask, mean, rstd, weight, bias, SILU)
        dx = dz * factor[None, :] - (x_hat * tilt[None, :] + level[None, :])
        tl.store(dx_ptr + offsets, dx, mask=mask)

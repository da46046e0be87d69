"""The scans step by step, in NumPy float64, with their gradients written out by hand."""

import numpy as np


def linear_scan(a, x, h0=None, reverse=False):
    """h_t = a_t h_{t-1} + x_t over axis 1; the states and the last one."""
    a, x = np.asarray(a, np.float64), np.asarray(x, np.float64)
    time = x.shape[1]
    h = np.zeros_like(x[:, 0]) if h0 is None else np.asarray(h0, np.float64)
    out = np.zeros_like(x)
    for t in reversed(range(time)) if reverse else range(time):
        h = a[:, t] * h + x[:, t]
        out[:, t] = h
    return out, h


def linear_scan_grad(a, x, h0, dh, dlast, reverse=False):
    """da, dx, dh0 for cotangents dh of the states and dlast of the last state."""
    h, _ = linear_scan(a, x, h0, reverse)
    order = list(range(x.shape[1]))
    if reverse:
        order.reverse()
    da, dx = np.zeros_like(h), np.zeros_like(h)
    lam = np.asarray(dlast, np.float64)
    for i in reversed(range(len(order))):
        t = order[i]
        lam = lam + dh[:, t]
        dx[:, t] = lam
        da[:, t] = lam * (h[:, order[i - 1]] if i else h0)
        lam = lam * a[:, t]
    return da, dx, lam


def softplus(x):
    return np.logaddexp(0.0, x)


def silu(x):
    return x / (1.0 + np.exp(-x))


def selective_scan(
    u, delta, A, B, C, D=None, z=None, h0=None, delta_bias=None, delta_softplus=False
):
    """Mamba's scan (arXiv 2312.00752, section 3.2): y (B, T, D) and the last state (B, D, N)."""
    u, delta, A, B, C = (np.asarray(v, np.float64) for v in (u, delta, A, B, C))
    batch, time, dim = u.shape
    if delta_bias is not None:
        delta = delta + np.asarray(delta_bias, np.float64)
    if delta_softplus:
        delta = softplus(delta)
    h = np.zeros((batch, dim, A.shape[1])) if h0 is None else np.asarray(h0, np.float64)
    y = np.zeros_like(u)
    for t in range(time):
        decay = np.exp(delta[:, t, :, None] * A)
        h = decay * h + (delta[:, t] * u[:, t])[:, :, None] * B[:, t, None, :]
        y[:, t] = np.einsum("bdn,bn->bd", h, C[:, t])
        if D is not None:
            y[:, t] += np.asarray(D, np.float64) * u[:, t]
        if z is not None:
            y[:, t] *= silu(np.asarray(z, np.float64)[:, t])
    return y, h

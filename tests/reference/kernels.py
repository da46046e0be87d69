"""Float64 NumPy loops for every kernel, straight from the equations."""

from __future__ import annotations

import numpy as np


def f64(*arrays):
    """Float64 copies."""
    return [np.array(v, np.float64) for v in arrays]


def linear_scan(a, x, h0=None, reverse=False):
    """h_t = a_t h_{t-1} + x_t on (B, T, ...); returns h and the last state."""
    a, x = f64(a, x)
    h = np.zeros_like(x)
    state = np.zeros_like(x[:, 0]) if h0 is None else f64(h0)[0]
    steps = range(x.shape[1])
    for t in reversed(steps) if reverse else steps:
        state = a[:, t] * state + x[:, t]
        h[:, t] = state
    return h, state


def linear_scan_vjp(a, x, h0, dh, dlast, reverse=False):
    """Cotangents (da, dx, dh0) of linear_scan, step by step backwards."""
    a, x, h0, dh, dlast = f64(a, x, h0, dh, dlast)
    h, _ = linear_scan(a, x, h0, reverse)
    da, dx, carry = np.zeros_like(a), np.zeros_like(x), dlast
    steps = list(range(x.shape[1]))
    order = steps[::-1] if reverse else steps
    for k in reversed(range(len(order))):
        t = order[k]
        before = h0 if k == 0 else h[:, order[k - 1]]
        g = dh[:, t] + carry
        dx[:, t], da[:, t] = g, g * before
        carry = a[:, t] * g
    return da, dx, carry


def selective_scan(u, delta, a, b, c, d=None, z=None, h0=None):
    """y_t = (C_t h_t + D u_t) silu(z_t), h_t = exp(delta_t A) h_{t-1} + delta_t u_t B_t.

    u, delta, z (B, T, D); a (D, N); b, c (B, T, N); d (D,); h0 (B, D, N). Returns y and h_last.
    """
    u, delta, a, b, c = f64(u, delta, a, b, c)
    state = np.zeros((u.shape[0], *a.shape)) if h0 is None else f64(h0)[0]
    y = np.zeros_like(u)
    for t in range(u.shape[1]):
        step = (delta[:, t] * u[:, t])[..., None] * b[:, t][:, None]
        state = np.exp(delta[:, t][..., None] * a) * state + step
        y[:, t] = (state * c[:, t][:, None]).sum(-1)
    if d is not None:
        y = y + f64(d)[0] * u
    if z is not None:
        gate = f64(z)[0]
        y = y * gate / (1 + np.exp(-gate))
    return y, state

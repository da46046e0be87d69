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


def fixed_point_measure(decay, bx, units, new, old, h0):
    """What one fused iteration returns: ū·(Bx - h), the residual of h against g, and h.

    h and g are scan(λ, (1-λ) (mass Bx - Σ_i weights_i ū_i)) from mass · h0, for `new` and `old`:
    decay, bx (B, T, D); units (B, T, r, D); mass (B,) and weights (B, T, r) of each; h0 (B, D).
    """
    decay, bx, units, h0 = f64(decay, bx, units, h0)
    h, g = (np.zeros_like(bx) for _ in range(2))
    along, residual = np.zeros(units.shape[:3]), np.zeros(len(bx))
    for b in range(bx.shape[0]):
        for out, iterate in ((h, new), (g, old)):
            mass, weights = f64(iterate.mass[b], iterate.weights[b])
            state = mass * h0[b]
            for t in range(bx.shape[1]):
                x = mass * bx[b, t] - weights[t] @ units[b, t]
                state = decay[b, t] * state + (1 - decay[b, t]) * x
                out[b, t] = state
        for t in range(bx.shape[1]):
            along[b, t] = units[b, t] @ (bx[b, t] - h[b, t])
            change, size = np.abs(h[b, t] - g[b, t]).max(), np.abs(h[b, t]).max()
            residual[b] = max(residual[b], change / (size + 1e-8))
    return along, residual, h


def fixed_point_dense(bx, decay, units, alpha, scale=1.0, mixer="householder", h0=None):
    """The fixed point itself, from the dense recurrence (spec 1, section 1).

    h_t = (Λ + (I-Λ) Q)^-1 (Λ h_{t-1} + (I-Λ) Q B x_t).
    """
    bx, decay, units, alpha = f64(bx, decay, units, alpha)
    h = np.zeros_like(bx)
    eye = np.eye(bx.shape[2])
    for b in range(bx.shape[0]):
        state = np.zeros(bx.shape[2]) if h0 is None else f64(h0)[0][b]
        for t in range(bx.shape[1]):
            terms = [scale * w * np.outer(u, u) for w, u in zip(alpha[b, t], units[b, t])]
            q = eye - sum(terms)
            if mixer == "householder":
                q = eye
                for term in terms:
                    q = (eye - term) @ q
            keep, rest = np.diag(decay[b, t]), np.diag(1 - decay[b, t])
            right = decay[b, t] * state + (1 - decay[b, t]) * (q @ bx[b, t])
            state = np.linalg.solve(keep + rest @ q, right)
            h[b, t] = state
    return h


def ssd(x, log_decay, b, c, h0=None):
    """H_t = exp(a_t) H_{t-1} + x_t B_tᵀ, y_t = H_t C_t; x (B, T, H, P), b and c (B, T, G, N).

    The state is (B, H, P, N). Returns y (B, T, H, P) and the last state.
    """
    x, log_decay, b, c = f64(x, log_decay, b, c)
    heads = x.shape[2]
    b, c = (np.repeat(v, heads // v.shape[2], axis=2) for v in (b, c))
    state = np.zeros((*x[:, 0].shape, b.shape[-1])) if h0 is None else f64(h0)[0]
    y = np.zeros_like(x)
    for t in range(x.shape[1]):
        state = np.exp(log_decay[:, t])[..., None, None] * state
        state = state + x[:, t][..., None] * b[:, t][..., None, :]
        y[:, t] = (state * c[:, t][..., None, :]).sum(-1)
    return y, state


def delta_rule(q, k, v, beta, log_decay=None, h0=None):
    """S_t = α_t (I - β_t k_t k_tᵀ) S_{t-1} + β_t k_t v_tᵀ, y_t = S_tᵀ q_t; state (B, H, K, V)."""
    q, k, v, beta = f64(q, k, v, beta)
    alpha = np.ones_like(beta) if log_decay is None else np.exp(f64(log_decay)[0])
    state = np.zeros((*k[:, 0].shape, v.shape[-1])) if h0 is None else f64(h0)[0]
    y = np.zeros_like(v)
    for t in range(v.shape[1]):
        k_t, a_t, b_t = k[:, t][..., None], alpha[:, t], beta[:, t]
        erase = np.eye(k.shape[-1]) - b_t[..., None, None] * k_t * k_t.swapaxes(-1, -2)
        state = a_t[..., None, None] * (erase @ state)
        state = state + b_t[..., None, None] * k_t * v[:, t][..., None, :]
        y[:, t] = (state * q[:, t][..., None]).sum(-2)
    return y, state

"""Mamba-2's recurrence step by step, in NumPy float64 (arXiv 2405.21060)."""

import numpy as np

from tests.reference.scan import silu


def ssd(x, dt, A, B, C, D=None, z=None, h0=None):
    """y (B, T, H, P) and the last state (B, H, P, N)."""
    x, dt, A, B, C = (np.asarray(v, np.float64) for v in (x, dt, A, B, C))
    batch, time, heads, width = x.shape
    groups, n = B.shape[2:]
    h = np.zeros((batch, heads, width, n)) if h0 is None else np.array(h0, np.float64)
    y = np.zeros_like(x)
    for t in range(time):
        for head in range(heads):
            group = head // (heads // groups)
            for b in range(batch):
                decay = np.exp(dt[b, t, head] * A[head])
                write = dt[b, t, head] * np.outer(x[b, t, head], B[b, t, group])
                h[b, head] = decay * h[b, head] + write
                y[b, t, head] = h[b, head] @ C[b, t, group]
                if D is not None:
                    y[b, t, head] += D[head] * x[b, t, head]
    if z is not None:
        y = y * silu(np.asarray(z, np.float64))
    return y, h

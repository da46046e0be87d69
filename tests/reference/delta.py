"""The (gated) delta rule step by step, in NumPy float64; R factors per step (DeltaProduct)."""

import numpy as np


def delta_rule(q, k, v, beta, log_decay=None, h0=None):
    """y (B, T, H, V) and the last state (B, H, K, V); k, v, beta with or without a factor axis."""
    q, k, v, beta = (np.asarray(x, np.float64) for x in (q, k, v, beta))
    if k.ndim == 4:
        k, v, beta = k[:, :, None], v[:, :, None], beta[:, :, None]
    batch, time, factors, heads, size = k.shape
    s = np.zeros((batch, heads, size, v.shape[-1])) if h0 is None else np.array(h0, np.float64)
    y = np.zeros((batch, time, heads, v.shape[-1]))
    for b in range(batch):
        for head in range(heads):
            for t in range(time):
                if log_decay is not None:
                    s[b, head] *= np.exp(np.float64(log_decay[b, t, head]))
                for r in range(factors):
                    key, strength = k[b, t, r, head], beta[b, t, r, head]
                    reflection = np.eye(size) - strength * np.outer(key, key)
                    s[b, head] = reflection @ s[b, head]
                    s[b, head] += strength * np.outer(key, v[b, t, r, head])
                y[b, t, head] = s[b, head].T @ q[b, t, head]
    return y, s

"""A Mamba-2 block (Dao and Gu, arXiv 2405.21060) in plain NumPy float64, loops and all."""

import numpy as np

from tests.reference.mamba import causal_conv, silu


def block(params, head_dim, groups, u, eps=1e-5):
    """What a Mamba-2 layer adds to the stream, one sample (T, D)."""
    t, heads = u.shape[0], params["A_log"].shape[0]
    d = heads * head_dim
    n = (params["in_proj"]["kernel"].shape[1] - 2 * d - heads) // (2 * groups)
    gate, mixed, dt = np.split(
        u @ params["in_proj"]["kernel"], (d, 2 * d + 2 * groups * n), axis=-1
    )
    if "conv1d" in params:
        mixed = causal_conv(params["conv1d"], mixed)
    x, b, c = np.split(silu(mixed), (d, d + groups * n), axis=-1)
    x, b, c = x.reshape(t, heads, -1), b.reshape(t, groups, n), c.reshape(t, groups, n)
    dt = np.log1p(np.exp(dt + params["dt_bias"]))
    y = np.zeros_like(x)
    for h in range(heads):
        group = h // (heads // groups)
        state = np.zeros((head_dim, n))
        for i in range(t):
            decay = np.exp(-dt[i, h] * np.exp(params["A_log"][h]))
            state = decay * state + dt[i, h] * np.outer(x[i, h], b[i, group])
            y[i, h] = state @ c[i, group] + params["D"][h] * x[i, h]
    y = y.reshape(t, d) * silu(gate)
    y = y / np.sqrt(np.mean(y * y, -1, keepdims=True) + eps) * params["out_norm"]["scale"]
    return y @ params["out_proj"]["kernel"]

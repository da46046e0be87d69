"""A Mamba block (Gu and Dao, arXiv 2312.00752) in plain NumPy float64, loops and all."""

import numpy as np

from tests.reference.fprm import sigmoid


def silu(v):
    return v * sigmoid(v)


def causal_conv(conv, v):
    """Depthwise: y_t = Σ_j w_j v_{t-K+1+j} + b; w (K, D), v (T, D)."""
    taps = conv["kernel"].shape[0]
    out = np.zeros_like(v)
    for t in range(v.shape[0]):
        for j in range(taps):
            if t - taps + 1 + j >= 0:
                out[t] += conv["kernel"][j] * v[t - taps + 1 + j]
    return out + conv.get("bias", 0.0)


def block(params, u):
    """What a Mamba layer adds to the stream, one sample (T, D)."""
    x, z = np.split(u @ params["in_proj"]["kernel"], 2, axis=-1)
    if "conv1d" in params:
        x = silu(causal_conv(params["conv1d"], x))
    rank = params["dt_proj"]["kernel"].shape[0]
    d, n = params["A_log"].shape
    low, b, c = np.split(x @ params["x_proj"]["kernel"], (rank, rank + n), axis=-1)
    delta = np.log1p(np.exp(low @ params["dt_proj"]["kernel"] + params["dt_bias"]))
    a = -np.exp(params["A_log"])
    h = np.zeros((d, n))
    y = np.zeros_like(x)
    for t in range(u.shape[0]):
        for i in range(d):
            h[i] = np.exp(delta[t, i] * a[i]) * h[i] + delta[t, i] * x[t, i] * b[t]
            y[t, i] = c[t] @ h[i] + params["D"][i] * x[t, i]
    return (y * silu(z)) @ params["out_proj"]["kernel"]

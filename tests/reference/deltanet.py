"""A layer of (Gated) DeltaNet or DeltaProduct in plain NumPy float64, one step after the other."""

import numpy as np

from tests.reference.fprm import sigmoid
from tests.reference.mamba import causal_conv, silu


def unit(v):
    return v / max(np.linalg.norm(v), 1e-5)


def block(params, heads, steps, negative, u, eps=1e-5):
    """What a layer adds to the stream, one sample (T, D); `steps` delta-rule steps a token."""
    t = u.shape[0]
    q, k, v = (u @ params[f"{n}_proj"]["kernel"] for n in "qkv")
    if "q_conv" in params:
        q, k, v = (causal_conv(params[f"{n}_conv"], a) for n, a in zip("qkv", (q, k, v)))
    q = silu(q).reshape(t, heads, -1)
    k, v = (silu(a).reshape(t, steps, heads, -1) for a in (k, v))
    beta = sigmoid(u @ params["beta_proj"]["kernel"]).reshape(t, steps, heads)
    beta = 2 * beta if negative else beta
    alpha = np.ones((t, heads))
    if "dt_proj" in params:
        delta = np.log1p(np.exp(u @ params["dt_proj"]["kernel"] + params["dt_bias"]))
        alpha = np.exp(-np.exp(params["A_log"]) * delta)
    out = np.zeros((t, heads, v.shape[-1]))
    for h in range(heads):
        s = np.zeros((q.shape[-1], v.shape[-1]))
        for i in range(t):
            s = alpha[i, h] * s
            for j in range(steps):
                key = unit(k[i, j, h])
                s = s - beta[i, j, h] * np.outer(key, s.T @ key - v[i, j, h])
            o = s.T @ unit(q[i, h])
            out[i, h] = o / np.sqrt(np.mean(o * o) + eps) * params["head_norm"]["scale"]
    out = out.reshape(t, -1)
    if "gate_proj" in params:
        out = out * silu(u @ params["gate_proj"]["kernel"])
    return out @ params["out_proj"]["kernel"]

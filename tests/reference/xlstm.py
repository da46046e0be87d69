"""mLSTM and sLSTM (arXiv 2405.04517) in plain NumPy float64, unscaled, step by step."""

import numpy as np

from tests.reference.fprm import sigmoid
from tests.reference.mamba import causal_conv, silu


def mlstm(q, k, v, i, f, c=None, n=None):
    """One head: q, k (T, K), v (T, V), i, f (T,) -> h (T, V), C, n."""
    width = q.shape[1]
    c = np.zeros((width, v.shape[1])) if c is None else c
    n = np.zeros(width) if n is None else n
    rows = []
    for t in range(q.shape[0]):
        c = sigmoid(f[t]) * c + np.exp(i[t]) * np.outer(k[t], v[t])
        n = sigmoid(f[t]) * n + np.exp(i[t]) * k[t]
        query = q[t] / np.sqrt(width)
        rows.append(query @ c / max(abs(query @ n), 1.0))
    return np.stack(rows), c, n


def slstm(gates, recurrent):
    """gates (T, 4, H, K), recurrent (4, H, K, K) -> h (T, H, K)."""
    h, c, n = (np.zeros(gates.shape[2:]) for _ in range(3))
    rows = []
    for x in gates:
        i, f, z, o = (
            x[g] + np.stack([h[j] @ recurrent[g, j] for j in range(h.shape[0])]) for g in range(4)
        )
        c = sigmoid(f) * c + np.exp(i) * np.tanh(z)
        n = sigmoid(f) * n + np.exp(i)
        h = sigmoid(o) * c / n
        rows.append(h)
    return np.stack(rows)


def block_linear(kernel, v):
    """Block-diagonal map: kernel (blocks, w, w), v (T, blocks·w)."""
    width = kernel.shape[1]
    parts = [v[:, j * width : (j + 1) * width] @ kernel[j] for j in range(kernel.shape[0])]
    return np.concatenate(parts, axis=-1)


def head_norm(scale, h, eps=1e-5):
    """LayerNorm of each head: (T, H, K) -> (T, H·K)."""
    h = (h - h.mean(-1, keepdims=True)) / np.sqrt(h.var(-1, keepdims=True) + eps)
    return h.reshape(h.shape[0], -1) * scale


def mlstm_block(params, heads, u):
    """What an mLSTM layer adds to the stream, one sample (T, D)."""
    x, gate = np.split(u @ params["in_proj"]["kernel"], 2, axis=-1)
    conv = silu(causal_conv(params["conv1d"], x))
    q, k = (block_linear(params[f"{n}_proj"]["kernel"], conv) for n in "qk")
    v = block_linear(params["v_proj"]["kernel"], x)
    qkv = np.concatenate([q, k, v], axis=-1)
    i, f = (qkv @ params[f"{g}_gate"]["kernel"] + params[f"{g}_gate"]["bias"] for g in "if")
    width = v.shape[1] // heads
    out = []
    for j in range(heads):
        part = slice(j * width, (j + 1) * width)
        out.append(mlstm(q[:, part], k[:, part], v[:, part], i[:, j], f[:, j])[0])
    h = head_norm(params["head_norm"]["scale"], np.stack(out, axis=1)) + params["skip"] * conv
    return (h * silu(gate)) @ params["out_proj"]["kernel"]


def gelu(v):
    """The tanh form."""
    return 0.5 * v * (1 + np.tanh(np.sqrt(2 / np.pi) * (v + 0.044715 * v**3)))


def slstm_block(params, heads, u, h, eps=1e-5):
    """The stream h (T, D) after an sLSTM layer; u is its norm."""
    conv = silu(causal_conv(params["conv1d"], u))
    gates = [
        block_linear(params[f"{g}_proj"]["kernel"], conv if g in "if" else u)
        + params[f"{g}_bias"].reshape(-1)
        for g in "ifzo"
    ]
    gates = np.stack(gates, axis=1).reshape(u.shape[0], 4, heads, -1)
    h = h + head_norm(params["head_norm"]["scale"], slstm(gates, params["recurrent"]))
    normed = h / np.sqrt(np.mean(h * h, -1, keepdims=True) + eps) * params["ff_norm"]["scale"]
    gate, up = np.split(normed @ params["ff_up"]["kernel"], 2, axis=-1)
    return h + (gelu(gate) * up) @ params["ff_down"]["kernel"]

"""FPRM's f (spec 2 section 1) in plain NumPy float64, loops and all.

Weights keep the released code's names and torch's (out, in) layout.
"""

import numpy as np


def sigmoid(v):
    return 1.0 / (1.0 + np.exp(-v))


def rms_norm(v, eps):
    return v / np.sqrt(np.mean(v * v, axis=-1, keepdims=True) + eps)


def swiglu(weights, name, v):
    gate, up = np.split(v @ weights[f"{name}.gate_up_proj.weight"].T, 2, axis=-1)
    return (gate * sigmoid(gate) * up) @ weights[f"{name}.down_proj.weight"].T


def rotate(v):
    """Rotate-half RoPE of (T, K): pairs (j, j + K/2) turn by t · 1e4^(-2j/K)."""
    t, k = v.shape
    out = np.empty_like(v)
    for pos in range(t):
        for j in range(k // 2):
            angle = pos * 1e4 ** (-2.0 * j / k)
            c, s = np.cos(angle), np.sin(angle)
            a, b = v[pos, j], v[pos, j + k // 2]
            out[pos, j], out[pos, j + k // 2] = a * c - b * s, b * c + a * s
    return out


def attention(weights, name, v, config):
    """Multi-head attention of one sample (T, D)."""
    t, d = v.shape
    h = config["num_heads"]
    k = d // h
    q, key, value = np.split(v @ weights[f"{name}.qkv_proj.weight"].T, 3, axis=-1)
    out = np.zeros((t, d))
    for head in range(h):
        part = slice(head * k, (head + 1) * k)
        qh, kh = q[:, part], key[:, part]
        if config["rope"]:
            qh, kh = rotate(qh), rotate(kh)
        for i in range(t):
            last = i + 1 if config["causal"] else t
            logits = kh[:last] @ qh[i] / np.sqrt(k) / config["softmax_temp"]
            p = np.exp(logits - logits.max())
            out[i, part] = (p / p.sum()) @ value[:last, part]
    return out @ weights[f"{name}.o_proj.weight"].T


def convolve(weights, v, config):
    """Depthwise convolution of one sample (T, D): causal in 1-D, "same" on a square grid."""
    kernel = weights["conv.weight"]
    out = np.zeros_like(v)
    t = v.shape[0]
    if config["conv_type"] == "conv1d":
        taps = kernel.shape[-1]
        for i in range(t):
            for j in range(taps):
                source = i - (taps - 1) + j
                if source >= 0:
                    out[i] += kernel[:, 0, j] * v[source]
    else:
        side, taps = round(t**0.5), kernel.shape[-1]
        for r in range(side):
            for c in range(side):
                for i in range(taps):
                    for j in range(taps):
                        rr, cc = r + i - (taps - 1) // 2, c + j - (taps - 1) // 2
                        if 0 <= rr < side and 0 <= cc < side:
                            out[r * side + c] += kernel[:, 0, i, j] * v[rr * side + cc]
    return out + (weights["conv.bias"] if config["conv_bias"] else 0.0)


def scales(weights, z, config):
    """(a1, b1, a2, b2) for one sample's z after the convolution."""
    if config["residual_scale"] is None:
        return 1.0, 1.0, 1.0, 1.0

    def alpha(i):
        if config["residual_scale"] == "fixed":
            return config[f"alpha_{i}_init"]
        if config["residual_scale"] == "input-dependent":
            name = f"alpha_{i}_layer"
            return sigmoid(z @ weights[f"{name}.weight"].T + weights[f"{name}.bias"])
        return sigmoid(weights[f"alpha_{i}_param"])

    a2 = alpha(2)
    if config["outer_only"]:
        return 1.0, 1.0, a2, 1.0 - a2
    a1, n = alpha(1), 2 * config["L_layers"]
    b2 = 1.0 - a2 * a1**n
    return a1, b2 * (1.0 - a1) / (1.0 - a1**n + 1e-5), a2, b2


def step(weights, z, x, config):
    """f(z; x) of a batch: z, x (B, P + T, D) -> (B, P + T, D)."""
    return np.stack([_sample(weights, z[i], x[i], config) for i in range(z.shape[0])])


def _sample(weights, z, x, config):
    eps, registers = config["rms_norm_eps"], config["puzzle_emb_len"]
    z = np.array(z, np.float64)
    if config["conv_type"] != "none":
        z[registers:] = convolve(weights, z[registers:], config)
    a1, b1, a2, b2 = scales(weights, z, config)
    if config["norm_placement"] == "input":
        z = rms_norm(z, eps)
    x = rms_norm(x, eps) if config["normalize_input_injection"] else x
    z = a2 * z + b2 * x
    for layer in range(config["L_layers"]):
        if config["mlp_t"]:
            # The released code transposes before it normalises: each channel over its positions.
            def norm(v):
                return rms_norm(v.T, eps).T

            def mix(v, layer=layer):
                return swiglu(weights, f"layers.{layer}.mlp_t", v.T).T
        else:

            def norm(v):
                return rms_norm(v, eps)

            def mix(v, layer=layer):
                return attention(weights, f"layers.{layer}.self_attn", v, config)

        def mlp(v, layer=layer):
            return swiglu(weights, f"layers.{layer}.mlp", v)

        for g, n in ((mix, norm), (mlp, lambda v: rms_norm(v, eps))):
            if config["norm_type"] == "pre-norm":
                z = a1 * z + b1 * g(n(z))
            elif config["norm_type"] == "post-norm":
                z = n(a1 * z + b1 * g(z))
            else:
                z = a1 * z + b1 * n(g(n(z)))
    return rms_norm(z, eps) if config["norm_placement"] == "output" else z

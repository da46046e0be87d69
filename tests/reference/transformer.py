"""A Transformer of post- or pre-norm blocks in plain NumPy float64, loops and all.

Weights keep the released code's names and torch's (out, in) layout; one sample (T, D) at a time.
"""

import numpy as np

from tests.reference.fprm import attention, convolve, rms_norm, swiglu


def blocks(weights, h, num_layers, heads, causal, rope, norm_type, eps=1e-5):
    """num_layers × (attention, SwiGLU) with residual connections; no last norm."""
    config = {"num_heads": heads, "causal": causal, "rope": rope, "softmax_temp": 1.0}
    for i in range(num_layers):
        sublayers = (
            lambda v, i=i: attention(weights, f"layers.{i}.self_attn", v, config),
            lambda v, i=i: swiglu(weights, f"layers.{i}.mlp", v),
        )
        for g in sublayers:
            if norm_type == "pre":
                h = h + g(rms_norm(h, eps))
            else:
                h = rms_norm(h + g(h), eps)
    return h


def net(weights, x, z, num_layers, heads, causal, rope, conv_taps=0):
    """The post-norm network of the recursive models: blocks(z + x), z convolved first if asked."""
    if conv_taps:
        z = convolve(weights, z, {"conv_type": "conv1d", "conv_bias": False})
    return blocks(weights, z + x, num_layers, heads, causal, rope, "post")


def looped(weights, x, loops, num_layers, heads, causal, rope):
    """z ← net(z; x), `loops` times from z = 0."""
    z = np.zeros_like(x)
    for _ in range(loops):
        z = net(weights, x, z, num_layers, heads, causal, rope)
    return z

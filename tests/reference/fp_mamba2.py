"""The FP-Mamba-2 block (spec 1 section 3) in NumPy float64, token by token.

Weights as `tests.weights` writes them, stored (out, in); loops over batch, time and heads.
"""

from __future__ import annotations

import numpy as np

from tests.reference import mixers
from tests.reference.fp_rnn import causal_conv, mixer_argument, rms_norm, shift, silu
from tests.reference.mixers import Weights, unit


def ssd(
    x: np.ndarray, delta: np.ndarray, a: np.ndarray, b: np.ndarray, c: np.ndarray
) -> np.ndarray:
    """H_t = exp(Δ_t a) H_{t-1} + Δ_t x_t b_tᵀ, y_t = H_t c_t for every head.

    x (B,T,H,P), delta (B,T,H), a (H,), b, c (B,T,G,N); head h reads group h // (H / G).
    """
    batch, time, heads, _ = x.shape
    per_group = heads // b.shape[2]
    out = np.zeros_like(x)
    for i in range(batch):
        for h in range(heads):
            g = h // per_group
            state = np.zeros((x.shape[-1], b.shape[-1]))
            for t in range(time):
                step = delta[i, t, h]
                state = np.exp(step * a[h]) * state + step * np.outer(x[i, t, h], b[i, t, g])
                out[i, t, h] = state @ c[i, t, g]
    return out


class FPMamba2:
    """One FP-Mamba-2 block of a given input u (B, T, d_model).

    Args:
      weights: of the block.
      u: its input.
      state_size, groups: N and G.
      mixer, arg: mixer and the form of its argument.
      depends: which of lambda, b, c depend on shift(y); Q does unless arg is "x".
      glu_in_loop: no gate after the loop.
      bc_norm: L2-normalise b and c per group.
      **options: of the mixer.
    """

    def __init__(
        self,
        weights: Weights,
        u: np.ndarray,
        *,
        state_size: int,
        groups: int,
        mixer: str,
        arg: str,
        depends: tuple[str, ...] = ("b", "c"),
        glu_in_loop: bool = False,
        bc_norm: bool = True,
        **options: object,
    ) -> None:
        self.w = {k: np.asarray(v, np.float64) for k, v in weights.items()}
        self.mixer, self.arg, self.options = mixer, arg, options
        self.depends, self.glu, self.bc_norm = depends, glu_in_loop, bc_norm
        self.groups, self.n = groups, state_size
        self.heads = len(self.w["A_log"])
        d, bc = self.w["out_proj.weight"].shape[1], 2 * groups * state_size
        projected = u.astype(np.float64) @ self.w["in_proj.weight"].T
        self.z, xbc, self.dt = np.split(projected, (d, 2 * d + bc), axis=-1)
        if "conv1d.weight" in self.w:
            xbc = causal_conv(xbc, self.w["conv1d.weight"], self.w["conv1d.bias"])
        self.x, self.b, self.c = np.split(xbc, (d, d + bc // 2), axis=-1)

    def q(self, y: np.ndarray) -> np.ndarray:
        """Mixing matrices (B, T, d, d) for the iterate y."""
        weights = {k[6:]: v for k, v in self.w.items() if k.startswith("mixer.")}
        arg = mixer_argument(self.arg, self.x, y)
        return mixers.matrices(self.mixer, weights, arg, y.shape[-1], **self.options)  # type: ignore[arg-type]

    def step(self, y: np.ndarray) -> np.ndarray:
        """One application of the map."""
        before = shift(y)
        mixed = np.einsum("btij,btj->bti", self.q(y), self.x - y) + y
        b, c = self.b, self.c
        parts = [part for part in ("b", "c") if part in self.depends]
        if parts:
            added = np.split(before @ self.w["bc_y_proj.weight"].T, len(parts), axis=-1)
            b = b + added[0] if "b" in parts else b
            c = c + added[-1] if "c" in parts else c
        shape = (*y.shape[:2], self.groups, self.n)
        b, c = b.reshape(shape), c.reshape(shape)
        if self.bc_norm:
            b = np.apply_along_axis(unit, -1, b)
            c = np.apply_along_axis(unit, -1, c)
        dt = self.dt
        if "lambda" in self.depends:
            dt = dt + before @ self.w["dt_y_proj.weight"].T
        delta = np.log1p(np.exp(dt + self.w["dt_bias"]))
        heads = mixed.reshape(*y.shape[:2], self.heads, -1)
        out = ssd(heads, delta, -np.exp(self.w["A_log"]), b, c) + self.w["D"][:, None] * heads
        return rms_norm(out.reshape(y.shape) * silu(self.z), self.w["out_norm.weight"])

    def out(self, y: np.ndarray) -> np.ndarray:
        """Output of the block (B, T, d_model), without a residual connection."""
        if not self.glu:
            y = silu(self.z + shift(y) @ self.w["z_y_proj.weight"].T) * y
        return y @ self.w["out_proj.weight"].T

"""The FP-Mamba-1 block (spec 1 section 3) in NumPy float64, token by token.

Weights are named as in the golden files and stored (out, in); loops over batch, time and state.
"""

from __future__ import annotations

import numpy as np

from tests.reference import mixers
from tests.reference.fp_rnn import causal_conv, mixer_argument, shift, silu
from tests.reference.mixers import Weights, sigmoid, unit


def layer_norm(
    x: np.ndarray, weight: np.ndarray, bias: np.ndarray, eps: float = 1e-5
) -> np.ndarray:
    """weight (x - mean) / sqrt(var + eps) + bias over channels."""
    mean = x.mean(axis=-1, keepdims=True)
    var = ((x - mean) ** 2).mean(axis=-1, keepdims=True)
    return weight * (x - mean) / np.sqrt(var + eps) + bias


def selective_scan(
    x: np.ndarray, gain: np.ndarray, decay: np.ndarray, b: np.ndarray, c: np.ndarray
) -> np.ndarray:
    """H_t = decay_t ⊙ H_{t-1} + (gain_t ⊙ x_t) b_tᵀ, y_t = H_t c_t.

    x, gain (B,T,d), decay (B,T,d,N), b, c (B,T,N) -> y (B,T,d).
    """
    batch, time, d = x.shape
    out = np.zeros_like(x)
    for i in range(batch):
        state = np.zeros((d, b.shape[-1]))
        for t in range(time):
            state = decay[i, t] * state + np.outer(gain[i, t] * x[i, t], b[i, t])
            out[i, t] = state @ c[i, t]
    return out


class FPMamba:
    """One FP-Mamba-1 block of a given input u (B, T, d_model).

    Args:
      weights: of the block.
      u: its input.
      mixer, arg: mixer and the form of its argument.
      depends: which of lambda, b, c depend on shift(y); Q does unless arg is "x".
      decay: "mamba", or "v1" with weights "omega" instead of "A_log".
      glu_in_loop, bc_norm: as in spec 1 section 3.
      **options: of the mixer.
    """

    def __init__(
        self,
        weights: Weights,
        u: np.ndarray,
        *,
        mixer: str,
        arg: str,
        depends: tuple[str, ...] = ("b", "c"),
        decay: str = "mamba",
        glu_in_loop: bool = False,
        bc_norm: bool = True,
        **options: object,
    ) -> None:
        self.w = {k: np.asarray(v, np.float64) for k, v in weights.items()}
        self.mixer, self.arg, self.options = mixer, arg, options
        self.depends, self.v1, self.glu, self.bc_norm = depends, decay == "v1", glu_in_loop, bc_norm
        self.n = self.w["omega" if self.v1 else "A_log"].shape[1]
        x, self.z = np.split(u.astype(np.float64) @ self.w["in_proj.weight"].T, 2, axis=-1)
        if "conv1d.weight" in self.w:
            x = causal_conv(x, self.w["conv1d.weight"], self.w["conv1d.bias"])
        self.x = x
        projected = x @ self.w["x_proj.weight"].T
        rank = projected.shape[-1] - 2 * self.n
        self.dt, self.bc = projected[..., :rank], projected[..., rank:]

    def step_size_and_decay(self, before: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Δ (B, T, d) and exp(Δ A) (B, T, d, N)."""
        dt = self.dt
        if "lambda" in self.depends:
            dt = dt + before @ self.w["dt_y_proj.weight"].T
        raw = dt @ self.w["dt_proj.weight"].T + self.w["dt_proj.bias"]
        if self.v1:
            delta = sigmoid(raw)
            return delta, np.exp(-8.0 * np.log1p(np.exp(self.w["omega"])) * delta[..., None])
        delta = np.log1p(np.exp(raw))
        return delta, np.exp(delta[..., None] * -np.exp(self.w["A_log"]))

    def q(self, y: np.ndarray) -> np.ndarray:
        """Mixing matrices (B, T, d, d) for the iterate y."""
        weights = {k[6:]: v for k, v in self.w.items() if k.startswith("mixer.")}
        arg = mixer_argument(self.arg, self.x, y)
        return mixers.matrices(self.mixer, weights, arg, y.shape[-1], **self.options)  # type: ignore[arg-type]

    def step(self, y: np.ndarray) -> np.ndarray:
        """One application of the map."""
        mixed = np.einsum("btij,btj->bti", self.q(y), self.x - y) + y
        before = shift(y)
        b, c = self.bc[..., : self.n], self.bc[..., self.n :]
        parts = [part for part in ("b", "c") if part in self.depends]
        if parts:
            added = np.split(before @ self.w["bc_y_proj.weight"].T, len(parts), axis=-1)
            b = b + added[0] if "b" in parts else b
            c = c + added[-1] if "c" in parts else c
        if self.bc_norm:
            b = np.apply_along_axis(unit, -1, b)
            c = np.apply_along_axis(unit, -1, c)
        delta, decay = self.step_size_and_decay(before)
        out = selective_scan(mixed, delta, decay, b, c) + self.w["D"] * mixed
        if self.glu:
            out = out * silu(self.z)
        return layer_norm(out, self.w["out_norm.weight"], self.w["out_norm.bias"])

    def out(self, y: np.ndarray) -> np.ndarray:
        """Output of the block (B, T, d_model), without a residual connection."""
        if not self.glu:
            y = silu(self.z + shift(y) @ self.w["z_y_proj.weight"].T) * y
        return y @ self.w["out_proj.weight"].T

"""The FP-RNN block (spec 1 section 3) and the dense recurrence it stands for, in NumPy float64.

Loops over batch and time; weights are named as in the golden files and stored (out, in).
"""

from __future__ import annotations

import numpy as np

from tests.reference import mixers
from tests.reference.mixers import Weights, sigmoid


def silu(x: np.ndarray) -> np.ndarray:
    """x σ(x)."""
    return x * sigmoid(x)


def shift(y: np.ndarray) -> np.ndarray:
    """shift(y)[t] = y[t-1], zero at t = 0; y (B, T, d)."""
    out = np.zeros_like(y)
    out[:, 1:] = y[:, :-1]
    return out


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float = 1e-5) -> np.ndarray:
    """weight x / sqrt(mean(x²) + eps) over channels."""
    return weight * x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)


def causal_conv(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """Depthwise causal convolution followed by SiLU; weight (d, 1, K), x (B, T, d)."""
    taps = weight.shape[-1]
    out = np.zeros_like(x)
    for t in range(x.shape[1]):
        out[:, t] = bias
        for j in range(taps):
            if t - (taps - 1) + j >= 0:
                out[:, t] += weight[:, 0, j] * x[:, t - (taps - 1) + j]
    return silu(out)


def scan(a: np.ndarray, x: np.ndarray) -> np.ndarray:
    """h_t = a_t h_{t-1} + x_t from 0, time on axis 1."""
    h = np.zeros_like(x[:, 0])
    out = np.zeros_like(x)
    for t in range(x.shape[1]):
        h = a[:, t] * h + x[:, t]
        out[:, t] = h
    return out


def mixer_argument(form: str, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """x, [x, shift(y)] or x + shift(y)."""
    if form == "x":
        return x
    if form == "concat":
        return np.concatenate([x, shift(y)], axis=-1)
    return x + shift(y)


def iterate(lam: np.ndarray, q: np.ndarray, bx: np.ndarray, h: np.ndarray) -> np.ndarray:
    """Eq. 7: h' = scan(λ, (1-λ) (Q (B x - h) + h)); lam, bx, h (B,T,d), q (B,T,d,d)."""
    mixed = np.einsum("btij,btj->bti", q, bx - h) + h
    return scan(lam, (1.0 - lam) * mixed)


def dense_recurrence(lam: np.ndarray, q: np.ndarray, bx: np.ndarray) -> np.ndarray:
    """h_t = A_t h_{t-1} + (Λ+(I-Λ)Q)^-1 (I-Λ) Q B x, A_t = (Λ+(I-Λ)Q)^-1 Λ: what eq. 7 solves."""
    batch, time, d = bx.shape
    out = np.zeros_like(bx)
    for b in range(batch):
        h = np.zeros(d)
        for t in range(time):
            keep = np.diag(lam[b, t])
            take = np.eye(d) - keep
            system = keep + take @ q[b, t]
            h = np.linalg.solve(system, keep @ h + take @ q[b, t] @ bx[b, t])
            out[b, t] = h
    return out


class FPRNN:
    """One FP-RNN block: W_in, gates, iteration and output of a given input u (B, T, d_model)."""

    def __init__(
        self, weights: Weights, u: np.ndarray, *, mixer: str, arg: str, **options: object
    ) -> None:
        self.w = {k: np.asarray(v, np.float64) for k, v in weights.items()}
        self.mixer, self.arg, self.options = mixer, arg, options
        x, self.z = np.split(u.astype(np.float64) @ self.w["input_trans.weight"].T, 2, axis=-1)
        self.conv = "conv1d_x.weight" in self.w
        self.x, self.x_m, x_b, x_l = (self._conv(name, x) for name in ("x", "mixer", "b", "lambda"))
        self.lam = sigmoid(x_l @ self.w["lambda_proj.weight"].T + self.w["lambda_proj.bias"])
        self.bx = silu(x_b @ self.w["b_proj.weight"].T) * self.x

    def _conv(self, name: str, x: np.ndarray) -> np.ndarray:
        if not self.conv:
            return x
        return causal_conv(x, self.w[f"conv1d_{name}.weight"], self.w[f"conv1d_{name}.bias"])

    def q(self, y: np.ndarray) -> np.ndarray:
        """Mixing matrices (B, T, d, d) for the iterate y."""
        weights = {k[6:]: v for k, v in self.w.items() if k.startswith("mixer.")}
        arg = mixer_argument(self.arg, self.x_m, y)
        return mixers.matrices(self.mixer, weights, arg, y.shape[-1], **self.options)  # type: ignore[arg-type]

    def step(self, y: np.ndarray) -> np.ndarray:
        """One application of the map."""
        return iterate(self.lam, self.q(y), self.bx, y)

    def out(self, y: np.ndarray) -> np.ndarray:
        """Output of the block (B, T, d_model), without a residual connection."""
        if self.conv:
            c = self._conv("c", np.concatenate([self.x, y], axis=-1))
        else:
            c = np.concatenate([self.x, shift(y)], axis=-1)
        c = silu(c @ self.w["c_proj.weight"].T)
        normed = rms_norm(silu(self.z) * c * y, self.w["output_norm.weight"])
        return normed @ self.w["output_trans.weight"].T

"""Channel mixers of spec 1 section 2 as explicit (d, d) matrices, one token at a time.

Plain NumPy float64 with loops: slow on purpose, to be read line by line against the spec.
"""

from __future__ import annotations

import numpy as np

Weights = dict[str, np.ndarray]


def activate(name: str, x: np.ndarray) -> np.ndarray:
    """Applies identity, silu or relu."""
    if name == "identity":
        return x
    if name == "silu":
        return x / (1.0 + np.exp(-x))
    return np.maximum(x, 0.0)


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x))."""
    return 1.0 / (1.0 + np.exp(-x))


def unit(x: np.ndarray) -> np.ndarray:
    """x / max(‖x‖₂, 1e-5)."""
    return x / max(float(np.linalg.norm(x)), 1e-5)


def generate(weights: Weights, name: str, arg: np.ndarray) -> np.ndarray:
    """W arg (+ bias), or W₁ W₀ arg for a low-rank generator; weights are stored (out, in)."""
    if f"{name}.0.weight" in weights:
        return weights[f"{name}.1.weight"] @ (weights[f"{name}.0.weight"] @ arg)
    out = weights[f"{name}.weight"] @ arg
    return out + weights[f"{name}.bias"] if f"{name}.bias" in weights else out


def divisor_pair(dim: int) -> tuple[int, int]:
    """(a, b) with a b = dim, a ≤ b and b - a smallest."""
    a = max(i for i in range(1, dim + 1) if dim % i == 0 and i * i <= dim)
    return a, dim // a


def upper(values: np.ndarray, size: int) -> np.ndarray:
    """Upper-triangular (size, size) matrix filled row by row."""
    out = np.zeros((size, size))
    k = 0
    for i in range(size):
        for j in range(i, size):
            out[i, j] = values[k]
            k += 1
    return out


def _units(weights: Weights, arg: np.ndarray, dim: int, act: str) -> list[np.ndarray]:
    u = activate(act, generate(weights, "u_proj", arg))
    return [unit(u[i * dim : (i + 1) * dim]) for i in range(len(u) // dim)]


def dplr(weights: Weights, arg: np.ndarray, dim: int, *, act: str, scale: float) -> np.ndarray:
    """I - s Σ_i α_i ū_i ū_iᵀ."""
    alpha = sigmoid(generate(weights, "alpha_proj", arg))
    q = np.eye(dim)
    for a, u in zip(alpha, _units(weights, arg, dim, act), strict=True):
        q -= scale * a * np.outer(u, u)
    return q


def householder(
    weights: Weights, arg: np.ndarray, dim: int, *, act: str, scale: float
) -> np.ndarray:
    """(I - s α_{r-1} ū ūᵀ) ... (I - s α_0 ū_0 ū_0ᵀ): factor 0 touches the vector first."""
    alpha = sigmoid(generate(weights, "alpha_proj", arg))
    q = np.eye(dim)
    for a, u in zip(alpha, _units(weights, arg, dim, act), strict=True):
        q = (np.eye(dim) - scale * a * np.outer(u, u)) @ q
    return q


def lowrank(weights: Weights, arg: np.ndarray, dim: int, *, act: str, scale: float) -> np.ndarray:
    """Σ_i α_i ū_i ū_iᵀ with α_i = σ(.) / r, so Σ α ≤ 1; the scale plays no part."""
    del scale
    alpha = sigmoid(generate(weights, "alpha_proj", arg))
    q = np.zeros((dim, dim))
    for a, u in zip(alpha, _units(weights, arg, dim, act), strict=True):
        q += a / len(alpha) * np.outer(u, u)
    return q


def spectral_normalise(k: np.ndarray, dim: int) -> np.ndarray:
    """K / (uᵀ K v + 1e-5) after 16 half-steps u ← norm(K v), v ← norm(K u) from 1/sqrt(dim)."""
    u = np.full(len(k), dim**-0.5)
    v = np.full(len(k), dim**-0.5)
    for step in range(16):
        if step % 2 == 0:
            u = unit(k @ v)
        else:
            v = unit(k @ u)
    return k / (u @ k @ v + 1e-5)


def kronecker(
    weights: Weights, arg: np.ndarray, dim: int, *, act: str, scale: float, spectral: bool = False
) -> np.ndarray:
    """The (d, d) matrix of X -> X - s K₁ᵀ X K₂ᵀ on row-major X (a, b), written with np.kron."""
    a, b = divisor_pair(dim)
    raw = activate(act, generate(weights, "uv_project", arg))
    diag = sigmoid(generate(weights, "diag", arg))
    cut = a * (a + 1) // 2
    factors = []
    for values, rows, size in ((raw[:cut], diag[:a], a), (raw[cut:], diag[a:], b)):
        u = upper(values, size)
        k = u @ u.T
        k = np.stack([unit(row) for row in k])
        if spectral:
            k = spectral_normalise(k, dim)
        factors.append(rows[:, None] * k)
    # row-major vec(A X B) = (A ⊗ Bᵀ) vec(X)
    return np.eye(dim) - scale * np.kron(factors[0].T, factors[1])


def monarch(weights: Weights, arg: np.ndarray, dim: int, *, act: str, scale: float) -> np.ndarray:
    """Block diagonal: I - α U Uᵀ / (max column norm + 1e-5) per block; the scale plays no part."""
    del scale
    alpha = sigmoid(generate(weights, "alpha", arg))
    raw = activate(act, generate(weights, "uv_project", arg)).reshape(len(alpha), -1)
    size = dim // len(alpha)
    q = np.eye(dim)
    for i, values in enumerate(raw):
        u = upper(values, size)
        k = u @ u.T
        k = k / (max(np.linalg.norm(k[:, j]) for j in range(size)) + 1e-5)
        part = slice(i * size, (i + 1) * size)
        q[part, part] -= alpha[i] * k
    return q


def dense(weights: Weights, arg: np.ndarray, dim: int, *, act: str, scale: float) -> np.ndarray:
    """U Uᵀ / λ_max, λ_max from 32 power iterations; the scale plays no part."""
    del scale
    u = upper(activate(act, generate(weights, "proj", arg)), dim)
    k = u @ u.T
    v = np.full(dim, dim**-0.5)
    norm = 0.0
    for _ in range(32):
        v = k @ v
        norm = float(np.linalg.norm(v))
        v = v / (norm + 1e-5)
    return k / (norm + 1e-5)


def orthogonal(
    weights: Weights, arg: np.ndarray, dim: int, *, act: str, scale: float
) -> np.ndarray:
    """A constant orthogonal matrix."""
    del arg, dim, act, scale
    return weights["q_proj.weight"]


def mixture(
    weights: Weights, arg: np.ndarray, dim: int, *, act: str, scale: float, spectral: bool = False
) -> np.ndarray:
    """Mixers 0, 1, ... in sequence: householder of rank 1 at even places, kronecker at odd."""
    count = 1 + max(int(name.split(".")[1]) for name in weights)
    q = np.eye(dim)
    for i in range(count):
        part = {
            name.split(".", 2)[2]: w
            for name, w in weights.items()
            if name.startswith(f"mixers.{i}.")
        }
        if i % 2 == 0:
            q = householder(part, arg, dim, act=act, scale=scale) @ q
        else:
            q = kronecker(part, arg, dim, act=act, scale=scale, spectral=spectral) @ q
    return q


MATRICES = {
    "dplr": dplr,
    "householder": householder,
    "kronecker": kronecker,
    "monarch": monarch,
    "dense": dense,
    "orthogonal": orthogonal,
    "mixture": mixture,
    "lowrank": lowrank,
}


def matrices(
    name: str,
    weights: Weights,
    arg: np.ndarray,
    dim: int,
    *,
    act: str = "silu",
    scale: float = 2.0,
    spectral: bool = False,
) -> np.ndarray:
    """Q of every token: arg (..., m) -> (..., dim, dim)."""
    options: dict = {"act": act, "scale": scale}
    if name in ("kronecker", "mixture"):
        options["spectral"] = spectral
    weights = {k: np.asarray(w, np.float64) for k, w in weights.items()}
    flat = np.asarray(arg, np.float64).reshape(-1, arg.shape[-1])
    out = np.stack([MATRICES[name](weights, row, dim, **options) for row in flat])
    return out.reshape(*arg.shape[:-1], dim, dim)


def mix(
    name: str, weights: Weights, arg: np.ndarray, v: np.ndarray, **options: object
) -> np.ndarray:
    """Q v for arg (..., m) and v (..., d)."""
    q = matrices(name, weights, arg, v.shape[-1], **options)  # type: ignore[arg-type]
    return np.einsum("...ij,...j->...i", q, np.asarray(v, np.float64))

"""Channel mixers: structured matrices Q, generated from an argument, that mix channels.

A mixer is one function here and one line in ``MIXERS`` (spec 1 section 2, arXiv 2503.10799).
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array
Params = Mapping[str, Any]
Factors = Any

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "identity": lambda x: x,
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
}
_EPS = 1e-5


def check_choice(what: str, value: object, choices: Mapping[str, Any] | tuple[str, ...]) -> None:
    """Raises ValueError naming the nearest and all valid choices when value is none of them."""
    if value in choices:
        return
    near = difflib.get_close_matches(str(value), list(choices), n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"{what} {value!r} is not one of {', '.join(choices)}{hint}")


@dataclasses.dataclass(frozen=True)
class MixerOptions:
    """What a mixer is built from.

    Attributes:
      name: a key of ``MIXERS``.
      rank: number of generated vectors (dplr, householder, lowrank), block size (monarch) or
        number of mixers in sequence (mixture); the others have no rank and ignore it.
      scale: s of the specification; 2 reflects (released code), 1 contracts (paper). It acts in
        dplr, householder, kronecker and mixture.
      act: activation of the generated vectors: identity, silu or relu.
      proj_rank: width of a low-rank generator (two maps in sequence); None is one full map.
      spectral: divide the Kronecker factors by their spectral norm (FP-RNN).
      weight_norm: store generators as direction and gain per output, and an orthogonal matrix by
        its skew-symmetric logarithm. False stores the effective matrices themselves.

    Raises:
      ValueError: an unknown name or activation, a rank or scale out of range.
    """

    name: str = "householder"
    rank: int = 1
    scale: float = 2.0
    act: str = "silu"
    proj_rank: int | None = None
    spectral: bool = False
    weight_norm: bool = True

    def __post_init__(self) -> None:
        check_choice("mixer", self.name, MIXERS)
        check_choice("act", self.act, ACTIVATIONS)
        if self.rank < 1:
            raise ValueError(f"mixer rank must be at least 1, got {self.rank}")
        if self.scale not in (1, 2):
            raise ValueError(f"mixer scale must be 2 (released code) or 1, got {self.scale}")
        if self.proj_rank is not None and self.proj_rank < 1:
            raise ValueError(f"proj_rank must be None or at least 1, got {self.proj_rank}")


@dataclasses.dataclass(frozen=True)
class Generator:
    """One generated quantity: its size, whether it has a bias, whether proj_rank applies."""

    size: int
    bias: bool = False
    low_rank: bool = False


@dataclasses.dataclass(frozen=True)
class Kind:
    """What one mixer function returns.

    Attributes:
      generators: name -> Generator, linear in the mixer's argument.
      factors: dict of generated arrays (..., size), in float32 or wider -> factors of Q.
      transform: (factors, v (..., d)) -> Q v.
      matrix: name of a constant (d, d) orthogonal parameter, which then is the only factor.
    """

    generators: Mapping[str, Generator]
    factors: Callable[[Mapping[str, Array]], Factors]
    transform: Callable[[Factors, Array], Array]
    matrix: str | None = None


# --- pieces that mixers share ---------------------------------------------------------------------


def l2_normalize(x: Array, eps: float = _EPS) -> Array:
    """x / max(‖x‖₂, eps) over the last axis, in at least float32, with a finite gradient at 0."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    square = jnp.sum(wide * wide, axis=-1, keepdims=True)
    usable = square > eps * eps
    inverse = jnp.where(usable, jax.lax.rsqrt(jnp.where(usable, square, 1.0)), 1.0 / eps)
    return (wide * inverse).astype(x.dtype)


def safe_norm(x: Array) -> Array:
    """‖x‖₂ over the last axis, kept, with gradient 0 at 0."""
    square = jnp.sum(x * x, axis=-1, keepdims=True)
    positive = square > 0.0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, square, 1.0)), 0.0)


def divisor_pair(dim: int) -> tuple[int, int]:
    """(a, b), a ≤ b, a b = dim, as near to a square as possible."""
    a = next(i for i in range(math.isqrt(dim), 0, -1) if dim % i == 0)
    return a, dim // a


def _upper_triangular(values: Array, size: int) -> Array:
    """(..., size (size+1) / 2) -> upper-triangular (..., size, size), filled row by row."""
    rows, columns = np.triu_indices(size)
    index = np.full((size, size), len(rows))
    index[rows, columns] = np.arange(len(rows))
    padded = jnp.concatenate([values, jnp.zeros_like(values[..., :1])], axis=-1)
    return padded[..., index]


def _gram(values: Array, size: int) -> Array:
    """U Uᵀ (..., size, size) of the upper-triangular U filled with values."""
    u = _upper_triangular(values, size)
    return jnp.einsum("...ik,...jk->...ij", u, u)


def _matvec(k: Array, v: Array) -> Array:
    return jnp.einsum("...ij,...j->...i", k, v)


def _spectral_normalize(k: Array, dim: int, half_steps: int = 16) -> Array:
    """K / (uᵀ K v + 1e-5), u and v by alternating power iteration from the constant 1/sqrt(dim).

    Both half-steps use K, not its transpose, as the paper's released code does: for the
    row-scaled (not symmetric) K this estimates the spectral radius rather than the norm.
    """
    u = v = jnp.full(k.shape[:-1], dim**-0.5, k.dtype)
    for step in range(half_steps):
        if step % 2 == 0:
            u = l2_normalize(_matvec(k, v))
        else:
            v = l2_normalize(_matvec(k, u))
    norm = jnp.sum(u * _matvec(k, v), axis=-1)[..., None, None]
    return k / (norm + _EPS)


def _unit_vectors(raw: Array, dim: int, options: MixerOptions) -> Array:
    """(..., r d) -> r unit vectors (..., r, d)."""
    u = ACTIVATIONS[options.act](raw)
    return l2_normalize(u.reshape(*u.shape[:-1], options.rank, dim))


def _vector_generators(dim: int, options: MixerOptions) -> dict[str, Generator]:
    return {
        "u_proj": Generator(options.rank * dim, low_rank=True),
        "alpha_proj": Generator(options.rank, bias=True),
    }


# --- the mixers -----------------------------------------------------------------------------------


def _dplr(dim: int, options: MixerOptions) -> Kind:
    """Q v = v - s Σ_i α_i ū_i (ū_iᵀ v): diagonal (the identity) plus low rank."""

    def factors(raw: Mapping[str, Array]) -> Factors:
        return _unit_vectors(raw["u_proj"], dim, options), jax.nn.sigmoid(raw["alpha_proj"])

    def transform(factors: Factors, v: Array) -> Array:
        u, alpha = factors
        weights = options.scale * alpha * jnp.einsum("...rd,...d->...r", u, v)
        return v - jnp.einsum("...r,...rd->...d", weights, u)

    return Kind(_vector_generators(dim, options), factors, transform)


def _householder(dim: int, options: MixerOptions) -> Kind:
    """Q v = Π_i (I - s α_i ū_i ū_iᵀ) v, factor 0 applied first; full rank, I - Q of rank r."""

    def factors(raw: Mapping[str, Array]) -> Factors:
        return _unit_vectors(raw["u_proj"], dim, options), jax.nn.sigmoid(raw["alpha_proj"])

    def transform(factors: Factors, v: Array) -> Array:
        u, alpha = factors
        for i in range(options.rank):
            unit = u[..., i, :]
            along = jnp.sum(unit * v, axis=-1, keepdims=True)
            v = v - options.scale * alpha[..., i : i + 1] * along * unit
        return v

    return Kind(_vector_generators(dim, options), factors, transform)


def _lowrank(dim: int, options: MixerOptions) -> Kind:
    """Q v = Σ_i α_i ū_i ū_iᵀ v, α_i = σ(.) / r so that Σ α ≤ 1; v1's first form, rank at most r."""

    def factors(raw: Mapping[str, Array]) -> Factors:
        alpha = jax.nn.sigmoid(raw["alpha_proj"]) / options.rank
        return _unit_vectors(raw["u_proj"], dim, options), alpha

    def transform(factors: Factors, v: Array) -> Array:
        u, alpha = factors
        weights = alpha * jnp.einsum("...rd,...d->...r", u, v)
        return jnp.einsum("...r,...rd->...d", weights, u)

    return Kind(_vector_generators(dim, options), factors, transform)


def _kronecker(dim: int, options: MixerOptions) -> Kind:
    """Q v = v - s (K̄¹ ⊗ K̄²) v, i.e. X - s K₁ᵀ X K₂ᵀ on v reshaped to (a, b) row by row."""
    a, b = divisor_pair(dim)
    if a == 1:
        near = [n for n in range(max(4, dim - 3), dim + 4) if divisor_pair(n)[0] > 1]
        raise ValueError(
            f"mixer 'kronecker' needs a width with two factors above 1, got {dim}; "
            f"valid widths near it: {', '.join(map(str, near))}"
        )
    cut = a * (a + 1) // 2

    def one(values: Array, diag: Array, size: int) -> Array:
        k = l2_normalize(_gram(values, size))
        if options.spectral:
            k = _spectral_normalize(k, dim)
        return diag[..., :, None] * k

    def factors(raw: Mapping[str, Array]) -> Factors:
        values = ACTIVATIONS[options.act](raw["uv_project"])
        diag = jax.nn.sigmoid(raw["diag"])
        return one(values[..., :cut], diag[..., :a], a), one(values[..., cut:], diag[..., a:], b)

    def transform(factors: Factors, v: Array) -> Array:
        k1, k2 = factors
        x = v.reshape(*v.shape[:-1], a, b)
        # One product at a time: 4.8 ms against 7.3 for the three at once (8 × 256 × 512, CPU).
        x = jnp.einsum("...ji,...jk->...ik", k1, x)
        x = jnp.einsum("...ik,...lk->...il", x, k2)
        return v - options.scale * x.reshape(v.shape)

    generators = {
        "uv_project": Generator(cut + b * (b + 1) // 2, low_rank=True),
        "diag": Generator(a + b, bias=True),
    }
    return Kind(generators, factors, transform)


def _monarch(dim: int, options: MixerOptions) -> Kind:
    """Blocks of size ``rank``: v - α U Uᵀ v / (largest column norm + 1e-5), one α per block."""
    size = options.rank
    if dim & (dim - 1) or size & (size - 1) or size > dim:
        sizes = [2**i for i in range(dim.bit_length()) if 2**i <= dim]
        widths = f"{2 ** (dim.bit_length() - 1)} or {2 ** dim.bit_length()}"
        what = f"a rank from {sizes}" if dim & (dim - 1) == 0 else f"a width such as {widths}"
        raise ValueError(
            "mixer 'monarch' needs powers of two with rank ≤ width, "
            f"got width {dim} and rank {size}; use {what}"
        )
    blocks, entries = dim // size, size * (size + 1) // 2

    def factors(raw: Mapping[str, Array]) -> Factors:
        values = ACTIVATIONS[options.act](raw["uv_project"])
        k = _gram(values.reshape(*values.shape[:-1], blocks, entries), size)
        norm = jnp.max(safe_norm(k), axis=-2, keepdims=True)  # k is symmetric: rows are columns
        return jax.nn.sigmoid(raw["alpha"])[..., None, None] * k / (norm + _EPS)

    def transform(k: Factors, v: Array) -> Array:
        x = v.reshape(*v.shape[:-1], blocks, size)
        return v - _matvec(k, x).reshape(v.shape)

    generators = {
        "uv_project": Generator(blocks * entries, low_rank=True),
        "alpha": Generator(blocks, bias=True),
    }
    return Kind(generators, factors, transform)


def _dense(dim: int, options: MixerOptions) -> Kind:
    """Q = U Uᵀ / λ_max (32 power iterations): O(d²) per token, a reference for small widths."""

    def factors(raw: Mapping[str, Array]) -> Factors:
        k = _gram(ACTIVATIONS[options.act](raw["proj"]), dim)
        v = jnp.full(k.shape[:-1], dim**-0.5, k.dtype)
        for _ in range(32):
            v = _matvec(k, v)
            norm = safe_norm(v) + _EPS
            v = v / norm
        return k / norm[..., None]

    return Kind({"proj": Generator(dim * (dim + 1) // 2, low_rank=True)}, factors, _matvec)


def _orthogonal(dim: int, options: MixerOptions) -> Kind:
    """A constant orthogonal Q: channels are mixed, but not selectively."""
    del dim, options
    return Kind({}, lambda raw: raw["q_proj"], lambda q, v: v @ q.astype(v.dtype), "q_proj")


def _mixture(dim: int, options: MixerOptions) -> Kind:
    """``rank`` mixers in sequence, householder (r=1) and kronecker by turns, householder first."""
    kinds = [
        (_householder if i % 2 == 0 else _kronecker)(dim, dataclasses.replace(options, rank=1))
        for i in range(options.rank)
    ]

    def factors(raw: Mapping[str, Array]) -> Factors:
        return tuple(
            kind.factors({name: raw[f"mixers_{i}_{name}"] for name in kind.generators})
            for i, kind in enumerate(kinds)
        )

    def transform(factors: Factors, v: Array) -> Array:
        for kind, part in zip(kinds, factors, strict=True):
            v = kind.transform(part, v)
        return v

    generators = {
        f"mixers_{i}_{name}": generator
        for i, kind in enumerate(kinds)
        for name, generator in kind.generators.items()
    }
    return Kind(generators, factors, transform)


MIXERS: dict[str, Callable[[int, MixerOptions], Kind]] = {
    "dplr": _dplr,
    "householder": _householder,
    "kronecker": _kronecker,
    "monarch": _monarch,
    "dense": _dense,
    "orthogonal": _orthogonal,
    "mixture": _mixture,
    "lowrank": _lowrank,
}


# --- weight-normalised linear maps ----------------------------------------------------------------


def init_linear(key: Array, fan_in: int, size: int, *, bias: bool, weight_norm: bool) -> Params:
    """One linear map, uniform in ±1/sqrt(fan_in): kernel (in, out), gain (out,), bias (out,)."""
    bound = fan_in**-0.5
    key, bias_key = jax.random.split(key)
    kernel = jax.random.uniform(key, (fan_in, size), jnp.float32, -bound, bound)
    params = {"kernel": kernel}
    if weight_norm:
        params["gain"] = jnp.linalg.norm(kernel, axis=0)
    if bias:
        params["bias"] = jax.random.uniform(bias_key, (size,), jnp.float32, -bound, bound)
    return params


def effective_kernel(params: Params) -> Array:
    """gain * kernel / ‖kernel‖ per output column, or the kernel itself where there is no gain."""
    kernel = params["kernel"]
    if "gain" not in params:
        return kernel
    return l2_normalize(kernel.T, 1e-12).T * params["gain"]


class NormedLinear(nn.Module):
    """Linear map without bias, weight-normalised unless `weight_norm` is False."""

    features: int
    weight_norm: bool = True

    @nn.compact
    def __call__(self, x: Array) -> Array:
        def init(key: Array, part: str) -> Array:
            return init_linear(
                key, x.shape[-1], self.features, bias=False, weight_norm=self.weight_norm
            )[part]

        params = {"kernel": self.param("kernel", init, "kernel")}
        if self.weight_norm:
            # Flax folds the parameter's name into the key: norm of the stored kernel, not a redraw
            params["gain"] = self.param("gain", lambda _: jnp.linalg.norm(params["kernel"], axis=0))
        return x @ effective_kernel(params).astype(x.dtype)


# --- the interface --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ChannelMixer:
    """A mixer of given sizes as pure functions of its parameters.

    ``mix`` is the whole; a loop calls its three parts so that what does not change is done once:
    ``project`` is linear, so ``project(concat(a, b)) == project(a) + project(b, start=len(a))``.

    Attributes:
      options: what to build.
      arg_dim: channels of the argument that generates Q.
      dim: channels of the vector that is mixed.

    Raises:
      ValueError: the mixer cannot have this width (kronecker: prime; monarch: not a power of two).
    """

    options: MixerOptions
    arg_dim: int
    dim: int

    def __post_init__(self) -> None:
        if self.arg_dim < 1 or self.dim < 1:
            raise ValueError(f"mixer sizes must be positive, got {self.arg_dim} and {self.dim}")
        MIXERS[self.options.name](self.dim, self.options)

    @property
    def kind(self) -> Kind:
        """The mixer's functions."""
        return MIXERS[self.options.name](self.dim, self.options)

    @property
    def selective(self) -> bool:
        """Whether Q depends on the argument."""
        return self.kind.matrix is None

    def init_one(self, key: Array, name: str) -> Params:
        """Parameters of one generator (or of the constant matrix)."""
        options = self.options
        if name == self.kind.matrix:
            if options.weight_norm:
                shape = (self.dim, self.dim)
                return {"skew": jax.random.normal(key, shape, jnp.float32) * self.dim**-0.5}
            return {"kernel": jax.nn.initializers.orthogonal()(key, (self.dim, self.dim))}
        generator = self.kind.generators[name]
        normed = options.weight_norm
        if generator.low_rank and options.proj_rank is not None:
            down, up = jax.random.split(key)
            rank = options.proj_rank
            return {
                "down": init_linear(down, self.arg_dim, rank, bias=False, weight_norm=normed),
                "up": init_linear(up, rank, generator.size, bias=False, weight_norm=normed),
            }
        return init_linear(
            key, self.arg_dim, generator.size, bias=generator.bias, weight_norm=normed
        )

    def names(self) -> tuple[str, ...]:
        """Names of the parameter groups, in the order of their keys in ``init``."""
        return tuple(self.kind.generators) + ((self.kind.matrix,) if self.kind.matrix else ())

    def init(self, key: Array) -> Params:
        """Fresh parameters: {generator: {kernel (in, out), gain (out,), bias (out,)}}."""
        names = self.names()
        keys = jax.random.split(key, len(names))
        return {name: self.init_one(k, name) for name, k in zip(names, keys, strict=True)}

    def project(self, params: Params, arg: Array, start: int = 0) -> dict[str, Array]:
        """First linear map of every generator on a slice of the argument, without bias.

        Args:
          params: as returned by ``init``.
          arg: (..., m), channels start to start + m of the full argument.
          start: where the slice begins.

        Returns:
          {generator: (..., size or proj_rank)}, to be added over slices; empty if not selective.
        """
        out = {}
        for name in self.kind.generators:
            group = params[name]
            kernel = effective_kernel(group.get("down", group))
            out[name] = arg @ kernel[start : start + arg.shape[-1]].astype(arg.dtype)
        return out

    def factors(self, params: Params, projected: Mapping[str, Array]) -> Factors:
        """Factors of Q from the (summed) output of ``project``; a pytree, leading axes as there."""
        if self.kind.matrix is not None:
            group = params[self.kind.matrix]
            if "kernel" in group:
                return self.kind.factors({self.kind.matrix: group["kernel"]})
            skew = group["skew"] - group["skew"].T
            return self.kind.factors({self.kind.matrix: jax.scipy.linalg.expm(skew)})
        raw = {}
        dtype = None
        for name, value in projected.items():
            group, dtype = params[name], value.dtype
            if "up" in group:
                value = value @ effective_kernel(group["up"]).astype(value.dtype)
            # norms, Gram matrices and power iterations lose too much in half precision
            value = value.astype(jnp.promote_types(value.dtype, jnp.float32))
            raw[name] = value + group["bias"] if "bias" in group else value
        return jax.tree.map(lambda x: x.astype(dtype), self.kind.factors(raw))

    def transform(self, factors: Factors, v: Array) -> Array:
        """Q v for v (..., d)."""
        return self.kind.transform(factors, v)

    def mix(self, params: Params, arg: Array, v: Array) -> Array:
        """Q(arg) v for arg (..., arg_dim) and v (..., d)."""
        return self.transform(self.factors(params, self.project(params, arg)), v)


class Mixer(nn.Module):
    """Holds the parameters of a ``ChannelMixer`` and forwards to it."""

    channel: ChannelMixer

    def setup(self) -> None:
        def init_one(name: str) -> Callable[[Array], Params]:
            return lambda key: self.channel.init_one(key, name)

        self.weights = {name: self.param(name, init_one(name)) for name in self.channel.names()}

    def project(self, arg: Array, start: int = 0) -> dict[str, Array]:
        """See ``ChannelMixer.project``."""
        return self.channel.project(self.weights, arg, start)

    def factors(self, projected: Mapping[str, Array]) -> Factors:
        """See ``ChannelMixer.factors``."""
        return self.channel.factors(self.weights, projected)

    def transform(self, factors: Factors, v: Array) -> Array:
        """See ``ChannelMixer.transform``."""
        return self.channel.transform(factors, v)

    def __call__(self, arg: Array, v: Array) -> Array:
        """Q(arg) v."""
        return self.channel.mix(self.weights, arg, v)

"""Golden checks of the channel mixers and the fixed-point RNN blocks.

``CHECKS`` maps the name of a reference file to a function of its arrays; shapes are read from the
arrays, so files with other seeds and sizes run through the same checks.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from fpr.mixers import ChannelMixer, MixerOptions
from tests.reference import mixers as reference

Arrays = dict[str, np.ndarray]
OUTPUT_TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 1e-4


def assert_close(actual: ArrayLike, expected: ArrayLike, tolerance: float, what: str) -> None:
    """Largest difference relative to the largest expected entry."""
    expected = np.asarray(expected, np.float64)
    error = np.max(np.abs(np.asarray(actual, np.float64) - expected))
    relative = error / max(np.max(np.abs(expected)), 1e-30)
    assert relative <= tolerance, f"{what}: relative difference {relative:.2e} > {tolerance:.0e}"


def weights_of(arrays: Arrays, prefix: str = "param/") -> Arrays:
    """Arrays under a prefix, without it."""
    return {k[len(prefix) :]: v for k, v in arrays.items() if k.startswith(prefix)}


def mixer_params(weights: Arrays) -> dict:
    """Torch-style names and (out, in) weights -> parameters of an un-normalised ChannelMixer."""
    params: dict = {}
    for name, value in weights.items():
        path, kind = name.rsplit(".", 1)
        leaf, array = ("kernel", value.T) if kind == "weight" else ("bias", value)
        base, _, part = path.rpartition(".")
        if part in ("0", "1"):
            group = params.setdefault(base, {}).setdefault("down" if part == "0" else "up", {})
        else:
            parts = path.split(".")
            key = f"mixers_{parts[1]}_{parts[2]}" if parts[0] == "mixers" else path
            group = params.setdefault(key, {})
        group[leaf] = jnp.asarray(array)
    return params


def _rank(name: str, weights: Arrays, dim: int) -> int:
    if name in ("dplr", "householder", "lowrank"):
        return len(weights["alpha_proj.bias"])
    if name == "monarch":
        return dim // len(weights["alpha.bias"])
    if name == "mixture":
        return 1 + max(int(key.split(".")[1]) for key in weights)
    return 1


def mixer_options(name: str, weights: Arrays, dim: int, **options: object) -> MixerOptions:
    """Options whose rank and generator width are those of the weights."""
    low = weights.get("u_proj.0.weight", weights.get("uv_project.0.weight"))
    return MixerOptions(
        name=name,
        rank=_rank(name, weights, dim),
        proj_rank=None if low is None else len(low),
        weight_norm=False,
        **options,  # type: ignore[arg-type]
    )


def _mixer_check(name: str, act: str = "silu", spectral: bool = False) -> Callable[[Arrays], None]:
    def check(arrays: Arrays) -> None:
        weights = weights_of(arrays)
        arg, v, ct = arrays["param_arg"], arrays["input_arg"], arrays["ct"]
        dim = v.shape[-1]
        options = mixer_options(name, weights, dim, act=act, spectral=spectral)
        mixer = ChannelMixer(options, arg.shape[-1], dim)
        params = mixer_params(weights)
        out, pull = jax.vjp(lambda arg, v: mixer.mix(params, arg, v), arg, v)
        d_arg, d_v = pull(jnp.asarray(ct))
        assert_close(out, arrays["out"], OUTPUT_TOLERANCE, "out")
        assert_close(d_v, arrays["d_input_arg"], GRADIENT_TOLERANCE, "d_input_arg")
        if "d_param_arg" in arrays:
            assert_close(d_arg, arrays["d_param_arg"], GRADIENT_TOLERANCE, "d_param_arg")

        q = reference.matrices(name, weights, arg, dim, act=act, spectral=spectral)
        expected = np.einsum("btij,btj->bti", q, v.astype(np.float64))
        assert_close(expected, arrays["out"], OUTPUT_TOLERANCE, "reference out")
        expected = np.einsum("btij,bti->btj", q, ct.astype(np.float64))
        assert_close(expected, arrays["d_input_arg"], GRADIENT_TOLERANCE, "reference d_input_arg")

    return check


CHECKS: dict[str, Callable[[Arrays], None]] = {
    "mixer_dense_selective": _mixer_check("dense"),
    "mixer_dplr_r3_silu": _mixer_check("dplr"),
    "mixer_householder_r1": _mixer_check("householder", act="identity"),
    "mixer_householder_r2_proj": _mixer_check("householder"),
    "mixer_householder_r3_silu": _mixer_check("householder"),
    "mixer_kronecker_rect": _mixer_check("kronecker"),
    "mixer_kronecker_square": _mixer_check("kronecker"),
    "mixer_kronecker_spectral": _mixer_check("kronecker", spectral=True),
    "mixer_mixture_r2": _mixer_check("mixture"),
    "mixer_monarch_b4": _mixer_check("monarch"),
    "mixer_orthogonal": _mixer_check("orthogonal"),
}

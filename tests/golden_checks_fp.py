"""Golden checks of the channel mixers and the fixed-point RNN blocks.

``CHECKS`` maps the name of a reference file to a function of its arrays; shapes are read from the
arrays, so files with other seeds and sizes run through the same checks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from fpr.adjoints import OneStep
from fpr.fixed_point import fixed_point
from fpr.mixers import ChannelMixer, MixerOptions
from fpr.models.backbone import Block
from fpr.models.fp_rnn import FPRNNConfig, FPRNNLayer
from fpr.solvers import Damped
from tests.reference import fp_rnn as fp_rnn_reference
from tests.reference import mixers as reference
from tests.weights import RNN_NAMES

Arrays = dict[str, np.ndarray]
OUTPUT_TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 1e-4
NUDGES = 20


def relative(actual: ArrayLike, expected: ArrayLike) -> float:
    """Largest difference relative to the largest expected entry."""
    wanted = np.asarray(expected, np.float64)
    error = np.max(np.abs(np.asarray(actual, np.float64) - wanted))
    return float(error / max(np.max(np.abs(wanted)), 1e-30))


def assert_close(actual: ArrayLike, expected: ArrayLike, tolerance: float, what: str) -> None:
    """Asserts `relative` ≤ tolerance."""
    error = relative(actual, expected)
    assert error <= tolerance, f"{what}: relative difference {error:.2e} > {tolerance:.0e}"


def nudged(x: np.ndarray) -> np.ndarray:
    """x with the last bit of every entry moved up or down.

    What a result changes by when its input is nudged is rounding, not error: normalising a row of
    norm 1e-4 (kronecker) or a slow fixed point amplifies it. Checks allow `NUDGES` such changes on
    top of their tolerance.
    """
    sign = np.random.default_rng(0).choice(np.array([-1, 1], np.float32), x.shape)
    return (x * (1 + np.float32(2**-23) * sign)).astype(np.float32)


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

        @jax.jit
        def run(arg: jax.Array, v: jax.Array, ct: jax.Array):
            out, pull = jax.vjp(lambda arg, v: mixer.mix(params, arg, v), arg, v)
            d_arg, d_v = pull(ct)
            return {"out": out, "d_param_arg": d_arg, "d_input_arg": d_v}

        actual, other = run(arg, v, ct), run(nudged(arg), v, ct)
        room = {key: NUDGES * relative(other[key], actual[key]) for key in actual}
        room["out"] += OUTPUT_TOLERANCE
        room["d_param_arg"] += GRADIENT_TOLERANCE
        room["d_input_arg"] += GRADIENT_TOLERANCE
        for key in actual:
            if key in arrays:  # A constant mixer has no gradient to its argument.
                assert_close(actual[key], arrays[key], room[key], key)

        q = reference.matrices(name, weights, arg, dim, act=act, spectral=spectral)
        expected = np.einsum("btij,btj->bti", q, v.astype(np.float64))
        assert_close(expected, arrays["out"], room["out"], "reference out")
        expected = np.einsum("btij,bti->btj", q, ct.astype(np.float64))
        assert_close(expected, arrays["d_input_arg"], room["d_input_arg"], "reference d_input_arg")

    return check


# --- blocks ---------------------------------------------------------------------------------------


def block_params(weights: Arrays, names: dict[str, str]) -> dict:
    """Torch-style block weights -> Flax parameters; mixer parameters under "mixer"."""
    params: dict = {}
    mixer = {k[len("mixer.") :]: v for k, v in weights.items() if k.startswith("mixer.")}
    if mixer:
        params["mixer"] = mixer_params(mixer)
    for name, value in weights.items():
        if name.startswith("mixer."):
            continue
        path, _, kind = name.rpartition(".")
        if not path:  # A_log, D
            params[kind] = jnp.asarray(value)
            continue
        path = names.get(path, path.replace("conv1d_", "conv_"))
        if kind == "weight":
            leaf = {1: "scale", 2: "kernel", 3: "kernel"}[value.ndim]
            value = value[:, 0].T if value.ndim == 3 else value.T
        else:
            leaf = "bias"
        params.setdefault(path, {})[leaf] = jnp.asarray(value)
    return params


def check_block(
    arrays: Arrays,
    layer: Block,
    names: dict[str, str],
    solver: Damped,
    block: Any,
) -> None:
    """One step, 400 undamped steps, and output and gradients of the solved block.

    A fixed point amplifies rounding by 1/(1-ρ) for a contraction by ρ per iteration, and n
    iterations to a tolerance τ mean 1-ρ ≈ log(1/τ)/n: solved values get that much more room.

    Args:
      arrays: the reference file.
      layer: block without weight normalisation.
      names: module names of the file that differ from ours.
      solver: the file's training solver.
      block: NumPy reference of the same block, with methods `step` and `out`.
    """
    params = block_params(weights_of(arrays), names)
    u, ct = jnp.asarray(arrays["u"]), jnp.asarray(arrays["ct"])
    delta = arrays["undamped_delta_inf"]
    iterations = int(arrays["iterations"][0])
    room = max(1.0, iterations / np.log(1.0 / solver.tolerance))

    def f(p: dict, x: Any, z: jax.Array) -> Any:
        return layer.apply({"params": p}, x, z, method="step")

    @jax.jit
    def probe(p: dict, u: jax.Array, y: jax.Array):
        x = layer.apply({"params": p}, u, method="prepare")

        def body(y: jax.Array, _: None):
            new = f(p, x, y)
            return new, jnp.max(jnp.abs(new - y))

        return f(p, x, y), *jax.lax.scan(body, jnp.zeros_like(y), None, length=len(delta))

    y = jnp.asarray(arrays["y_probe"])
    once, last, deltas = probe(params, u, y)
    once_2, last_2, _ = probe(params, nudged(arrays["u"]), y)
    expected = arrays["f_of_y_probe"]
    tolerance = OUTPUT_TOLERANCE + NUDGES * relative(once_2, once)
    assert_close(once, expected, tolerance, "f_of_y_probe")
    assert_close(block.step(arrays["y_probe"]), expected, tolerance, "reference f_of_y_probe")
    assert_close(deltas[:3], delta[:3], GRADIENT_TOLERANCE, "first undamped_delta_inf")
    if delta[-1] < 1e-5:
        tolerance = OUTPUT_TOLERANCE * room + NUDGES * relative(last_2, last)
        assert_close(last, arrays["y_after_400"], tolerance, "y_after_400")
    # At the cap, or so near it that rounding decides, there is no fixed point to compare.
    if iterations > 0.9 * solver.max_steps:
        return

    @jax.jit
    def solved(p: dict, u: jax.Array, ct: jax.Array):
        def run(p: dict, u: jax.Array):
            x = layer.apply({"params": p}, u, method="prepare")
            z0 = layer.apply({"params": p}, x, None, method="init_state")
            solution = fixed_point(f, p, x, z0, solver=solver, adjoint=OneStep(refine=True))
            out = layer.apply({"params": p}, x, solution.value, method="output")
            return out, (solution.value, solution.steps)

        out, pull, aux = jax.vjp(run, p, u, has_aux=True)
        return out, aux, pull(ct)

    out, (y, steps), (d_params, d_u) = solved(params, u, ct)
    out_2, _, (d_params_2, d_u_2) = solved(params, nudged(arrays["u"]), ct)
    # The file counts the differentiated application too.
    assert abs(int(steps.max()) + 1 - iterations) <= max(1, iterations // 10)
    tolerance = OUTPUT_TOLERANCE * room + NUDGES * relative(out_2, out)
    assert_close(out, arrays["out"], tolerance, "out")
    assert_close(block.out(np.asarray(y)), arrays["out"], tolerance, "reference out")
    tolerance = GRADIENT_TOLERANCE * room + NUDGES * relative(d_u_2, d_u)
    assert_close(d_u, arrays["du"], tolerance, "du")
    grads = block_params(weights_of(arrays, "grad/"), names)
    for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
        actual, other = d_params, d_params_2
        for key in path:
            actual, other = actual[key.key], other[key.key]
        tolerance = GRADIENT_TOLERANCE * room + NUDGES * relative(other, actual)
        assert_close(actual, leaf, tolerance, jax.tree_util.keystr(path))


def mixer_fields(arrays: Arrays, mixer: str) -> dict:
    """Model options of the mixer in a block's weights."""
    weights = {k[6:]: v for k, v in weights_of(arrays).items() if k.startswith("mixer.")}
    options = mixer_options(mixer, weights, arrays["y_probe"].shape[-1])
    return {"mixer": mixer, "mixer_rank": options.rank, "proj_rank": options.proj_rank}


def _fp_rnn_check(mixer: str, arg: str, spectral: bool = False) -> Callable[[Arrays], None]:
    def check(arrays: Arrays) -> None:
        width, d = arrays["u"].shape[-1], arrays["y_probe"].shape[-1]
        weights = weights_of(arrays)
        config = FPRNNConfig(
            vocab_size=2, seq_len=1, hidden_size=width, expand=d // width, mixer_arg=arg,
            spectral=spectral, weight_norm=False, conv="conv1d_x.weight" in weights,
            **mixer_fields(arrays, mixer),
        )  # fmt: skip
        solver = Damped(
            tolerance=1e-5, max_steps=400, step_size=1.0, decay=1.0, patience=15,
            halting="batch", stop_fraction=0.9, residual="best",
        )  # fmt: skip
        block = fp_rnn_reference.FPRNN(
            weights, arrays["u"], mixer=mixer, arg=arg, spectral=spectral
        )
        check_block(arrays, FPRNNLayer(config), RNN_NAMES, solver, block)

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
    "block_fp_rnn_dplr": _fp_rnn_check("dplr", "x"),
    "block_fp_rnn_householderproduct": _fp_rnn_check("householder", "concat"),
    "block_fp_rnn_kronecker": _fp_rnn_check("kronecker", "symmetric", spectral=True),
}

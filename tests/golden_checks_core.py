"""Golden checks of the solvers and of FPRM: each compares NumPy float64 and JAX with the arrays."""

import json

import jax
import jax.numpy as jnp
import numpy as np

from experiments.import_torch import block_params
from fpr.fixed_point import trace
from fpr.models.fprm import FPRMConfig, FPRMLayer
from fpr.registry import unflatten
from fpr.solvers import Damped
from tests.reference import fprm as fprm_reference
from tests.reference import solvers as solver_reference


def close(actual, expected, tolerance, what):
    """Largest difference relative to the largest expected entry."""
    scale = max(np.max(np.abs(expected)), 1e-6)
    error = (
        np.max(np.abs(np.asarray(actual, np.float64) - np.asarray(expected, np.float64))) / scale
    )
    assert error <= tolerance, f"{what}: relative error {error:.2e} > {tolerance:.0e}"


def check_fp_rnn_solver(arrays, train):
    w, c, gain = (arrays[k].astype(np.float64) for k in ("W", "c", "gain"))
    outliers, cap = (0.25, 60) if train else (0.0, 1000)

    def f(y):
        return np.tanh(gain * (y @ w)) + 0.5 * c - 0.6 * gain * y

    y, best, sizes = solver_reference.fp_rnn_solve(
        f, np.zeros_like(c), 1e-4, 0.99, 0.9, 15, cap, outliers
    )
    n = int(arrays["iterations"])
    # Where a sample is chaotic before it contracts, rounding may shift its end by an iteration.
    assert abs(len(best) - n) <= 2, f"reference took {len(best)} iterations, expected {n}"
    # Below this, float32 rounding decides whether a residual is a new best one.
    above = np.logical_and.accumulate(arrays["best_residual"] > 1e-5, axis=0)

    def compare(y, best, sizes, what):
        m = min(n, len(best))
        mask = above[:m]
        close(sizes[:m][mask], arrays["step_size"][:m][mask], 1e-5, f"{what} step_size")
        expected = arrays["best_residual"][:m][mask]
        np.testing.assert_allclose(best[:m][mask], expected, rtol=1e-2, atol=1e-5)
        settled = arrays["best_residual"][-1] < 1e-2
        close(y[settled], arrays["y"][settled], 1e-3, f"{what} y")

    compare(y, best, sizes, "reference")
    solver = Damped(
        step_size=0.99, decay=0.9, patience=15, tolerance=1e-4, max_steps=cap, halting="batch",
        stop_fraction=1.0 - outliers, residual="best",
    )  # fmt: skip

    def g(params, x, y):
        return jnp.tanh(x["gain"] * (y @ params)) + 0.5 * x["c"] - 0.6 * x["gain"] * y

    x = {"gain": jnp.asarray(arrays["gain"]), "c": jnp.asarray(arrays["c"])}
    w32 = jnp.asarray(arrays["W"])
    path = jax.jit(lambda: trace(g, w32, x, jnp.zeros_like(x["c"]), solver=solver, steps=n))()
    state = jax.jit(
        lambda: solver.run(lambda y: g(w32, x, y), solver.init(jnp.zeros_like(x["c"])))
    )()
    assert abs(int(state.steps[0]) - n) <= 2, f"took {state.steps[0]} iterations, expected {n}"
    compare(np.asarray(state.z), np.asarray(path.best_residual), np.asarray(path.step_size), "jax")


def fprm_config(config):
    """Our options for a released config (JSON in the golden files)."""
    return FPRMConfig(
        vocab_size=2,
        seq_len=config["seq_len"],
        hidden_size=config["hidden_size"],
        num_heads=config["num_heads"],
        num_layers=config["L_layers"],
        expansion=float(config["expansion"]),
        causal=config["causal"],
        rope=config["rope"],
        softmax_temp=config["softmax_temp"],
        mlp_t=config["mlp_t"],
        norm_type=config["norm_type"].removesuffix("-norm"),
        norm_placement=config["norm_placement"],
        norm_eps=config["rms_norm_eps"],
        conv=config["conv_type"],
        conv_kernel=config["conv_kernel_size"],
        conv_bias=config["conv_bias"],
        residual_scale=(config["residual_scale"] or "none").replace("-", "_"),
        outer_only=config["outer_only"],
        alpha_1=config["alpha_1_init"],
        alpha_2=config["alpha_2_init"],
        normalize_input=config["normalize_input_injection"],
        num_registers=config["puzzle_emb_len"],
    )  # fmt: skip


def fprm_params(weights):
    """Our parameter tree for a released state dict of the block (torch layout)."""
    params, left = block_params(weights)
    assert not left, f"no place for {left}"
    return jax.tree.map(jnp.asarray, unflatten(params))


def check_fprm_block(arrays):
    config = json.loads(str(arrays["config"]))
    weights = {k[6:]: v for k, v in arrays.items() if k.startswith("param/")}
    grads = {k[5:]: v for k, v in arrays.items() if k.startswith("grad/")}
    w64 = {k: v.astype(np.float64) for k, v in weights.items()}

    def reference(z, x):
        return fprm_reference.step(w64, z, x, config)

    close(reference(arrays["z"], arrays["x"]), arrays["out"], 1e-5, "reference out")

    layer = FPRMLayer(fprm_config(config))
    params = fprm_params(weights)

    def f(params, x, z):
        x = layer.apply({"params": params}, x, method="inject")
        return layer.apply({"params": params}, x, z, method="step")

    def loss(params, x, z):
        out = f(params, x, z)
        return jnp.sum(out * arrays["ct"]), out

    z, x = jnp.asarray(arrays["z"]), jnp.asarray(arrays["x"])
    (_, out), (dparams, dx, dz) = jax.jit(
        jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)
    )(params, x, z)
    close(out, arrays["out"], 1e-5, "out")
    close(dz, arrays["dz"], 1e-4, "dz")
    close(dx, arrays["dx"], 1e-4, "dx")
    expected = fprm_params(grads)
    actual = {name: value for name, value in dparams.items() if name in expected}
    jax.tree.map(lambda a, b: close(a, b, 1e-4, "parameter gradient"), actual, expected)

    solvers = {
        mode: Damped(tolerance=1e-4, decay=decay, patience=5, halting="never")
        for mode, decay in (("eval", 0.99), ("train", 0.9))
    }
    n = arrays["eval/residual"].shape[0]
    for mode, solver in solvers.items():
        z0 = arrays[f"{mode}/z0"]
        ours = jax.jit(lambda z0, s=solver: trace(f, params, x, z0, solver=s, steps=n))(z0)
        ours = [ours.value, ours.residual, ours.step_size, ours.patience]
        theirs = solver_reference.fprm_trajectory(
            lambda z: reference(z, arrays["x"]), z0, 1e-4, solver.decay, 5, 20
        )
        for what, path in (("reference", theirs), ("jax", ours)):
            _compare_path(arrays, mode, [np.asarray(p) for p in path], what)


def _compare_path(arrays, mode, path, what):
    """Compares until float32 rounding decides which residual is the best one so far."""
    values, residuals, step_sizes, patience = path
    expected = arrays[f"{mode}/residual"]
    n = len(residuals)
    for i in (1, 5, 20):
        if i <= n:
            close(values[i - 1], arrays[f"{mode}/z_after_{i}"], 1e-3, f"{what} {mode} z {i}")
    if n == len(expected):
        close(values[-1], arrays[f"{mode}/z_final"], 2e-3, f"{what} {mode} z_final")
    best = np.minimum.accumulate(expected, axis=0)[:-1]
    tie = np.abs(expected[1:] - best) <= 1e-2 * best  # A close call, which rounding may turn.
    tie = np.concatenate([np.zeros_like(tie[:1]), tie])
    clear = np.logical_and.accumulate((expected > 5e-5) & ~tie, axis=0)[:n]
    assert clear[0].all(), "the trajectory starts at rounding level: nothing to compare"
    expected = {k: arrays[f"{mode}/{k}"][:n][clear] for k in ("residual", "step_size", "patience")}
    np.testing.assert_allclose(residuals[clear], expected["residual"], rtol=1e-2, atol=1e-5)
    np.testing.assert_allclose(step_sizes[clear], expected["step_size"], rtol=1e-5)
    np.testing.assert_array_equal(patience[clear], expected["patience"])


CHECKS = {
    "solver_fprnn_train": lambda arrays: check_fp_rnn_solver(arrays, train=True),
    "solver_fprnn_eval": lambda arrays: check_fp_rnn_solver(arrays, train=False),
    **{
        f"fprm_block_{name}": check_fprm_block
        for name in (
            "mlp_t",
            "outer_only",
            "peri_input_dependent",
            "post_plain",
            "pre_conv1d_causal_nope",
            "pre_conv1d_normout",
            "pre_conv2d_rope",
        )
    },
}

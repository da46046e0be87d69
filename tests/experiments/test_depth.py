import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fpr
from experiments import config as configs
from experiments import depth, losses
from experiments.workdir import write_weights
from fpr import registry
from fpr.models.fprm import tied_scales
from fpr.solvers import Damped
from tests.experiments.conftest import tiny

pytestmark = pytest.mark.usefixtures("fast_compile")

STEPS = 24


@pytest.fixture(scope="module")
def config():
    return tiny()


@pytest.fixture(scope="module")
def params(config):
    return fpr.init(config["model"], jax.random.key(5))


@pytest.fixture(scope="module")
def rows(config, params):
    return depth.measure(config, STEPS, params)


def row(rows, *case):
    names = ("norm_type", "residual_scale", "trained")
    return next(r for r in rows if tuple(r[n] for n in names) == case)


def test_one_row_per_combination_and_one_for_trained_weights(rows):
    assert len(rows) == 7
    assert all(len(r["activation"]) == len(r["gradient"]) == STEPS for r in rows)
    assert all(np.isfinite(r["activation"] + r["gradient"]).all() for r in rows)
    # The same combination at other weights: the given ones are read.
    fresh = row(rows, "pre", "input_independent", False)
    trained = row(rows, "pre", "input_independent", True)
    assert not np.allclose(fresh["activation"], trained["activation"], rtol=1e-3)


def spectral(p):
    return np.linalg.norm(np.asarray(p["kernel"], np.float64), 2)


def test_theorem_1_bounds_the_scaled_pre_norm_and_nothing_bounds_the_unscaled(config, rows, params):
    model = config["model"]
    width, sublayers = model["hidden_size"], 2 * model["num_layers"]
    # RMS of what a sublayer adds to a token, whatever it reads: RMSNorm gives vectors of RMS <= 1.
    # A head's output is a mean of values: |o_h| <= max_s |v_hs|, at most H times the square.
    p = params["layers_0"]
    qkv = np.asarray(p["token_mixers_0"]["qkv_proj"]["kernel"], np.float64)
    attention = (
        np.linalg.norm(qkv[:, 2 * width :], 2)
        * model["num_heads"] ** 0.5
        * spectral(p["token_mixers_0"]["o_proj"])
    )
    # |silu(g) u|_2 <= |g|_2 |u|_2, each at most the norm of its half times sqrt(D).
    gate, up = np.split(np.asarray(p["mlps_0"]["gate_up_proj"]["kernel"], np.float64), 2, axis=1)
    swiglu = (
        np.linalg.norm(gate, 2) * np.linalg.norm(up, 2) * width**0.5
        * spectral(p["mlps_0"]["down_proj"])
    )  # fmt: skip
    c = max(attention, swiglu)
    a1, a2 = model["alpha_1"], model["alpha_2"]
    b1, b2 = tied_scales(a1, a2, sublayers)
    # `measure` reads the first training batch.
    tokens = configs.validate(config).train_batch(0, config["train"]["batch_size"])["tokens"]
    x = np.sqrt(np.mean(np.square(np.asarray(params["embedding"])[tokens] * width**0.5)))
    scaled = row(rows, "pre", "input_independent", True)["activation"]
    # |f(z)| <= a1^2L (a2 |z| + b2 |x|) + b1 c (1 + a1 + ...), from a z0 cut off at two sigma.
    bound = 2 * model["z0_std"] / 0.8796
    for activation in scaled:
        bound = a1**sublayers * (a2 * bound + b2 * x)
        bound += b1 * c * sum(a1**j for j in range(sublayers))
        assert activation <= bound
    assert scaled[-1] <= 1.001 * (a1**sublayers * x + c), "theorem 1 in the limit"
    unscaled = np.array(row(rows, "pre", "none", False)["activation"])
    assert (np.diff(unscaled[4:]) > 0).all()
    assert unscaled[-1] > 2 * unscaled[STEPS // 3]
    # Pre-norm with scales settles: what is left of the start is (a1^2L a2)^i.
    late = np.array(row(rows, "pre", "input_independent", False)["activation"][-4:])
    assert np.ptp(late) < 0.05 * late[-1]


@pytest.mark.parametrize("norm_type", ["pre", "post"])
def test_norms_and_gradients_are_those_of_a_plain_loop(config, params, norm_type):
    model = config["model"] | {"norm_type": norm_type}
    module, steps = fpr.build(model), 3
    key = jax.random.key(1)
    batch = {"tokens": jnp.array([[1, 2, 3, 4], [6, 5, 4, 3]], jnp.int32)}
    batch["labels"] = jnp.array([[2, 3, losses.IGNORED, 1], [1, 2, 3, 4]], jnp.int32)
    got = jax.jit(
        lambda p: depth.follow(
            model, p, batch, key, steps=steps, token_loss=losses.softmax_cross_entropy
        )
    )(params)
    assert got.gradient.shape == (steps,)
    # The iterates of an undamped solve that does not halt.
    solver = Damped(decay=1.0, halting="never")
    path = registry.trace(model, params, batch, steps=steps, key=key, solver=solver).value
    rms = np.sqrt(np.mean(np.square(np.asarray(path)), axis=(1, 2, 3)))
    np.testing.assert_allclose(got.activation, rms, rtol=1e-5)

    embedded = params["embedding"][batch["tokens"]] * model["hidden_size"] ** 0.5

    def answer_loss(z, left):
        for _ in range(left):
            z = module.apply(
                {"params": params}, embedded, z, method=lambda m, x, z: m.layers[0].step(x, z)
            )
        logits = z @ params["lm_head"]["kernel"]
        logp = jax.nn.log_softmax(logits)
        picked = jnp.take_along_axis(logp, jnp.maximum(batch["labels"], 0)[..., None], 2)[..., 0]
        kept = batch["labels"] != losses.IGNORED
        return -jnp.mean(jnp.sum(picked * kept, axis=1) / jnp.sum(kept, axis=1))

    gradient = jax.jit(jax.grad(answer_loss), static_argnums=1)
    for i in range(steps):
        want = gradient(path[i], steps - 1 - i)
        np.testing.assert_allclose(got.gradient[i], jnp.linalg.norm(want), rtol=1e-4)


def test_norms_of_tiny_and_huge_values():
    for scale in (1e-30, 1.0, 1e30):
        tree = {"a": jnp.array([3.0 * scale]), "b": jnp.array([[4.0 * scale]])}
        assert float(depth._norm(tree)) == pytest.approx(5.0 * scale, rel=1e-5)
    assert float(depth._norm(jnp.zeros((2, 2)))) == 0.0


CONFIG = """
def get_config(variant="fprm"):
    from tests.experiments.conftest import TINY
    if variant == "lstm":
        model = {"name": "lstm", "vocab_size": 7, "seq_len": 4, "hidden_size": 8}
        return {"model": model, "task": TINY["task"]}
    return TINY
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "config.py"
    path.write_text(CONFIG)
    return path


def save_run(path, model, params):
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model": model}))
    write_weights(path / "weights.npz", params)
    return path


def test_writes_a_file_a_figure_and_a_table(config, params, rows, file, tmp_path, capsys):
    run = save_run(tmp_path / "run", config["model"], params)
    out = tmp_path / "new" / "out"
    flags = [f"--config={file}", f"--workdir={run}", f"--out={out}", f"--iterations={STEPS}"]
    assert depth.main(flags) == 0
    printed = capsys.readouterr().out
    for text in ("z_1", "z_8", f"z_{STEPS}", "peri-norm, unscaled", "pre-norm, scaled, trained"):
        assert text in printed
    assert (out / "depth.png").read_bytes().startswith(b"\x89PNG")
    written = json.loads((out / "depth.json").read_text())
    assert (written["iterations"], written["alpha_1"]) == (STEPS, 0.5)
    for got, want in zip(written["rows"], rows, strict=True):
        assert got["norm_type"] == want["norm_type"]
        np.testing.assert_allclose(got["activation"], want["activation"], rtol=1e-5)


def test_a_run_of_another_model_is_refused(config, params, file, tmp_path, capsys):
    other = config["model"] | {"norm_type": "post", "solver": {"preset": "fp_mamba"}}
    run = save_run(tmp_path / "run", other, params)
    assert depth.main([f"--config={file}", f"--workdir={run}", f"--out={tmp_path}"]) == 2
    error = capsys.readouterr().err.strip()
    assert "another model than the config: model.norm_type (there 'post', here 'pre')" in error
    assert "solver" not in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--out=x"], "--config"),
        (["--config=FILE"], "--out"),
        (["--config=absent.py", "--out=OUT"], "unknown config file 'absent.py'"),
        (["--config=FILE:lstm", "--out=OUT"], "model.name is 'lstm'"),
        (["--config=FILE", "--out=OUT", "--workdir=absent"], "absent/config.json does not exist"),
        (["--config=FILE", "--out=OUT", "--iterations=0"], "iterations=0, allowed: at least 1"),
        (["--config=FILE", "--out=OUT", "--iteration=3"], "did you mean '--iterations'"),
    ],
)
def test_mistakes_are_one_line(flags, message, file, tmp_path, capsys):
    out = tmp_path / "out"
    assert depth.main([f.replace("FILE", str(file)).replace("OUT", str(out)) for f in flags]) == 2
    error = capsys.readouterr().err.strip()
    assert message in error
    assert len(error.splitlines()) == 1
    assert not (out / "depth.json").exists()

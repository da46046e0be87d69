"""build, init, apply, trace and load, and their errors."""

import json
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import pytest

import fpr
from fpr import adjoints, registry
from fpr.solvers import Damped

CONFIG: Any = {
    "name": "fprm", "vocab_size": 5, "seq_len": 4, "hidden_size": 8, "num_heads": 2,
    "num_layers": 1, "adjoint": {"name": "unrolled"},
    "solver": {"preset": "fprm", "train": {"max_steps": 6}, "eval": {"max_steps": 9}},
}  # fmt: skip
BATCH = {"tokens": jnp.array([[1, 2, 3, 4], [4, 4, 1, 2]])}


@pytest.fixture(scope="module")
def params():
    return fpr.init(CONFIG, jax.random.key(0))


def test_config_dicts_and_dicts_are_the_same(params):
    config = ml_collections.ConfigDict(CONFIG)
    config.lock()
    assert registry.to_dict(config) == CONFIG
    assert fpr.build(config) == fpr.build(CONFIG)
    assert fpr.build(ml_collections.FrozenConfigDict(CONFIG)).config.hidden_size == 8


def test_apply_chooses_settings_and_arguments_replace_them(params):
    never = {key: {"halting": "never"} | CONFIG["solver"][key] for key in ("train", "eval")}
    config = CONFIG | {"solver": {"preset": "fprm"} | never}
    apply = jax.jit(partial(fpr.apply, config), static_argnames=("train", "solver", "adjoint"))
    np.testing.assert_array_equal(apply(params, BATCH).steps, 9)
    np.testing.assert_array_equal(apply(params, BATCH, train=True).steps, 6)
    np.testing.assert_array_equal(apply(params, BATCH, max_steps=jnp.array([2, 3])).steps, [2, 3])
    solver = Damped(max_steps=4, halting="never")
    out = apply(params, BATCH, solver=solver, adjoint=adjoints.OneStep(2, refine=True))
    np.testing.assert_array_equal(out.steps, 4)
    assert isinstance(out, fpr.Output)
    assert out.logits.shape == (2, 4, 5)
    eager = fpr.apply(config, params, BATCH, solver=solver)
    np.testing.assert_allclose(eager.state[0].z, out.state[0].z, rtol=1e-4, atol=1e-5)
    path = registry.trace(config, params, BATCH, steps=4)
    np.testing.assert_allclose(path.value[3], out.state[0].z, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "unknown model.name None"),
        (CONFIG | {"name": "fprmm"}, "unknown model.name 'fprmm'; did you mean 'fprm'"),
        (CONFIG | {"hidden_sizes": 8},
         "unknown key 'hidden_sizes' in model; did you mean 'hidden_size'"),
        ({"name": "fprm"}, "model lacks vocab_size, seq_len"),
        ("fprm", "model='fprm', allowed: a mapping"),
        (None, "model=None, allowed: a mapping"),
        (CONFIG | {"solver": {"eval": {"tol": 1.0}}},
         "'tol' in model.solver.eval; did you mean 'tolerance'"),
        (CONFIG | {"solver": {"train": {"decay": 2.0}}}, "decay=2.0, allowed: 0 < decay <= 1"),
        (CONFIG | {"solver": "fprm"}, "model.solver='fprm', allowed: a mapping"),
        (CONFIG | {"adjoint": {"name": "neuman"}}, "did you mean 'neumann'"),
    ],
)  # fmt: skip
def test_bad_configs(config, message):
    with pytest.raises(ValueError, match=message):
        fpr.build(config)


def save(folder, params):
    (folder / "config.json").write_text(json.dumps({"model": CONFIG}))
    np.savez(folder / "weights.npz", **registry.flatten(params))


def test_load_returns_what_was_saved(tmp_path, params):
    save(tmp_path, params)
    config, loaded = fpr.load(tmp_path)
    assert config == CONFIG
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    assert fpr.load(str(tmp_path))[0] == CONFIG


@pytest.mark.parametrize("name", ["config.json", "weights.npz"])
@pytest.mark.parametrize("damage", ["missing", "empty", "half", "garbage", "other", "binary"])
def test_load_names_a_damaged_file(tmp_path, params, name, damage):
    save(tmp_path, params)
    file = tmp_path / name
    content = file.read_bytes()
    if damage == "missing":
        file.unlink()
    elif damage == "other" and name == "weights.npz":
        with file.open("wb") as out:
            np.save(out, np.ones(3))  # An .npy in its place.
    else:
        file.write_bytes({
            "empty": b"", "half": content[: len(content) // 2], "garbage": b"not this",
            "other": b"[1, 2]", "binary": bytes(range(128, 256)),
        }[damage])  # fmt: skip
    with pytest.raises(ValueError, match=name):
        fpr.load(tmp_path)


def test_a_flipped_bit_in_the_weights_is_noticed(tmp_path, params):
    save(tmp_path, params)
    file = tmp_path / "weights.npz"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0xFF
    file.write_bytes(bytes(content))
    with pytest.raises(ValueError, match=r"weights\.npz cannot be read"):
        fpr.load(tmp_path)


def test_flatten_and_unflatten_are_inverse(params):
    flat = registry.flatten(params)
    assert "layers_0/alpha_1" in flat
    jax.tree.map(np.testing.assert_array_equal, registry.unflatten(flat), params)

"""Model.jacobian_norm against Jacobians written out."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import fpr

CONFIG = {
    "name": "fprm", "vocab_size": 5, "seq_len": 2, "hidden_size": 4, "num_heads": 2,
    "num_layers": 1, "expansion": 1.0, "rope": False, "z0_std": 1.0,
}  # fmt: skip
BATCH = {"tokens": jnp.array([[1, 2], [3, 4], [2, 2]])}


@pytest.fixture(scope="module")
def solved():
    model = fpr.build(CONFIG)
    params = fpr.init(CONFIG, jax.random.key(0), BATCH)
    state = fpr.apply(CONFIG, params, BATCH, train=True, key=jax.random.key(1), max_steps=3).state
    return model, params, state


def norm(model, state, step, params, key):
    return model.apply({"params": params}, BATCH, state, key, step=step, method="jacobian_norm")


@pytest.mark.parametrize("step", [0.0, 1e-2])
def test_the_mean_over_draws_is_the_frobenius_norm(solved, step, fast_compile):
    model, params, state = solved

    def f(module, z):
        layer = module.layers[0]
        return layer.step(layer.inject(module.embed(BATCH)), z)

    z = state[0].z
    jacobian = jax.jit(jax.jacrev(lambda z: model.apply({"params": params}, z, method=f)))(z)
    blocks = [np.asarray(jacobian)[b, ..., b, :, :].reshape(8, 8) for b in range(3)]
    expected = [np.sum(block.astype(np.float64) ** 2) / 8 for block in blocks]

    draw = jax.jit(jax.vmap(functools.partial(norm, model, state, step, params)))
    # In parts: jaxlib 0.10.2 gets a vmap over more than 32,768 values at one shared z wrong, see
    # the README.
    keys = jax.random.split(jax.random.key(2), (8, 250))
    draws = np.concatenate([draw(part) for part in keys])
    np.testing.assert_allclose(draws.mean(axis=0), expected, rtol=0.08)


def test_gradients_of_both_forms_agree_on_average(solved, fast_compile):
    model, params, state = solved
    keys = jax.random.split(jax.random.key(3), 500)

    def mean(params, step):
        draws = jax.vmap(lambda key: norm(model, state, step, params, key))(keys)
        return jnp.mean(draws)

    exact, finite = (
        jax.jit(jax.grad(functools.partial(mean, step=step)))(params)["layers_0"]
        for step in (0.0, 1e-2)
    )
    flat = [np.concatenate([np.ravel(a) for a in jax.tree.leaves(g)]) for g in (exact, finite)]
    cosine = flat[0] @ flat[1] / np.linalg.norm(flat[0]) / np.linalg.norm(flat[1])
    assert cosine > 0.97
    assert np.linalg.norm(flat[1]) == pytest.approx(np.linalg.norm(flat[0]), rel=0.15)


def test_a_model_without_a_loop_has_no_jacobian():
    config = {"name": "lstm", "vocab_size": 5, "seq_len": 2, "hidden_size": 4}
    params = fpr.init(config, jax.random.key(0), BATCH)
    with pytest.raises(ValueError, match="LSTM has no loop"):
        fpr.build(config).apply(
            {"params": params}, BATCH, (), jax.random.key(1), method="jacobian_norm"
        )


RECURSIONS = {
    "trm": {"name": "trm"},
    "single state": {"name": "trm", "num_levels": 0, "gradient": "step"},
    "hrm": {"name": "hrm"},
}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(options, id=name, marks=[pytest.mark.slow] if name != "trm" else [])
        for name, options in RECURSIONS.items()
    ],
)
def test_the_exact_form_sees_through_the_cycles_without_gradient(options, fast_compile):
    """It equals the limit of the finite differences, in value and in gradient."""
    config = {k: v for k, v in CONFIG.items() if k != "z0_std"}
    config |= {"h_cycles": 2, "l_cycles": 1} | options
    batch = {"tokens": BATCH["tokens"][:1]}
    model, params = fpr.build(config), fpr.init(config, jax.random.key(0), batch)
    state = fpr.apply(config, params, batch, train=True, max_steps=1).state
    start, unravel = ravel_pytree(state[0].z)

    def after(params, flat, method):
        def run(module, z):
            layer = module.layers[0]
            return getattr(layer, method)(layer.inject(module.embed(batch)), z)

        return ravel_pytree(model.apply({"params": params}, unravel(flat), method=run))[0]

    def exact(params):
        return jnp.mean(jax.jacrev(after, 1)(params, start, "differentiable_step") ** 2)

    def finite(params, step=1e-3):
        def value(flat):
            return after(params, flat, "step")

        return jnp.mean(
            ((jax.vmap(value)(start + step * jnp.eye(start.size)) - value(start)) / step) ** 2
        )

    found, limit = (jax.jit(jax.value_and_grad(form))(params) for form in (exact, finite))
    assert found[0] == pytest.approx(float(limit[0]), rel=0.02)
    flat = [np.asarray(ravel_pytree(gradient)[0]) for _, gradient in (found, limit)]
    assert np.linalg.norm(flat[0] - flat[1]) < 0.05 * np.linalg.norm(flat[1])

    # A segment that is differentiated as a whole has the same Jacobian.
    whole = fpr.build(config | {"gradient": "all"})
    values = []
    for m in (model, whole):
        run = functools.partial(m.apply, method="jacobian_norm")
        values.append(jax.jit(run)({"params": params}, batch, state, jax.random.key(1)))
    np.testing.assert_allclose(*values, rtol=1e-3)

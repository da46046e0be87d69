import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments import config, optim
from experiments.errors import UserError

DEFAULTS = config.DEFAULTS["optimizer"]


def rates(steps=100, **change):
    schedule = optim.schedule(DEFAULTS | {"learning_rate": 1.0} | change, steps)
    return np.array([float(schedule(s)) for s in range(steps + 1)])


def test_constant():
    assert (rates() == 1.0).all()


def test_warmup_rises_to_the_peak_and_never_starts_at_zero():
    r = rates(warmup_steps=10)
    np.testing.assert_allclose(r[:10], np.linspace(0.1, 1.0, 10), rtol=1e-6)
    assert (r[10:] == 1.0).all()
    assert rates(warmup_steps=1)[0] == 1.0


@pytest.mark.parametrize("name", ["cosine", "linear"])
def test_decay_ends_at_the_final_fraction(name):
    r = rates(schedule=name, warmup_steps=20, final_fraction=0.1)
    assert r[20] == pytest.approx(1.0)
    assert r[60] == pytest.approx(0.55)
    assert r[100] == pytest.approx(0.1)
    assert (np.diff(r[20:]) <= 0).all()


def test_decay_mask_spares_scales_biases_and_norms():
    params = {
        "layer": {"alpha_1": 0, "kernel": 0, "bias": 0, "RMSNorm_0": {"scale": 0}},
        "embedding": 0,
    }
    assert optim.decay_mask(params) == {
        "layer": {
            "alpha_1": False, "kernel": True, "bias": False, "RMSNorm_0": {"scale": False},
        },
        "embedding": True,
    }  # fmt: skip


def test_decay_mask_spares_state_space_rates_and_constant_starts():
    names = ("A_log", "D", "dt_bias", "omega", "skip", "start")
    mask = optim.decay_mask({"layer_0": dict.fromkeys((*names, "in_proj", "recurrent"), 0)})
    assert [name for name, decays in mask["layer_0"].items() if decays] == ["in_proj", "recurrent"]


def step(gradient, **change):
    """The first update of two parameters, one of them not decayed."""
    optimizer = optim.make_optimizer(DEFAULTS | {"learning_rate": 0.1} | change, 10)
    params = {"kernel": jnp.full(2, 2.0), "bias": jnp.full(2, 2.0)}
    grads = {"kernel": jnp.asarray(gradient), "bias": jnp.zeros(2)}
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    return optax.apply_updates(params, updates)


def test_weight_decay_is_decoupled():
    new = step([0.0, 0.0], weight_decay=0.5)
    np.testing.assert_allclose(new["kernel"], 2.0 - 0.1 * 0.5 * 2.0)
    np.testing.assert_allclose(new["bias"], 2.0)


def test_clipping_acts_on_the_global_norm():
    # A large eps makes Adam's first update nearly proportional to the gradient.
    change = {"eps": 1e4, "learning_rate": 1e2}
    free, clipped = (step([30.0, 40.0], clip_norm=c, **change)["kernel"] for c in (0.0, 5.0))
    np.testing.assert_allclose((2.0 - free) / 10, 2.0 - clipped, rtol=1e-2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schedule": "cosin"}, "did you mean 'cosine'"),
        ({"learning_rate": 0.0}, "optimizer.learning_rate must be positive, got 0.0"),
        ({"b2": 1.0}, r"optimizer.b2 must be in \[0, 1\), got 1.0"),
        ({"weight_decay": -1.0}, "optimizer.weight_decay must not be negative, got -1.0"),
    ],
)
def test_bad_values(change, message):
    with pytest.raises(UserError, match=message):
        optim.validate(DEFAULTS | change)


def puzzle_optimizer(**change):
    options = {"puzzle_learning_rate": 0.5, "puzzle_weight_decay": 0.1, "warmup_steps": 2}
    return optim.make_optimizer(DEFAULTS | options | change, 10)


def test_sign_sgd_moves_the_rows_in_the_batch_and_no_other():
    rng = np.random.default_rng(0)
    table = rng.normal(size=(6, 3)).astype(np.float32)
    table[0] = [0.0, -0.0, 1e-37]  # zeros of either sign
    params = {"puzzle_embedding": jnp.asarray(table), "kernel": jnp.ones((2, 2))}
    optimizer = puzzle_optimizer()
    state = optimizer.init(params)
    expected = table.astype(np.float64)
    for step, rows in enumerate(([4, 1, 4], [1, 1, 5])):
        # Gradients of rows that are not in the batch do not exist; if they did, they are ignored.
        grads = {"puzzle_embedding": rng.normal(size=(6, 3)), "kernel": np.ones((2, 2))}
        grads["puzzle_embedding"][1] = 0.0
        grads = {k: jnp.asarray(v, jnp.float32) for k, v in grads.items()}
        updates, state = optimizer.update(grads, state, params, rows=jnp.asarray(rows))
        params = optax.apply_updates(params, updates)
        rate = 0.5 * (step + 1) / 2  # warm-up
        for row in set(rows):
            for i in range(3):
                sign = np.sign(float(grads["puzzle_embedding"][row, i]))
                expected[row, i] -= rate * (sign + 0.1 * expected[row, i])
    new = np.asarray(params["puzzle_embedding"])
    np.testing.assert_allclose(new, expected, rtol=1e-6, atol=1e-6)
    assert (new[[0, 2, 3]].view(np.uint32) == table[[0, 2, 3]].view(np.uint32)).all()
    assert not np.array_equal(new[1], table[1]), "a row without a gradient decays all the same"
    assert not np.array_equal(params["kernel"], np.ones((2, 2)))


def test_puzzle_embeddings_have_no_adam_state_and_do_not_enter_the_clipped_norm():
    params = {"puzzle_embedding": jnp.zeros((50, 4)), "kernel": jnp.zeros((2, 2))}
    rows, optimizer = jnp.arange(2), puzzle_optimizer(clip_norm=1.0, eps=1e3, learning_rate=1.0)
    state = optimizer.init(params)
    assert all(leaf.size <= 4 for leaf in jax.tree.leaves(state))
    changes = []
    for size in (0.0, 1e6):
        grads = {"puzzle_embedding": jnp.full((50, 4), size), "kernel": jnp.full((2, 2), 0.1)}
        changes.append(optimizer.update(grads, state, params, rows=rows)[0]["kernel"])
    np.testing.assert_array_equal(*changes)

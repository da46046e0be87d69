import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fpr
from experiments import flops

SIZES = {"vocab_size": 11, "seq_len": 9, "hidden_size": 32, "num_heads": 4, "expansion": 1.0}


def count(name, **options):
    model = {"name": name, **SIZES, **options}
    batch = {"tokens": jax.ShapeDtypeStruct((5, SIZES["seq_len"]), np.int32)}
    params = jax.eval_shape(lambda: fpr.init(model, jax.random.key(0)))
    return flops.count(model, params, batch)


def block(t=9, d=32, inner=256):
    """Multiplications and additions of the matrix products of one Transformer block."""
    return 2 * t * (4 * d * d + 2 * t * d + 3 * d * inner)


def test_an_application_costs_its_matrix_products_and_a_little_more():
    found = count("fprm", num_layers=2)
    (application,) = found.application
    assert 2 * block() < application < 2.1 * 2 * block()
    assert found.ends < 0.2 * application


def test_scans_are_counted_with_their_length():
    (application,) = count("trm", num_layers=1, l_cycles=5, h_cycles=4).application
    assert 24 * block() < application < 1.15 * 24 * block()
    found = flops._flops(
        lambda w, z: jax.lax.scan(
            lambda z, _: (jax.lax.scan(lambda z, _: (z @ w, None), z, None, length=5)[0], None),
            z, None, length=3,
        )[0],
        jnp.ones((8, 8)), jnp.ones((2, 8)),
    )  # fmt: skip
    assert found == pytest.approx(3 * 5 * 2 * 2 * 8 * 8, rel=0.05)


def test_a_scan_of_no_length_counts_nothing():
    (application,) = count("trm", num_layers=1, l_cycles=5, h_cycles=1).application
    assert 6 * block() < application < 1.15 * 6 * block()


def test_a_model_without_a_loop_is_all_ends():
    found = count("transformer", num_layers=3)
    assert found.application == ()
    assert 3 * block() < found.ends < 1.1 * 3 * block()
    assert found.of(np.zeros((4, 0))).tolist() == [found.ends] * 4


def test_layers_are_counted_with_their_own_steps():
    found = flops.Flops(ends=10.0, application=(2.0, 3.0))
    assert found.of(np.array([[1, 1], [4, 0]])).tolist() == [15.0, 18.0]

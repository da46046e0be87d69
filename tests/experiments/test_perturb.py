import jax
import numpy as np
import pytest

from experiments import config as configs
from experiments import perturb
from experiments.errors import UserError
from tests.experiments.conftest import tiny


def caps(name, mean=4.0, most=1000, count=4000):
    keys = jax.random.split(jax.random.key(0), count)
    return np.asarray(perturb.random_caps({"distribution": name, "mean": mean}, keys, most))


def test_caps_have_the_mean_and_spread_of_their_distribution():
    gamma, exponential = caps("gamma"), caps("exponential")
    # Γ(4, 1) has variance 4, the exponential distribution of mean 4 has 16; draws below 1 become 1.
    assert gamma.mean() == pytest.approx(4.0, abs=0.15)
    assert gamma.var() == pytest.approx(4.0, rel=0.15)
    assert exponential.mean() == pytest.approx(4.1, abs=0.25)
    assert exponential.var() == pytest.approx(16.0, rel=0.2)
    assert gamma.min() == exponential.min() == 1


def test_caps_stay_below_the_solvers_own():
    assert caps("gamma", most=3).max() == 3
    assert perturb.random_caps({"distribution": "none", "mean": 4.0}, None, 3) is None


def test_weight_dropout_zeroes_entries_of_the_loops_matrices_only():
    ones = np.ones((40, 50), np.float32)
    params = {
        "layers_0": {"qkv": {"kernel": ones}, "alpha_1": ones[0], "norm": ones, "out": ones},
        "lm_head": {"kernel": ones},
    }
    new = perturb.drop_weights(params, 0.25, jax.random.key(0))
    first, second = np.asarray(new["layers_0"]["qkv"]["kernel"]), np.asarray(new["layers_0"]["out"])
    for dropped in (first, second):
        np.testing.assert_allclose(np.unique(dropped), [0.0, 1 / 0.75])
        assert (dropped == 0).mean() == pytest.approx(0.25, abs=0.03)
    assert not np.array_equal(first, second)
    for name in ("alpha_1", "norm"):
        np.testing.assert_array_equal(new["layers_0"][name], params["layers_0"][name])
    np.testing.assert_array_equal(new["lm_head"]["kernel"], ones)
    assert perturb.drop_weights(params, 0.0, jax.random.key(0)) is params


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"train__random_cap__distribution": "gama"},
            "unknown train.random_cap.distribution 'gama'; did you mean 'gamma'",
        ),
        ({"train__random_cap__mean": 0.0}, "train.random_cap.mean must be positive, got 0.0"),
        (
            {
                "train__random_cap__distribution": "gamma",
                "model__adjoint": {"name": "unrolled"},
            },
            "which the adjoint 'unrolled' cannot",
        ),
        ({"train__weight_dropout": 1.0}, r"train.weight_dropout must be in \[0, 1\), got 1.0"),
        ({"train__jacobian__step": -1.0}, "train.jacobian.step must not be negative, got -1.0"),
        ({"model__dropout": 1.0}, "model.dropout=1.0, allowed: 0 <= dropout < 1"),
        ({"model__solver__train__noise": -1.0}, "noise=-1.0, allowed: noise >= 0"),
        ({"train__accumulate": 4}, "train.accumulate=4 does not divide train.batch_size=6"),
        ({"train__prefetch": -1}, r"train.prefetch must be 0 \(off\) or positive, got -1"),
        ({"optimizer__puzzle_learning_rate": 0.1}, "needs model.num_puzzles > 0"),
    ],
)
def test_bad_values(change, message):
    with pytest.raises(UserError, match=message):
        configs.validate(tiny(**change))

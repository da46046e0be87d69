import numpy as np

from experiments import result


def test_residual_scales_of_the_channels():
    model = {"residual_scale": "input_independent", "alpha_1": 0.75, "alpha_2": 0.25}
    layer = {"alpha_1": np.array([0.0, np.log(3.0)]), "alpha_2": np.zeros(2), "kernel": np.ones(2)}
    found = result.residual_scales(model, {"layers_0": layer})
    assert found.keys() == {"alpha_1", "alpha_2"}
    start, trained = found["alpha_1"]
    assert start == 0.75
    np.testing.assert_allclose(trained, [0.5, 0.75], rtol=1e-6)
    assert result.residual_scales({"residual_scale": "none"}, {"layers_0": layer}) == {}
    assert result.residual_scales({"name": "lstm"}, {"layer_0": {"kernel": np.ones(2)}}) == {}

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fpr
from experiments import result, tasks
from experiments.evaluate import Evaluator
from experiments.steps import TrainState


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


@pytest.mark.usefixtures("fast_compile")
def test_act_at_inference_is_told_and_kept(make_run):
    task = tasks.options("sudoku") | {"path": "sudoku4"}
    run = make_run(
        task=task, model__name="trm", model__vocab_size=6, model__seq_len=16, model__z0="fixed",
        model__l_cycles=1, model__h_cycles=1, model__causal=False,
        model__solver__eval__halting="never", model__solver__eval__max_steps=5, q_loss_weight=0.5,
        eval__lengths=(16,), eval__max_examples=5, eval__batch_size=5,
    )  # fmt: skip
    params = fpr.init(run.config["model"], jax.random.key(0))
    params["q_head"]["bias"] = jnp.ones_like(params["q_head"]["bias"])  # all end at once
    state = TrainState(jnp.zeros((), jnp.int32), params, None, None, None)
    result.finish(run, state, Evaluator(run)(params), [], result.Origin(None))
    content = json.loads((run.path / "result.json").read_text())
    assert content["effective_layers_mean"] == {"16": 10.0}
    act = content["act"]["16"]
    assert (act["effective_layers_mean"], act["halted"]) == (2.0, 1.0)
    assert act["flops_per_example_mean"] < content["flops_per_example_mean"]["16"]
    assert content["budget"]["16"]["act"]["effective_layers_mean"] == 2.0
    assert content["budget"]["16"]["flops"][4] == content["flops_per_example_mean"]["16"]
    assert "act" in content["metrics"]
    printed = run.printed()
    assert "length 16: an example takes 10.0 effective layers and" in printed
    assert "ended by the Q head (ACT at inference), an example takes 2.0 effective" in printed

"""The road: layers with and without a loop, states and traces, and config sections."""

from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fpr import adjoints, solvers
from fpr.models import base
from fpr.models.fprm import FPRMConfig
from fpr.solvers import Damped

D = 4
TEXT: Any = "fprm"  # Where a mapping is due.
BATCH = {"tokens": jnp.array([[1, 2, 3], [3, 2, 1]])}
SOLVER = Damped(tolerance=1e-4, max_steps=50)


class Loop(base.Layer):
    """z = tanh(a z + x)."""

    gain: float = 0.3

    def setup(self):
        self.weight = self.param("weight", nn.initializers.constant(self.gain), (D,))

    def inject(self, h):
        return {"x": h}

    def init_state(self, x, key):
        zeros = jnp.zeros_like(x["x"])
        return zeros if key is None else zeros + jax.random.normal(key, zeros.shape)

    def step(self, x, z):
        return jnp.tanh(self.weight * z + x["x"])

    def readout(self, h, x, z):
        return h + z


class Once(Loop):
    """The same without a loop."""

    loop: ClassVar[bool] = False


class Net(base.Model):
    """`config` is the tuple of its layers' classes."""

    def setup(self):
        self.embedding = self.param("embedding", nn.initializers.normal(1.0), (5, D))
        self.layers = [cls() for cls in self.config]

    def embed(self, batch):
        return self.embedding[batch["tokens"]]

    def head(self, h):
        return h, None


def run(*kinds, key=None, state=None, max_steps=None, solver=SOLVER, adjoint=adjoints.Implicit()):
    model = Net(kinds)
    variables = model.init(jax.random.key(0), BATCH, solver=solver, adjoint=adjoint)
    return model, variables, model.apply(
        variables, BATCH, solver=solver, adjoint=adjoint, key=key, state=state, max_steps=max_steps
    )  # fmt: skip


def test_a_model_without_a_loop_reports_one_step():
    _, variables, out = run(Once)
    np.testing.assert_array_equal(out.steps, [1, 1])
    np.testing.assert_array_equal(out.residual, [0.0, 0.0])
    assert out.converged.all()
    assert out.layer_steps.shape == (2, 0)
    assert out.state == ()
    h = variables["params"]["embedding"][BATCH["tokens"]]
    np.testing.assert_allclose(out.logits, h + np.tanh(h), rtol=1e-6)


def test_layers_in_sequence_and_their_account():
    model, variables, out = run(Loop, Once, Loop)
    assert out.layer_steps.shape == (2, 2)
    np.testing.assert_array_equal(out.steps, out.layer_steps.sum(1))
    assert len(out.state) == 2
    assert out.converged.all()
    np.testing.assert_array_equal(
        out.residual, jnp.maximum(out.state[0].residual, out.state[1].residual)
    )
    h = np.asarray(variables["params"]["embedding"][BATCH["tokens"]], np.float64)
    for loop in (True, False, True):
        z = np.zeros_like(h)
        for _ in range(200 if loop else 1):
            z = np.tanh(0.3 * z + h)
        h = h + z
    np.testing.assert_allclose(out.logits, h, atol=1e-3)
    # The parameters of f get their gradient.
    grads = jax.grad(
        lambda v: model.apply(v, BATCH, solver=SOLVER, adjoint=adjoints.OneStep()).logits.sum()
    )(variables)["params"]
    for i in (0, 2):  # The layer in between applies f once, at z = 0: no gradient to its gain.
        assert np.abs(grads[f"layers_{i}"]["weight"]).min() > 0


def test_states_go_on_and_must_fit():
    _, _, first = run(Loop, Loop, max_steps=2)
    _, _, rest = run(Loop, Loop, state=first.state, max_steps=1)
    np.testing.assert_array_equal(rest.layer_steps, 3)
    with pytest.raises(ValueError, match="state holds 1 solver states, the model has 2 loops"):
        run(Loop, Loop, state=first.state[:1])


def test_layers_draw_from_different_keys():
    _, _, out = run(Loop, Loop, key=jax.random.key(1), max_steps=0)
    assert not np.allclose(out.state[0].z, out.state[1].z)


def test_trace_layer_follows_the_first_loop():
    model, variables, out = run(Once, Loop)
    path = model.apply(variables, BATCH, solver=SOLVER, steps=30, method="trace_layer")
    np.testing.assert_array_equal(path.active.sum(0), out.steps)
    np.testing.assert_allclose(path.value[-1], out.state[0].z, atol=1e-6)
    model, variables, _ = run(Once)
    with pytest.raises(ValueError, match="Net has no loop to trace"):
        model.apply(variables, BATCH, solver=SOLVER, steps=3, method="trace_layer")


def test_a_layer_that_lacks_a_method_says_which():
    class Bare(base.Layer):
        pass

    for name, args in (("inject", (0,)), ("init_state", (0, None)), ("step", (0, 0)),
                       ("readout", (0, 0, 0))):  # fmt: skip
        with pytest.raises(TypeError, match=f"Bare does not define {name}"):
            Bare().apply({}, *args, method=name)


def test_nearest_names():
    assert (
        base.nearest("alpha1", ["alpha_1", "b"]) == "; did you mean 'alpha_1'? Allowed: alpha_1, b"
    )
    assert base.nearest("zzz", ["b", "a"]) == "; allowed: a, b"


def test_options_are_parsed_and_typed():
    config = base.parse_options(
        FPRMConfig, {"vocab_size": 5, "seq_len": 4, "alpha_1": 0.5}, "model"
    )
    assert config.alpha_1 == 0.5
    assert isinstance(
        base.parse_options(
            FPRMConfig, {"vocab_size": 5, "seq_len": 4, "expansion": 2}, "m"
        ).expansion,
        float,
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: base.parse_options(FPRMConfig, {"vocab_size": 5}, "model"), "model lacks seq_len"),
        (lambda: base.parse_options(FPRMConfig, {"num_head": 5}, "model"),
         "unknown key 'num_head' in model; did you mean 'num_heads'"),
        (lambda: base.parse_options(FPRMConfig, {"vocab_size": "5"}, "model"),
         "model.vocab_size='5', allowed: a value of type int"),
        (lambda: base.parse_options(FPRMConfig, {"vocab_size": True}, "model"),
         "model.vocab_size=True"),
        (lambda: base.parse_options(FPRMConfig, TEXT, "model"),
         "model='fprm', allowed: a mapping"),
        (lambda: base.make_solver({"evl": {}}, True), "'evl' in model.solver; did you mean 'eval'"),
        (lambda: base.make_solver({"preset": "fprn"}, True), "unknown solver preset 'fprn'"),
        (lambda: base.make_solver(TEXT, True), "model.solver='fprm', allowed: a mapping"),
        (lambda: base.make_solver({"train": 3}, True), "model.solver.train=3, allowed: a mapping"),
        (lambda: base.make_solver({"train": {"paticence": 3}}, True),
         "'paticence' in model.solver.train; did you mean 'patience'"),
        (lambda: base.make_solver({"train": {"patience": 0}}, True), "patience=0, allowed"),
        (lambda: base.make_adjoint(TEXT), "model.adjoint='fprm', allowed: a mapping"),
        (lambda: base.make_adjoint({"name": "onestep"}),
         "model.adjoint.name 'onestep'; did you mean 'one_step'"),
        (lambda: base.make_adjoint({"name": "neumann", "kk": 3}),
         "'kk' in model.adjoint; did you mean 'k'"),
        (lambda: base.make_adjoint({"name": "one_step", "k": 0}), "OneStep: k=0, allowed"),
        (lambda: base.dtype_of("half"), "model.dtype='half', allowed: float32, bfloat16"),
    ],
)  # fmt: skip
def test_bad_sections(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_sections_build_what_they_say():
    options = {"preset": "fp_mamba", "train": {"max_steps": 7}, "eval": {"tolerance": 1}}
    train, evaluation = base.make_solver(options, True), base.make_solver(options, False)
    assert (train.max_steps, train.stop_fraction, train.tolerance) == (7, 0.75, 0.1)
    assert (evaluation.max_steps, evaluation.tolerance) == (1000, 1.0)
    assert base.make_solver({}, True) == solvers.preset("fprm", train=True)
    assert base.make_adjoint({}) == adjoints.OneStep()
    assert base.make_adjoint({"name": "one_step", "k": 4, "refine": True}) == adjoints.OneStep(
        4, True
    )
    assert base.make_adjoint({"name": "neumann", "k": 2}) == adjoints.Neumann(2)
    assert base.make_adjoint({"name": "implicit", "tolerance": 1e-3}) == adjoints.Implicit(1e-3)
    assert base.make_adjoint({"name": "unrolled"}) == adjoints.Unrolled()

"""Sequential decoding: every recurrent model token by token, in pieces and at once, and generate.

Fixed-point models are solved to 1e-6 with weights that make their maps contract.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fpr
from fpr.solvers import Damped
from tests.models.checks import KEY, spread

T, PIECE = 37, 17  # Longer than every chunk below (4, and 32 in the selective scan), and odd.
TOKENS = jax.random.randint(jax.random.key(3), (2, T), 1, 5)
SOLVER = Damped(tolerance=1e-6, max_steps=2000)
SIZES = {"vocab_size": 5, "seq_len": T, "hidden_size": 8, "num_layers": 1}
RNN = {"name": "fp_rnn", **SIZES, "mixer_scale": 1}
MAMBA = {"name": "fp_mamba", **SIZES, "mixer_scale": 1, "state_size": 3}
MAMBA2 = {"name": "fp_mamba2", **SIZES, "mixer_scale": 1, "state_size": 3, "head_dim": 4,
          "chunk_size": 4}  # fmt: skip
DELTA = {"name": "deltanet", **SIZES, "num_heads": 2, "chunk_size": 4}
LSTM = {"name": "lstm", **SIZES}
WIDE = LSTM | {"hidden_size": 16}
TRANSFORMER = {"name": "transformer", **SIZES, "num_layers": 2, "num_heads": 2, "expansion": 0.5}
ALL = ("lambda", "Q", "b", "c")
LOOPED = {
    "fp_rnn": RNN | {"num_layers": 2},
    "fp_rnn symmetric kronecker no conv":
        RNN | {"conv": False, "mixer": "kronecker", "mixer_arg": "symmetric"},
    "fp_rnn x monarch": RNN | {"mixer_arg": "x", "mixer": "monarch", "mixer_rank": 4},
    "fp_mamba": MAMBA,
    "fp_mamba v1 all symmetric":
        MAMBA | {"hidden_dependence": ALL, "mixer_arg": "symmetric", "decay": "v1"},
    "fp_mamba glu no conv":
        MAMBA | {"hidden_dependence": ("b",), "glu_in_loop": True, "conv": False},
    "fp_mamba none": MAMBA | {"hidden_dependence": (), "bc_norm": False, "conv_kernel": 1},
    "fp_mamba2": MAMBA2,
    "fp_mamba2 lambda groups":
        MAMBA2 | {"hidden_dependence": ("lambda", "c"), "num_groups": 2, "conv": False},
}  # fmt: skip
PLAIN = {
    "mamba": {"name": "mamba", **SIZES, "state_size": 3, "num_layers": 2},
    "mamba no conv": {"name": "mamba", **SIZES, "state_size": 3, "conv": False},
    "mamba2": {"name": "mamba2", **SIZES, "state_size": 3, "head_dim": 4, "chunk_size": 4},
    "lstm": LSTM,
    "deltanet no conv": DELTA | {"conv": False},
    "gated deltanet": DELTA | {"decay": True, "output_gate": True, "expand_v": 2},
    "gated deltaproduct": DELTA | {"decay": True, "num_householder": 2, "head_dim": 3,
                                   "negative_eigenvalues": True},
    "mlstm": {"name": "mlstm", **SIZES, "num_heads": 2, "chunk_size": 4},
    "slstm": {"name": "slstm", **SIZES, "num_heads": 2},
    "transformer rope": TRANSFORMER,
    "transformer nope": TRANSFORMER | {"rope": False, "norm_type": "post",
                                       "norm_placement": "none"},
}  # fmt: skip
CONFIGS = LOOPED | PLAIN
# Variants whose parts the others cover one by one.
SLOW = (
    "fp_rnn x monarch", "fp_mamba v1 all symmetric", "fp_mamba glu no conv", "fp_mamba none",
    "fp_mamba2 lambda groups",
    "mamba no conv", "deltanet no conv", "gated deltanet", "transformer nope",
)  # fmt: skip
EVERY = [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in CONFIGS]


def compiled(function, config, **options):
    """One of the public functions with a config and options bound, compiled."""
    return jax.jit(functools.partial(function, config, **options))


pytestmark = pytest.mark.usefixtures("fast_compile")


def contracting(config):
    """Fresh parameters with I - Q small where the model has one, noisy ones elsewhere."""
    params = fpr.init(config, KEY)
    if config["name"] not in ("fp_rnn", "fp_mamba", "fp_mamba2"):
        return spread(params, 0.2)

    def small(path, leaf):
        name = jax.tree_util.keystr(path)
        return jnp.full_like(leaf, -3.0) if "mixer" in name and "bias" in name else leaf

    return jax.tree_util.tree_map_with_path(small, params)


@functools.cache
def parallel(name):
    """Parameters of a config, and its parallel forward of (2, T) tokens, compiled."""
    apply = compiled(fpr.apply, CONFIGS[name], solver=SOLVER)
    return contracting(CONFIGS[name]), apply


@pytest.mark.parametrize("name", EVERY)
def test_sequential_equals_parallel(name):
    """At once, token by token and in pieces that no chunk length divides: the same logits."""
    config = CONFIGS[name]
    params, apply = parallel(name)
    whole = apply(params, {"tokens": TOKENS})
    assert whole.converged.all()
    read = compiled(fpr.prefill, config, solver=SOLVER)
    ways = {
        "token by token": [1] * T, "prompt": [PIECE] + [1] * (T - PIECE),
        "pieces": [1, PIECE, 1, 1, PIECE],
    }  # fmt: skip
    for way, sizes in ways.items():
        cache, logits, at = fpr.init_cache(config, params, 2), [], 0
        for size in sizes:
            out, cache = read(params, TOKENS[:, at : at + size], cache)
            assert out.converged.all()
            logits.append(out.logits)
            at += size
        np.testing.assert_allclose(
            jnp.concatenate(logits, axis=1), whole.logits, atol=2e-5, err_msg=way
        )


@pytest.mark.parametrize("name", EVERY)
def test_padding_at_the_end_changes_nothing(name):
    """Mixed lengths in one batch: neither the padded row nor its neighbour changes."""
    params, apply = parallel(name)
    whole = apply(params, {"tokens": TOKENS}).logits
    mixed = apply(params, {"tokens": TOKENS.at[1, PIECE:].set(0)}).logits
    np.testing.assert_allclose(mixed[0], whole[0], atol=1e-6)
    np.testing.assert_allclose(mixed[1, :PIECE], whole[1, :PIECE], atol=2e-5)
    assert np.abs(mixed[1, PIECE:] - whole[1, PIECE:]).max() > 1e-3


@pytest.mark.parametrize("name", EVERY)
def test_cache_keeps_its_shapes(name):
    """A decoding loop carries the cache: structure, shapes and types stay, in bfloat16 too."""
    config = CONFIGS[name] | {"dtype": "bfloat16"}

    def run(params):
        cache = fpr.init_cache(config, params, 2)
        _, after = fpr.prefill(config, params, TOKENS[:, :3], cache)
        out, last = fpr.decode(config, params, TOKENS[:, 3], after)
        return cache, after, last, out

    params = jax.eval_shape(functools.partial(fpr.init, config), KEY)
    cache, after, last, out = jax.eval_shape(run, params)
    assert cache == after == last
    assert {leaf.shape[0] for leaf in jax.tree.leaves(cache)} == {2}
    assert out.logits.shape == (2, 5)
    assert out.steps.shape == out.residual.shape == out.converged.shape == (2,)


@pytest.mark.slow
def test_a_token_alone_solves_the_parallel_map():
    """Where the map has several fixed points, the sequential one is one of them."""
    params = spread(fpr.init(MAMBA, KEY), 0.05)
    tokens = TOKENS[:, :11]
    read = compiled(fpr.decode, MAMBA, solver=SOLVER)
    cache, solutions = fpr.init_cache(MAMBA, params, 2), []
    for t in range(11):
        out, cache = read(params, tokens[:, t], cache)
        assert out.converged.all()
        solutions.append(out.state[0].z[:, 0])
    z = jnp.stack(solutions, axis=1)
    apply = compiled(fpr.apply, MAMBA, solver=SOLVER)
    start = apply(params, {"tokens": tokens}, max_steps=0).state[0]
    there = apply(params, {"tokens": tokens}, state=(start._replace(z=z),), max_steps=1)
    assert there.residual.max() < 1e-5


def test_sequential_difference():
    """Zero where both ways converge; with one step they differ by what one step misses."""
    params = contracting(RNN)
    run = compiled(fpr.sequential_difference, RNN, solver=SOLVER)
    assert run(params, {"tokens": TOKENS[:, :9]}, max_steps=500).max() < 1e-5
    apart = run(params, {"tokens": TOKENS[:, :9]}, max_steps=1)
    assert apart.shape == (2,)
    read = compiled(fpr.prefill, RNN, max_steps=1)
    parallel = read(params, TOKENS[:, :9])[0].state[0].z
    cache, rows = fpr.init_cache(RNN, params, 2), []
    for t in range(9):
        out, cache = read(params, TOKENS[:, t : t + 1], cache)
        rows.append(out.state[0].z)
    change = np.linalg.norm(jnp.concatenate(rows, 1) - parallel, axis=(1, 2))
    expected = change / np.linalg.norm(parallel, axis=(1, 2))
    assert expected.min() > 1e-3
    np.testing.assert_allclose(apart, expected, rtol=1e-4)


def test_each_token_reports_its_own_solve():
    params = contracting(RNN)
    cache = fpr.init_cache(RNN, params, 2)
    out, _ = compiled(fpr.decode, RNN, solver=SOLVER, max_steps=2)(params, TOKENS[:, 0], cache)
    assert out.steps.tolist() == [2, 2]
    assert not out.converged.any()
    assert (out.residual > 1e-6).all()


@pytest.fixture(scope="module")
def lstm():
    params = spread(fpr.init(LSTM, KEY), 1.0)
    return params, compiled(fpr.generate, LSTM, num_tokens=6)


@functools.cache
def lstm_apply():
    """The parallel forward."""
    return compiled(fpr.apply, LSTM)


def greedy(params, prompt, count):
    """The definition: the parallel forward of everything so far, for one prompt."""
    tokens, apply = list(prompt), lstm_apply()
    for _ in range(count):
        padded = jnp.zeros((1, 12), jnp.int32).at[0, : len(tokens)].set(jnp.array(tokens))
        logits = apply(params, {"tokens": padded}).logits
        tokens.append(int(logits[0, len(tokens) - 1].argmax()))
    return tokens


def test_generate_is_greedy_and_takes_mixed_lengths(lstm):
    params, run = lstm
    prompt = jnp.array([[1, 2, 3, 4], [4, 3, 2, 2], [2, 2, 1, 3]])
    whole = run(params, prompt)
    assert whole.tokens.tolist() == [greedy(params, row, 6) for row in prompt.tolist()]
    assert whole.steps.shape == whole.residual.shape == whole.converged.shape == (3, 6)
    lengths = jnp.array([4, 1, 2])
    mixed = run(params, prompt, prompt_lengths=lengths)
    for row, tokens, n in zip(mixed.tokens.tolist(), prompt.tolist(), lengths.tolist()):
        expected = greedy(params, tokens[:n], 6)
        assert row == expected + [0] * (10 - len(expected))
    one = compiled(fpr.generate, LSTM, num_tokens=1)(params, prompt[:, :1])
    assert one.tokens.tolist() == [greedy(params, row[:1], 1) for row in prompt.tolist()]
    beyond = jnp.where(jnp.arange(4) < lengths[:, None], prompt, -1)  # ignored, so not checked
    none = fpr.generate(LSTM, params, beyond, 0, prompt_lengths=lengths)
    assert none.tokens.tolist() == [[1, 2, 3, 4], [4, 0, 0, 0], [2, 2, 0, 0]]
    assert none.steps.shape == (3, 0)


def test_sampling_goes_by_row(lstm):
    params, run = lstm
    prompt = jnp.array([[1, 2], [1, 2], [4, 3]])
    sample = compiled(fpr.generate, LSTM, num_tokens=6, temperature=2.0)
    a = sample(params, prompt, key=KEY).tokens
    np.testing.assert_array_equal(sample(params, prompt[:2], key=KEY).tokens, a[:2])
    assert (a[0] != a[1]).any()  # Equal prompts draw differently
    assert (sample(params, prompt, key=jax.random.key(1)).tokens != a).any()
    cold = compiled(fpr.generate, LSTM, num_tokens=6, temperature=1e-6)(params, prompt, key=KEY)
    np.testing.assert_array_equal(cold.tokens, run(params, prompt).tokens)


def test_solves_are_counted_for_the_token_they_lead_to():
    """Mixed lengths: the prompt's solves count for the first new token, later ones one each."""
    params = contracting(RNN)
    prompt, lengths = TOKENS[:, :3], jnp.array([3, 1])
    out = compiled(fpr.generate, RNN, num_tokens=2, solver=SOLVER)(
        params, prompt, prompt_lengths=lengths
    )
    cache, steps = fpr.init_cache(RNN, params, 2), []
    read = compiled(fpr.decode, RNN, solver=SOLVER)
    rows = jnp.stack([out.tokens[0, :4], jnp.pad(out.tokens[1, :2], (0, 2))])
    for t in range(4):
        step, cache = read(params, rows[:, t], cache)
        steps.append(step.steps)
    steps = np.stack(steps, axis=1)
    assert out.steps[0].tolist() == [steps[0, :3].sum(), steps[0, 3]]
    assert out.steps[1].tolist() == [steps[1, 0], steps[1, 1]]
    assert out.converged.all()
    hasty = Damped(tolerance=1e-6, max_steps=2)
    rushed = compiled(fpr.generate, RNN, num_tokens=2, solver=hasty)(params, prompt)
    assert not rushed.converged.any()
    assert rushed.steps.tolist() == [[2, 2], [2, 2]]


def test_transformer_cache_has_an_end():
    params = fpr.init(TRANSFORMER, KEY)
    cache = fpr.init_cache(TRANSFORMER, params, 2)
    _, cache = compiled(fpr.prefill, TRANSFORMER)(params, TOKENS, cache)
    with pytest.raises(ValueError, match=r"38 tokens do not fit .* model.seq_len=37"):
        fpr.decode(TRANSFORMER, params, TOKENS[:, 0], cache)
    out, _ = compiled(fpr.decode, TRANSFORMER)(params, TOKENS[:, 0], cache)
    assert jnp.isnan(out.logits).all()  # Compiled code cannot raise: it must not look right.
    with pytest.raises(ValueError, match="39 tokens do not fit"):
        fpr.generate(TRANSFORMER, params, TOKENS[:, :30], 10)
    longest = jax.eval_shape(lambda p: fpr.generate(TRANSFORMER, p, TOKENS[:, :36], 2), params)
    assert longest.tokens.shape == (2, 38)


@pytest.mark.parametrize("name", ["fprm", "trm", "hrm", "looped_transformer"])
def test_models_that_read_all_at_once_are_refused(name):
    config = {"name": name, "vocab_size": 5, "seq_len": 4, "hidden_size": 8, "num_heads": 2}
    params = jax.eval_shape(functools.partial(fpr.init, config), KEY)
    with pytest.raises(ValueError, match="reads its whole input at once: it cannot decode"):
        jax.eval_shape(lambda p: fpr.init_cache(config, p, 2), params)
    with pytest.raises(ValueError, match="reads its whole input at once: it cannot decode"):
        jax.eval_shape(lambda p: fpr.generate(config, p, TOKENS[:, :2], 2), params)


def empty_cache(config):
    """The cache of another model, for two sequences."""
    return fpr.init_cache(config, fpr.init(config, KEY), 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: fpr.init_cache(LSTM, p, 0), "batch_size=0, allowed: a whole number >= 1"),
        (lambda p: fpr.decode(LSTM, p, TOKENS, None), r"shape \(2, 37\), allowed: \(B,\)"),
        (lambda p: fpr.prefill(LSTM, p, TOKENS[:, :0]), "B, T >= 1"),
        (lambda p: fpr.prefill(LSTM, p, TOKENS - 2), "the id -1, allowed: 0 to 4"),
        (lambda p: fpr.prefill(LSTM, p, np.array([[2**32 + 1]])), "the id 4294967297, allowed"),
        (lambda p: fpr.decode(LSTM, p, jnp.array([1, 5]), None), "the id 5, allowed: 0 to 4"),
        (lambda p: fpr.generate(LSTM, p, TOKENS + 1, 1), "the id 5, allowed: 0 to 4"),
        (lambda p: fpr.generate(LSTM, p, np.array([[2**32]]), 1), "the id 4294967296, allowed"),
        (
            lambda p: fpr.generate(LSTM, p, TOKENS + 9, 1, prompt_lengths=np.array([1, 1])),
            "the id 1., allowed: 0 to 4",
        ),
        (
            lambda p: fpr.prefill(LSTM, p, TOKENS, fpr.init_cache(LSTM, p, 3)),
            r"cache\[0\].* has shape \(3, .*, allowed: \(2, .* for a batch of 2",
        ),
        (
            lambda p: fpr.decode(LSTM, p, TOKENS[:, 0], empty_cache(WIDE)),
            r"cache\[0\].* has shape \(2, 16\), allowed: \(2, 8\)",
        ),
        (
            lambda p: fpr.prefill(LSTM, p, TOKENS, empty_cache(RNN)),
            "cache has .* arrays in .*, allowed: the cache of .* for a batch of 2",
        ),
        (lambda p: fpr.generate(LSTM, p, TOKENS[:, :0], 1), "B, T >= 1"),
        (lambda p: fpr.generate(LSTM, p, TOKENS, -1), "num_tokens=-1, allowed"),
        (lambda p: fpr.generate(LSTM, p, TOKENS, 1.5), "num_tokens=1.5, allowed"),
        (lambda p: fpr.generate(LSTM, p, TOKENS, 1, temperature=-1.0), "temperature=-1.0"),
        (lambda p: fpr.generate(LSTM, p, TOKENS, 1, temperature=1.0), "give a PRNG key"),
        (
            lambda p: fpr.generate(LSTM, p, TOKENS, 1, prompt_lengths=jnp.array([0, 3])),
            r"prompt_lengths=\[0, 3\], allowed: 1 to 37",
        ),
        (
            lambda p: fpr.generate(LSTM, p, TOKENS, 1, prompt_lengths=jnp.array([3])),
            r"shape \(1,\) and type int32, allowed: whole numbers of shape \(2,\)",
        ),
        (
            lambda p: fpr.generate(TRANSFORMER | {"causal": False}, p, TOKENS, 1),
            "model.causal=False, allowed where tokens are decoded one by one: True",
        ),
        (
            lambda p: fpr.generate(TRANSFORMER | {"num_registers": 2}, p, TOKENS, 1),
            "model.num_registers=2",
        ),
    ],
)  # fmt: skip
def test_bad_input(lstm, call, message):
    with pytest.raises(ValueError, match=message):
        call(lstm[0])

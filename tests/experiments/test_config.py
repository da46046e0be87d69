import json

import pytest

from experiments import config as configs
from experiments import run
from experiments.errors import UserError
from fpr import registry
from tests.experiments.conftest import TINY, tiny


def test_complete_adds_every_key_and_keeps_what_is_set():
    config = tiny()
    assert config["train"]["batch_size"] == 6
    assert config["train"]["regime"] == "solve"
    assert config["task"]["min_length"] == 0
    assert config["model"]["softmax_temp"] == 1.0
    assert config["model"]["solver"]["eval"]["max_steps"] == 8
    assert config["model"]["solver"]["eval"]["decay"] == 0.99
    assert config["model"]["adjoint"] == {"name": "one_step", "k": 1, "refine": False}
    assert configs.complete(config) == config


def test_overrides_that_decide_about_other_keys():
    changed = configs.complete(
        TINY, {"model.solver.preset": "fp_mamba", "model.adjoint.name": "implicit"}
    )
    assert changed["model"]["solver"]["train"]["step_size"] == 0.99
    assert changed["model"]["solver"]["train"]["max_steps"] == 6
    assert {"name", "tolerance", "max_steps"} <= set(changed["model"]["adjoint"])
    assert "k" not in changed["model"]["adjoint"]


def test_a_valid_config_gives_its_task():
    assert configs.validate(tiny()).vocab_size == 7
    assert configs.validate(tiny(train__regime="carry")).length == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"trian": {}}, "unknown config key 'trian'; did you mean 'train'"),
        ({"train": {"stpes": 1}}, "unknown config key 'train.stpes'; did you mean 'train.steps'"),
        (
            {"task": {"name": "word_problm"}},
            "unknown task 'word_problm'; did you mean 'word_problem'",
        ),
        ({"model": {"name": "fprrm"}}, "unknown model.name 'fprrm'; did you mean 'fprm'"),
        ({"model": {}}, "needs a section 'model' with a 'name'"),
    ],
)
def test_unknown_names(change, message):
    with pytest.raises(UserError, match=message):
        configs.complete(TINY | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train__steps": 0}, "train.steps must be at least 1, got 0"),
        ({"train__steps": 1.5}, "train.steps must be of type int, got 1.5"),
        ({"train__steps": True}, "train.steps must be of type int, got True"),
        ({"train__regime": "cary"}, "unknown train.regime 'cary'; did you mean 'carry'"),
        ({"loss": "stable_max"}, "unknown loss 'stable_max'; did you mean 'stablemax'"),
        ({"ema": 1.0}, r"ema must be in \[0, 1\), got 1.0"),
        ({"q_loss_weight": -1.0}, "q_loss_weight must not be negative"),
        ({"seed": -1}, r"seed must be in \[0, 2\*\*63\), got -1"),
        ({"seed": 2**64}, "seed must be in"),
        ({"eval__every": -1}, "eval.every must not be negative, got -1"),
        ({"eval__lengths": ()}, "eval.lengths must be whole numbers of at least 1"),
        ({"eval__lengths": (4, 0)}, "eval.lengths must be whole numbers of at least 1"),
        ({"eval__max_examples": 0}, "eval.max_examples must be at least 1"),
        ({"checkpoint__keep": 0}, "checkpoint.keep must be at least 1"),
        ({"task__length": 0}, "task.length must be at least 1, got 0"),
        ({"task__group": "S4"}, "model.vocab_size is 7, but the task 'word_problem' has 25"),
        ({"model__num_heads": 3}, "model.num_heads=3 does not divide model.hidden_size=8"),
        ({"model__alpha_1": 1.0}, "model.alpha_1=1.0"),
        ({"model__conv": "conv3d"}, "model.conv='conv3d'"),
        ({"model__dtype": "float16"}, "model.dtype='float16', allowed: float32, bfloat16"),
        ({"model__hiden_size": 8}, "'hiden_size'.*did you mean 'hidden_size'"),
        ({"optimizer__schedule": "lin"}, "unknown optimizer.schedule"),
    ],
)
def test_values_that_cannot_work(change, message):
    with pytest.raises(UserError, match=message):
        configs.validate(tiny(**change))


def test_carry_needs_halting_by_sample():
    config = tiny(train__regime="carry")
    config["model"]["solver"]["train"]["halting"] = "batch"
    with pytest.raises(UserError, match="must be 'sample' or 'never', got 'batch'"):
        configs.validate(config)


def test_a_model_that_fixes_the_length_refuses_other_lengths():
    config = tiny(model__mlp_t=True, model__causal=False)
    with pytest.raises(UserError, match=r"length 6, but mlp_t fixes it to model\.seq_len=4"):
        configs.validate(config)


def write(path, body):
    path.write_text(body)
    return str(path)


def test_load_files_and_variants(tmp_path):
    plain = write(tmp_path / "a.py", f"def get_config():\n    return {TINY!r}\n")
    assert configs.load(plain) == tiny()
    variants = write(
        tmp_path / "b.py",
        "from experiments.errors import unknown\n"
        "def get_config(variant='one'):\n"
        f"    if variant not in ('one', 'two'):\n"
        "        raise unknown('variant', variant, ('one', 'two'))\n"
        f"    return {TINY!r} | {{'seed': 1 if variant == 'one' else 2}}\n",
    )
    assert configs.load(variants)["seed"] == 1
    assert configs.load(f"{variants}:two")["seed"] == 2
    with pytest.raises(UserError, match="unknown variant 'twoo'; did you mean 'two'"):
        configs.load(f"{variants}:twoo")
    with pytest.raises(UserError, match="has no variants, so 'two' is none"):
        configs.load(f"{plain}:two")
    with pytest.raises(UserError, match=r"broken\.py cannot be loaded: SyntaxError: "):
        configs.load(write(tmp_path / "broken.py", "def get_config(:\n"))
    with pytest.raises(UserError, match=r"failing\.py cannot be loaded: ZeroDivisionError: "):
        configs.load(write(tmp_path / "failing.py", "def get_config():\n    return 1 / 0\n"))
    with pytest.raises(UserError, match="has no function get_config"):
        configs.load(write(tmp_path / "c.py", "x = 1\n"))


def test_a_missing_file_names_the_nearest_config():
    with pytest.raises(UserError, match=r"did you mean 'experiments/configs/quickstart\.py'"):
        configs.load("experiments/configs/quikstart.py")


def test_overrides_must_exist():
    configs.check_overrides(tiny(), ["train.steps", "model.solver.eval.max_steps"])
    with pytest.raises(UserError, match=r"unknown config key 'train\.step'; did you mean"):
        configs.check_overrides(tiny(), ["train.step"])
    with pytest.raises(UserError, match=r"'model\.solver' is a section"):
        configs.check_overrides(tiny(), ["model.solver"])


def test_every_model_option_can_be_set_on_the_command_line():
    """A default of None would have no type to parse a value with."""
    for name in registry.MODELS:
        defaults = configs._model_defaults(name)
        assert None not in defaults.values(), name
    model = {"name": "fp_mamba", "vocab_size": 7, "seq_len": 4}
    config = configs.complete({"model": model, "task": TINY["task"]})
    flags = ["--config.model.proj_rank=4", "--config.model.hidden_dependence=('lambda','Q')"]
    model = run.apply_overrides(config, flags)["model"]
    assert model["proj_rank"] == 4
    assert model["hidden_dependence"] == ("lambda", "Q")


def test_differences_survive_json_and_name_what_may_change():
    old, new = json.loads(json.dumps(tiny())), tiny()
    assert configs.differences(old, new) == {}
    new = tiny(eval__max_examples=9, seed=5)
    assert configs.differences(old, new) == {"eval.max_examples": (6, 9), "seed": (0, 5)}
    assert configs.is_free("eval.max_examples", new)
    assert configs.is_free("model.solver.eval.max_steps", new)
    assert not configs.is_free("model.solver.train.max_steps", new)
    assert not configs.is_free("seed", new)
    assert configs.is_free("train.steps", new)
    assert not configs.is_free("train.steps", tiny(optimizer__schedule="cosine"))
    assert configs.is_free("task.path", new, "eval")
    assert not configs.is_free("task.path", new)


def test_the_batch_size_is_measured_where_a_batch_halts_as_one():
    for halting, measured in (("sample", False), ("never", False), ("batch", True)):
        config = tiny(model__solver__eval__halting=halting)
        assert configs.is_measured("eval.batch_size", config) == measured
    assert configs.is_measured("eval.max_examples", tiny())
    assert not configs.is_measured("eval.every", tiny())

"""Every config file and variant loads, is valid, and has the size that it states."""

import jax
import pytest

import fpr
from experiments import config as configs
from experiments.configs import bases, maze, state_tracking, sudoku, word_problem
from experiments.errors import UserError
from experiments.tasks import groups

# Of several hundred variants: every model at both sizes, and every kind of change.
WORD_PROBLEM = [
    *(f"{model}_a5" for model in word_problem.PAPER_MODELS),
    *(f"{model}_small_s3" for model in word_problem.SMALL_MODELS),
    *(f"fp_mamba_dplr_s5_{change}" for change in ("cap4", "gamma", "rank4", "long")),
    "mamba_z60_depth2",
    "fp_mamba_small_a4_gamma",
]
FILES = {
    "bases.py": bases.VARIANTS,
    "maze.py": ["cpu"],  # The others read the user's files; below they are only built.
    "quickstart.py": [""],
    "state_tracking.py": state_tracking.VARIANTS,
    "sudoku.py": [v for v in sudoku.VARIANTS if v.startswith("cpu")],
    "word_problem.py": WORD_PROBLEM,
}
ALL = [
    f"{configs.CONFIG_DIR / n}{v and ':' + v}" for n, variants in FILES.items() for v in variants
]


@pytest.mark.parametrize("spec", ALL, ids=lambda spec: spec.rsplit("/", 1)[1])
def test_valid(spec):
    configs.validate(configs.load(spec))


@pytest.mark.parametrize(
    ("variant", "parameters"), [("fprm_a5_paper", 6_882_306), ("fprm_s5_paper", 6_943_746)]
)
def test_paper_sizes(variant, parameters):
    model = configs.complete(state_tracking.get_config(variant).to_dict())["model"]
    shapes = jax.eval_shape(lambda: fpr.init(model, jax.random.key(0), None))
    assert sum(a.size for a in jax.tree.leaves(shapes)) == parameters


@pytest.mark.parametrize("module", [maze, sudoku])
def test_paper_variants_build(module):
    for variant in module.VARIANTS:
        fpr.build(configs.complete(module.get_config(variant).to_dict())["model"])


@pytest.mark.parametrize("module", [bases, state_tracking, word_problem])
def test_unknown_variant(module):
    with pytest.raises(UserError, match="unknown variant 'nope'; valid: "):
        module.get_config("nope")


def test_every_word_problem_names_its_group():
    """All variants load, and the model's vocabulary is the group's."""
    for variant in word_problem.VARIANTS:
        config = word_problem.get_config(variant)
        order = groups.group(config.task.group).order
        assert config.model.vocab_size == order + 1, variant

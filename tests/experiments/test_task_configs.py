"""The configs of copy, arithmetic, formal languages, catbAbI and language modelling.

Every variant is completed and its model built; the shapes of a few are run through, which is what
`config.validate` does before a training.
"""

import jax
import pytest

import fpr
from experiments import config as configs
from experiments import tasks
from experiments.configs import arithmetic, catbabi, copy, formal, language
from experiments.data import make_babi
from experiments.errors import UserError
from tests.experiments.test_catbabi import WHERE

MODULES = {
    "arithmetic": arithmetic, "catbabi": catbabi, "copy": copy, "formal": formal,
    "language": language,
}  # fmt: skip
ALL = [(name, variant) for name, module in MODULES.items() for variant in module.VARIANTS]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Stand-ins for the user's files: options of the task section by config file."""
    folder = tmp_path_factory.mktemp("data")
    for split, text in WHERE.items():
        for kind in make_babi.KINDS:
            (folder / f"qa{kind}_{split}.txt").write_text(text * 60)
    (folder / "text.txt").write_bytes(bytes(range(256)) * 100)
    text = str(folder / "text.txt")
    return {
        "catbabi": {"path": str(folder), "tasks": make_babi.KINDS},
        "language": {"path": text, "eval_path": text},
    }


def load(name, variant, data):
    config = configs.load(f"{configs.CONFIG_DIR / name}.py:{variant}")
    config["task"] |= data.get(name, {})
    return config


@pytest.mark.parametrize(("name", "variant"), ALL, ids=lambda part: str(part))
def test_builds(name, variant, data):
    config = load(name, variant, data)
    fpr.build(config["model"])
    task = tasks.build(config["task"], config["seed"])
    assert config["model"]["vocab_size"] == task.vocab_size
    batch = task.train_batch(0, 2)
    assert batch["tokens"].shape == batch["labels"].shape == (2, config["model"]["seq_len"])
    for length in config["eval"]["lengths"]:
        assert len(task.eval_batch(length, 0, 1)["tokens"]) == 1
    assert isinstance(task, tasks.Scored)


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("arithmetic", "paper_brackets_gated_deltaproduct"),
        ("catbabi", "paper_fp_k_1"),
        ("copy", "paper_all"),
        ("copy", "small_gated_deltanet"),
        ("formal", "cycle_navigation_slstm"),
        ("language", "small_fp_h1"),
    ],
)
def test_shapes_run_through(name, variant, data):
    config = load(name, variant, data)
    config["eval"]["lengths"] = config["eval"]["lengths"][:1]  # each length is traced anew
    configs.validate(config)


@pytest.mark.parametrize(
    ("name", "variant", "message"),
    [
        ("arithmetic", "small_plain_mamba", "has a length of a multiple of 2, not 33"),
        ("language", "small_mamba", "have task.length=64 tokens, not 33"),
    ],
)
def test_lengths_that_the_task_cannot_have(name, variant, message, data):
    config = load(name, variant, data)
    config["eval"]["lengths"] = (33,)
    with pytest.raises(UserError, match=message):
        configs.validate(config)


def test_the_rows_of_the_copy_table_differ_in_what_sees_the_output_alone():
    shared = copy.get_config("paper_none").to_dict()
    for row, parts in copy.ROWS.items():
        config = copy.get_config(f"paper_{row}").to_dict()
        assert config["model"].pop("hidden_dependence") == parts
        config["model"]["hidden_dependence"] = ()
        assert config == shared
    assert len({frozenset(parts) for parts in copy.ROWS.values()}) == 8


@pytest.mark.parametrize(
    ("name", "variants"),
    [
        ("copy", ("small_all", "small_mamba", "small_gated_deltanet")),
        ("language", ("small_fp_h1", "small_mamba")),
        ("catbabi", ("mini_fp_h1_1", "mini_mamba_1")),
        (
            "arithmetic",
            ("small_brackets_fp_mamba", *(f"small_brackets_{m}" for m in arithmetic.SMALL_WIDTHS)),
        ),
        ("formal", ("parity_fp_mamba", *(f"parity_{m}" for m in formal.WIDTHS))),
        (
            "formal",
            ("cycle_navigation_fp_mamba", *(f"cycle_navigation_{m}" for m in formal.WIDTHS)),
        ),
    ],
)
def test_rivals_of_the_small_configs_are_not_smaller(name, variants, data):
    sizes = []
    for variant in variants:
        model = load(name, variant, data)["model"]
        shapes = jax.eval_shape(lambda model=model: fpr.init(model, jax.random.key(0), None))
        sizes.append(sum(a.size for a in jax.tree.leaves(shapes)))
    assert min(sizes[1:]) >= sizes[0], sizes


def test_every_rival_of_fp_mamba_has_a_width():
    rivals = set(arithmetic.MODELS) - {"fp_mamba"}
    assert set(arithmetic.SMALL_WIDTHS) == set(formal.WIDTHS) == rivals


@pytest.mark.parametrize("module", MODULES.values(), ids=MODULES)
def test_unknown_variant(module):
    with pytest.raises(UserError, match="unknown variant 'nope'; valid: "):
        module.get_config("nope")


def test_missing_files_are_named_before_the_first_step():
    for name, variant, message in (
        ("catbabi", "small_fp_h1_1", "task.path is empty; expected the folder en-valid-10k"),
        ("language", "paper_fp_h1", "fineweb_train.bin is not a file; expected"),
    ):
        with pytest.raises(UserError, match=message):
            configs.validate(load(name, variant, {}))

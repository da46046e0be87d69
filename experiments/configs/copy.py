"""Copying with FP-Mamba: which parts of the layer have to see their own output (spec 1 section 7).

    python -m experiments.run --config=experiments/configs/copy.py:VARIANT --workdir=DIR

Variants are SIZE_MODEL. Models: the eight rows none, lambda, q, lambda_q, bc, bc_lambda, bc_q, all
(the parts that depend on shift(y)), and mamba and gated_deltanet (two layers).
  paper: 26 letters, strings of 5 to 50, tested to 100; width 1024, N=32, 10,000 steps of 128 rows.
    Needs an accelerator; not run here. Paper, at twice the length: none .11, one of lambda and Q
    .53 and .45, both .55, bc .81, bc with one of lambda and Q .88 and .86, all .94.
  small: 4 letters, strings of 2 to 6, tested at 6 and 12; N=16. The eight rows: width 32, one layer
    without short convolutions, which make this size too easy: with them, none and bc both copy
    strings of 6 (1.000) and neither those of 12 (0.29 and 0.27 of the letters; one seed). The two
    baselines keep their short convolutions (gated_deltanet its two layers), and are wide enough to
    have no fewer parameters; so they compare with no row.

Measured on one core of a shared AMD EPYC, 1500 steps in 40 to 70 s where it was quiet; share of the
letters that are right at 6 and at 12 (chance 0.25). Medians over seeds 0, 1, 2:
  none 0.601 and 0.307, bc 0.829 and 0.409 (every seed of bc above every seed of none).
Seed 0 alone, the other seeds have not been run:
  lambda 0.695 and 0.377, q 0.890 and 0.458, lambda_q 0.849 and 0.400, bc_lambda 0.834 and 0.430,
  bc_q 0.722 and 0.330, all 0.895 and 0.415; mamba 0.999 and 0.372, gated_deltanet 1.000 and 0.409.
So every dependence helps, but not in the paper's order (Q does most here), and bc_q is below bc. No
row copies whole strings of 12.
"""

from __future__ import annotations

from typing import Any

from ml_collections import ConfigDict

from experiments.errors import unknown

# Row of the table -> the parts that depend on shift(y).
ROWS: dict[str, tuple[str, ...]] = {
    "none": (),
    "lambda": ("lambda",),
    "q": ("Q",),
    "lambda_q": ("lambda", "Q"),
    "bc": ("b", "c"),
    "bc_lambda": ("lambda", "b", "c"),
    "bc_q": ("Q", "b", "c"),
    "all": ("lambda", "Q", "b", "c"),
}
BASELINES: dict[str, dict[str, Any]] = {
    "mamba": {"name": "mamba", "num_layers": 1},
    "gated_deltanet": {
        "name": "deltanet",
        "num_layers": 2,
        "decay": True,
        "output_gate": True,
    },
}
# Widths that give the baselines no fewer parameters than the largest FP-Mamba of the small configs.
SMALL_WIDTHS = {"mamba": 56, "gated_deltanet": 48}
MODELS = (*ROWS, *BASELINES)
VARIANTS = tuple(f"{size}_{model}" for size in ("paper", "small") for model in MODELS)


def get_config(variant: str = "small_bc") -> ConfigDict:
    """The config of a variant.

    Raises:
      UserError: unknown variant.
    """
    if variant not in VARIANTS:
        raise unknown("variant", variant, VARIANTS)
    size, _, model = variant.partition("_")
    return _paper(model) if size == "paper" else _small(model)


def _model(model: str, shared: dict[str, Any], fp_mamba: dict[str, Any]) -> dict[str, Any]:
    if model in BASELINES:
        state = {} if model == "gated_deltanet" else {"state_size": fp_mamba["state_size"]}
        return {**shared, **BASELINES[model], **state}
    return {"name": "fp_mamba", **shared, **fp_mamba, "hidden_dependence": ROWS[model]}


def _paper(model: str) -> ConfigDict:
    return ConfigDict(
        {
            "model": _model(
                model,
                {"vocab_size": 30, "seq_len": 256, "hidden_size": 1024},
                {
                    "state_size": 32,
                    "mixer": "householder",
                    "mixer_rank": 1,
                    "solver": {"preset": "fp_mamba", "train": {"max_steps": 100}},
                },
            ),
            "task": {"name": "copy", "letters": 26, "length": 50, "min_length": 5, "row": 256},
            "train": {"steps": 10_000, "batch_size": 128, "log_every": 50},
            "optimizer": {
                "learning_rate": 1e-5,
                "b2": 0.999,
                "weight_decay": 0.1,
                "warmup_steps": 300,
                "schedule": "linear",
                "clip_norm": 1.0,
            },
            "eval": {
                "every": 1000,
                "lengths": (5, 10, 25, 50, 75, 100),
                "max_examples": 1024,
                "batch_size": 128,
            },
            "checkpoint": {"every": 1000, "keep": 3},
        }
    )


def _small(model: str) -> ConfigDict:
    return ConfigDict(
        {
            "model": _model(
                model,
                {"vocab_size": 8, "seq_len": 32, "hidden_size": SMALL_WIDTHS.get(model, 32)},
                {
                    "state_size": 16,
                    "conv": False,
                    "mixer": "householder",
                    "mixer_rank": 1,
                    "solver": {
                        "preset": "fprm",  # each sample stops by itself
                        "train": {"max_steps": 16},
                        "eval": {"max_steps": 200},
                    },
                    "adjoint": {"name": "one_step", "k": 1, "refine": True},
                },
            ),
            "task": {"name": "copy", "letters": 4, "length": 6, "min_length": 2, "row": 32},
            "train": {"steps": 1500, "batch_size": 32, "log_every": 50},
            "optimizer": {
                "learning_rate": 3e-3,
                "weight_decay": 0.01,
                "warmup_steps": 50,
                "schedule": "cosine",
                "final_fraction": 0.1,
                "clip_norm": 1.0,
            },
            "eval": {"lengths": (6, 12), "max_examples": 512, "batch_size": 128},
            "checkpoint": {"every": 500, "keep": 1},
        }
    )

"""Copying with FP-Mamba: which parts of the layer have to see their own output (spec 1 section 7).

python -m experiments.run --config=experiments/configs/copy.py:VARIANT --workdir=DIR
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

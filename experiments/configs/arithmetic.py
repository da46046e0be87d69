"""Arithmetic mod 5 with and without brackets: seven models (spec 1 section 7).

    python -m experiments.run --config=experiments/configs/arithmetic.py:VARIANT --workdir=DIR

Variants are SIZE_TASK_MODEL. Tasks: brackets, plain. Models: transformer, mlstm, slstm, mamba,
deltanet, gated_deltaproduct, fp_mamba (Householder, r=4).
  paper: two layers of width 128, 100,000 steps of 256 expressions of up to 40 tokens, tested to
    256. Needs an accelerator; not run here. At most 20 iterations: the paper finds no gain beyond.
    Paper, scaled accuracy with brackets: transformer .025, mlstm .034, slstm .173, mamba .136,
    deltanet .200, gated_deltaproduct .342, fp_mamba .384.
  small: two layers, up to 16 tokens, for a CPU; fp_mamba has width 64 (363,760 parameters, most of
    them its mixer's), the rivals the widths that give them no fewer (372,136 to 408,512). No
    variant has been trained. small_brackets_fp_mamba would train for about 15 minutes on one core
    of a shared AMD EPYC, busy with other work: estimated from its first 104 steps, 0.72 s each.
"""

from __future__ import annotations

from typing import Any

from ml_collections import ConfigDict

from experiments.errors import unknown

TASKS = {"brackets": True, "plain": False}
MODELS: dict[str, dict[str, Any]] = {
    "transformer": {"name": "transformer", "num_heads": 4},
    "mlstm": {"name": "mlstm", "num_heads": 4},
    "slstm": {"name": "slstm", "num_heads": 4},
    "mamba": {"name": "mamba"},
    "deltanet": {"name": "deltanet", "num_heads": 4},
    "gated_deltaproduct": {
        "name": "deltanet",
        "num_heads": 4,
        "num_householder": 2,
        "decay": True,
        "output_gate": True,
        "negative_eigenvalues": True,
    },
    "fp_mamba": {"name": "fp_mamba", "mixer": "householder", "mixer_rank": 4},
}
# Widths that give the rivals no fewer parameters than the small fp_mamba of width 64.
SMALL_WIDTHS = {
    "transformer": 104,
    "mlstm": 168,
    "slstm": 176,
    "mamba": 168,
    "deltanet": 216,
    "gated_deltaproduct": 160,
}
VARIANTS = tuple(
    f"{size}_{task}_{model}" for size in ("paper", "small") for task in TASKS for model in MODELS
)


def get_config(variant: str = "small_brackets_fp_mamba") -> ConfigDict:
    """The config of a variant.

    Raises:
      UserError: unknown variant.
    """
    if variant not in VARIANTS:
        raise unknown("variant", variant, VARIANTS)
    size, task, model = variant.split("_", 2)
    return (_paper if size == "paper" else _small)(TASKS[task], model)


def _paper(brackets: bool, model: str) -> ConfigDict:
    options: dict[str, Any] = {"vocab_size": 12, "seq_len": 40, "hidden_size": 128, "num_layers": 2}
    if model == "fp_mamba":
        options["solver"] = {"preset": "fp_mamba", "train": {"max_steps": 20}}
    return ConfigDict(
        {
            "model": {**options, **MODELS[model]},
            "task": {"name": "arithmetic", "brackets": brackets, "length": 40, "min_length": 3},
            "train": {"steps": 100_000, "batch_size": 256, "log_every": 100},
            "optimizer": {
                "learning_rate": 1e-3,
                "b2": 0.999,
                "weight_decay": 0.1,
                "warmup_steps": 10_000,
                "schedule": "cosine",
                "final_fraction": 1e-3,
                "clip_norm": 1.0,
            },
            "eval": {
                "every": 10_000,
                "lengths": (40, 64, 128, 192, 256),
                "max_examples": 2048,
                "batch_size": 256,
            },
            "checkpoint": {"every": 10_000, "keep": 3},
        }
    )


def small_model(model: str, **sizes: int) -> dict[str, Any]:
    """A row of the table at a size for a CPU: every solve stops by itself, per sample."""
    options: dict[str, Any] = {"num_layers": 2, **sizes, **MODELS[model]}
    if model == "fp_mamba":
        options |= {
            "state_size": 8,
            "solver": {
                "preset": "fprm",
                "train": {"max_steps": 20},
                "eval": {"max_steps": 200},
            },
            "adjoint": {"name": "one_step", "k": 1, "refine": True},
        }
    return options


def small_training(steps: int) -> dict[str, Any]:
    """Training of a CPU-size config."""
    return {
        "train": {"steps": steps, "batch_size": 64, "log_every": 50},
        "optimizer": {
            "learning_rate": 3e-3,
            "weight_decay": 0.01,
            "warmup_steps": 100,
            "schedule": "cosine",
            "final_fraction": 0.1,
            "clip_norm": 1.0,
        },
        "checkpoint": {"every": 1000, "keep": 1},
    }


def _small(brackets: bool, model: str) -> ConfigDict:
    return ConfigDict(
        {
            "model": small_model(
                model, vocab_size=12, seq_len=16, hidden_size=SMALL_WIDTHS.get(model, 64)
            ),
            "task": {"name": "arithmetic", "brackets": brackets, "length": 16, "min_length": 4},
            **small_training(1200),
            "eval": {
                "lengths": (16, 32),
                "max_examples": 1024,
                "batch_size": 256,
                "budget_examples": 0,
            },
        }
    )

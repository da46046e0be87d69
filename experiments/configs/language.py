"""Language modelling with FP-Mamba and Mamba on the user's own text (spec 1 sections 6 and 7).

    python -m experiments.run --config=experiments/configs/language.py:VARIANT --workdir=DIR
        [--config.task.path=FILE] [--config.task.eval_path=FILE]

Variants are SIZE_MODEL; models: mamba, fp_h1, fp_h2 (FP-Mamba with the Householder mixer of rank 1
and 2, its gate inside the loop).
  paper_*: 12 layers of width 768, context 2048, learning rate 0.004, batch 256 windows, on files of
    GPT-2 tokens (uint16; see experiments/tasks/language.py). Needs accelerators; not run here. The
    number of steps is ours, 2.6 billion tokens. Paper: fp_h2 below fp_h1 below mamba in
    perplexity, fewer than 10 iterations per layer.
  small_*: two layers of width 64 on the bytes of a text file, for a CPU. Without a path it reads
    the reference texts that come with every Python (pydoc_data/topics.py). Measured on one core of
    a shared AMD EPYC, busy with other work, seed 0, with the texts of Python 3.11: small_fp_h1
    (163,172 parameters, 224 s of training) has a perplexity of 2.61 a byte (uniform: 256), with
    6.5 and 9.9 iterations in its two layers; small_mamba (176,736 parameters, 216 s) has 2.56. So
    FP-Mamba is not better at this size. small_fp_h2 has not been run.
"""

from __future__ import annotations

import importlib.util
from typing import Any

from ml_collections import ConfigDict

from experiments.errors import unknown

MODELS: dict[str, dict[str, Any]] = {
    "mamba": {"name": "mamba"},
    "fp_h1": {"name": "fp_mamba", "mixer": "householder", "mixer_rank": 1, "glu_in_loop": True},
    "fp_h2": {"name": "fp_mamba", "mixer": "householder", "mixer_rank": 2, "glu_in_loop": True},
}
VARIANTS = tuple(f"{size}_{model}" for size in ("paper", "small") for model in MODELS)


def get_config(variant: str = "small_fp_h1") -> ConfigDict:
    """The config of a variant.

    Raises:
      UserError: unknown variant.
    """
    if variant not in VARIANTS:
        raise unknown("variant", variant, VARIANTS)
    size, model = variant.split("_", 1)
    return _paper(model) if size == "paper" else _small(model)


def _paper(model: str) -> ConfigDict:
    options: dict[str, Any] = {
        "vocab_size": 50_258,  # GPT-2's 50257 and padding
        "seq_len": 2048,
        "hidden_size": 768,
        "num_layers": 12,
        "dtype": "bfloat16",
        **MODELS[model],
    }
    if model != "mamba":
        options["solver"] = {
            "preset": "fp_mamba",
            "train": {"max_steps": 10},
            "eval": {"max_steps": 100},
        }
    steps = 5000
    return ConfigDict(
        {
            "model": options,
            "task": {
                "name": "language",
                "path": "fineweb_train.bin",
                "eval_path": "fineweb_val.bin",
                "dtype": "uint16",
                "length": 2048,
                "vocab_size": 50_258,
            },
            "train": {"steps": steps, "batch_size": 256, "log_every": 20},
            "optimizer": {
                "learning_rate": 0.004,
                "b1": 0.9,
                "b2": 0.95,
                "weight_decay": 0.1,
                "warmup_steps": steps // 10,
                "schedule": "cosine",
                "clip_norm": 1.0,
            },
            "eval": {"every": 1000, "lengths": (2048,), "max_examples": 512, "batch_size": 16},
            "checkpoint": {"every": 500, "keep": 3},
        }
    )


def _small(model: str) -> ConfigDict:
    text = importlib.util.find_spec("pydoc_data.topics")
    options: dict[str, Any] = {
        "vocab_size": 257,
        "seq_len": 64,
        "hidden_size": 96 if model == "mamba" else 64,  # about the parameters of fp_h1
        "num_layers": 2,
        **MODELS[model],
    }
    if model != "mamba":
        options |= {
            "state_size": 8,
            "solver": {"preset": "fprm", "train": {"max_steps": 10}, "eval": {"max_steps": 100}},
            "adjoint": {"name": "one_step", "k": 1, "refine": True},
        }
    else:
        options["state_size"] = 8
    return ConfigDict(
        {
            "model": options,
            "task": {
                "name": "language",
                "path": text.origin if text and text.origin else "",
                "length": 64,
                "vocab_size": 257,
            },
            "train": {"steps": 800, "batch_size": 32, "log_every": 40},
            "optimizer": {
                "learning_rate": 4e-3,
                "b1": 0.9,
                "b2": 0.95,
                "weight_decay": 0.1,
                "warmup_steps": 80,
                "schedule": "cosine",
                "clip_norm": 1.0,
            },
            "eval": {
                "lengths": (64,),
                "max_examples": 256,
                "batch_size": 64,
                "budget_examples": 0,
            },
            "checkpoint": {"every": 400, "keep": 1},
        }
    )

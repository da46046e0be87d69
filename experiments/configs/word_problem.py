"""Word problems with FP-RNN and FP-Mamba: train length 16, tested beyond it (spec 1 section 6).

    python -m experiments.run --config=experiments/configs/word_problem.py:VARIANT --workdir=DIR

Variants:
  fp_rnn_{a5,s5}_{householder,kronecker}: the paper's task and optimiser (batch 512, learning rate
    1e-4, 5 epochs of 16M sequences, width 512). Needs an accelerator; not run here.
  fp_rnn_s3_small: one FP-RNN layer (128,386 parameters) on S3 with the contractive Householder
    mixer, for a CPU. Measured on two CPU cores shared with other jobs, one seed, 5m26s: it
    converges everywhere (12 and 20 median solver steps) but does not solve the task in 3000 steps:
    token accuracy 0.677 at length 16 and 0.503 at 32, sequence accuracy 0.008 and 0.
  fp_mamba_s3_small: one FP-Mamba-1 layer (82,578 parameters) on S3, Householder r=1 with factor 2,
    N=8, b, c and Q seeing shift(y). Measured on two CPU cores shared with other jobs, one seed,
    3m30s: sequence accuracy 1.000 at 16 and at 32, all solves converged, 17 and 33 median solver
    steps. At learning rate 1e-3 it reached 0.91 and 0.64.
  fp_mamba2_s3_small: one FP-Mamba-2 layer on S3, N=16, heads of 32. Same machine, one seed, 88 s
    of training: 1.000 at 16 and at 32, all converged, 19 and 35 median steps.
"""

from typing import Any

from ml_collections import ConfigDict

from experiments.errors import unknown

GROUPS = {"a5": ("A5", 61), "s5": ("S5", 121)}
PAPER = {
    f"fp_rnn_{group}_{mixer}": (group, mixer)
    for group in GROUPS
    for mixer in ("householder", "kronecker")
}
# One layer each; Mamba and Mamba-2 are made wide enough to have no fewer parameters than FP-Mamba.
SMALL_MODELS: dict[str, dict[str, Any]] = {
    "fp_mamba": {"name": "fp_mamba", "hidden_size": 64, "state_size": 8},
    "fp_mamba2": {"name": "fp_mamba2", "hidden_size": 64, "state_size": 16, "head_dim": 32},
    "mamba": {"name": "mamba", "hidden_size": 112, "state_size": 8},
    "mamba2": {"name": "mamba2", "hidden_size": 112, "state_size": 16, "head_dim": 32},
    "lstm": {"name": "lstm", "hidden_size": 100},
}
SMALL_GROUPS = {"s3": ("S3", 7, 1500), "z2xs3": ("Z2xS3", 13, 3000), "a4": ("A4", 13, 4000)}
SMALL = {
    f"{model}_{group}_small": (model, group) for model in SMALL_MODELS for group in SMALL_GROUPS
}
CAPS = {f"fp_mamba_s3_cap{cap}": cap for cap in (2, 4, 8, 16)}
VARIANTS = (*PAPER, "fp_rnn_s3_small", *SMALL, *CAPS)


def get_config(variant: str = "fp_rnn_s3_small") -> ConfigDict:
    """The config of a variant.

    Raises:
      UserError: unknown variant.
    """
    if variant in PAPER:
        return _paper(*PAPER[variant])
    if variant == "fp_rnn_s3_small":
        return _small()
    if variant in SMALL:
        return _small_model(*SMALL[variant])
    if variant in CAPS:
        config = _small_model("fp_mamba", "s3")
        config.model.solver.train.max_steps = CAPS[variant]
        return config
    raise unknown("variant", variant, VARIANTS)


def _paper(group: str, mixer: str) -> ConfigDict:
    name, vocab_size = GROUPS[group]
    batch_size = 512
    train_sequences = 16_000_000 * 4 // 5  # 4:1 training to validation
    return ConfigDict(
        {
            "model": {
                "name": "fp_rnn",
                "vocab_size": vocab_size,
                "seq_len": 16,
                "hidden_size": 512,
                "num_layers": 1,
                "mixer": mixer,
                "spectral": mixer == "kronecker",
                "solver": {"preset": "fp_rnn", "train": {"max_steps": 16}},
            },
            "task": {
                "name": "word_problem",
                "group": name,
                "length": 16,
                "train_sequences": train_sequences,
            },
            "train": {
                "steps": 5 * train_sequences // batch_size,
                "batch_size": batch_size,
                "log_every": 100,
            },
            "optimizer": {
                "learning_rate": 1e-4,
                "b2": 0.999,
                "weight_decay": 0.01,
                "schedule": "cosine",
                "clip_norm": 1.0,
            },
            "eval": {
                "every": 5000,
                "lengths": (16, 32, 50),
                "max_examples": 5000,
                "batch_size": 500,
            },
            "checkpoint": {"every": 5000, "keep": 3},
        }
    )


def _small() -> ConfigDict:
    return ConfigDict(
        {
            "model": {
                "name": "fp_rnn",
                "vocab_size": 7,
                "seq_len": 16,
                "hidden_size": 64,
                "num_layers": 1,
                "mixer": "householder",
                "mixer_rank": 1,
                "mixer_scale": 1.0,
                "solver": {
                    "preset": "fp_rnn",
                    "train": {"max_steps": 32},
                    "eval": {"max_steps": 160},
                },
            },
            "task": {"name": "word_problem", "group": "S3", "length": 16},
            "train": {"steps": 3000, "batch_size": 64},
            "optimizer": {
                "learning_rate": 2e-3,
                "b2": 0.95,
                "weight_decay": 0.01,
                "warmup_steps": 50,
                "schedule": "cosine",
                "final_fraction": 0.1,
                "clip_norm": 1.0,
            },
            "eval": {"every": 1000, "lengths": (16, 32), "max_examples": 512},
            "checkpoint": {"every": 500, "keep": 2},
        }
    )


def _small_model(model: str, group: str) -> ConfigDict:
    """One layer of a model on a group; the fixed-point layers solve, the others have no solver."""
    name, vocab_size, steps = SMALL_GROUPS[group]
    config = _small()
    config.model = ConfigDict({"vocab_size": vocab_size, "seq_len": 16, **SMALL_MODELS[model]})
    if model.startswith("fp_"):
        config.model.update(
            {
                "mixer": "householder",
                "mixer_rank": 1,
                # Per-sample halting with patience 5: no sequence waits for its batch.
                "solver": {
                    "preset": "fprm",
                    "train": {"max_steps": 32},
                    "eval": {"max_steps": 400},
                },
                "adjoint": {"name": "one_step", "k": 1, "refine": True},
            }
        )
    config.task.group = name
    config.train.steps = steps
    config.optimizer.learning_rate = 3e-3
    config.eval.every = config.checkpoint.every = steps // 2
    return config

"""ARC-AGI with FPRM, TRM and HRM: deep supervision with a carry (spec 2 sections 3 to 5).

    pip install 'fpr[arc]'
    python -m experiments.run --config=experiments/configs/arc.py:VARIANT --workdir=DIR
        [--config.task.path=FOLDER]

Variants:
  fprm: the paper's sizes for ARC-AGI-1: 1000 augmentations, a puzzle embedding for each augmented
    task, batch 768, 104,167 steps (100k epochs of one example per task) in bfloat16.
    Needs an accelerator: the puzzle embedding alone has 800,801 rows of 512 (1.6 GB, times four
    with the averaged weights, the gradient and the update). Paper: 47.5% (pass@2, 1000 votes).
  fprm_arc2: the same for ARC-AGI-2 (1,121,121 rows, 145,834 steps). Paper: 6.2%.
  trm, trm_arc2: TRM in their place: up to 16 segments, ended in training by its Q head with 10%
    exploration (`train.halting="act"`), always 16 in evaluation. Paper: 44.6% (40.0% re-evaluated)
    and 7.8% (6.2%).
  hrm, hrm_arc2: HRM, likewise. Paper: 40.3% and 5.0%.

Puzzle embeddings are updated by sign-SGD on the rows in the batch. Where memory is short, set
`--config.train.accumulate=8`: the same step in eight parts. The paper does not give a1 and a2 for
ARC; those of Sudoku and Maze are used. Not run here. During training one vote each is evaluated;
to score as the paper does, evaluate the finished run with
`--mode=eval --config.task.votes=1001 --config.eval.max_examples=500000`.
"""

from ml_collections import ConfigDict

from experiments.configs import _rivals
from experiments.errors import unknown

# Data set, its tasks (training and evaluation), optimiser steps.
DATA = {"": ("arc-agi-1", 800, 104_167), "_arc2": ("arc-agi-2", 1120, 145_834)}
VARIANTS = {f"{model}{data}": (model, data) for model in ("fprm", "trm", "hrm") for data in DATA}
AUGMENTATIONS = 1000


def get_config(variant: str = "fprm") -> ConfigDict:
    """The config of a variant.

    Raises:
      UserError: unknown variant.
    """
    if variant not in VARIANTS:
        raise unknown("variant", variant, VARIANTS)
    name, data = VARIANTS[variant]
    path, tasks, steps = DATA[data]
    config = ConfigDict(
        {
            "model": {
                "name": "fprm",
                "vocab_size": 12,  # padding, end of grid, 10 colours
                "seq_len": 900,
                "hidden_size": 512,
                "num_heads": 8,
                "num_layers": 2,
                "expansion": 4.0,
                "num_registers": 16,
                "num_puzzles": 1 + tasks * (AUGMENTATIONS + 1),
                "conv": "conv1d",
                "conv_kernel": 4,
                "alpha_1": 0.75,
                "alpha_2": 0.25,
                "dtype": "bfloat16",
                "solver": {
                    "preset": "fprm",
                    "train": {"decay": 0.9, "patience": 5, "max_steps": 72},
                    "eval": {"decay": 0.99, "patience": 5, "max_steps": 1000},
                },
            },
            "task": {"name": "arc", "path": path, "augmentations": AUGMENTATIONS},
            "train": {
                "steps": steps,
                "batch_size": 768,
                "regime": "carry",
                "window": 6,
                "max_windows": 12,
                "log_every": 100,
            },
            "optimizer": {
                "learning_rate": 1e-4,
                "b1": 0.9,
                "b2": 0.95,
                "weight_decay": 0.1,
                "warmup_steps": 2000,
                "puzzle_learning_rate": 1e-2,
                "puzzle_weight_decay": 0.1,
            },
            "ema": 0.999,
            "loss": "stablemax",
            "q_loss_weight": 0.5,
            "eval": {"every": 20_000, "lengths": (900,), "max_examples": 419, "batch_size": 128},
            "checkpoint": {"every": 5000, "keep": 2},
        }
    )
    return config if name == "fprm" else _rivals.replace(config, name)

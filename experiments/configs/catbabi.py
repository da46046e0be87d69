"""catbAbI on the user's own bAbI files (spec 1 sections 6 and 7).

    python -m experiments.run --config=experiments/configs/catbabi.py:VARIANT --workdir=DIR
        --config.task.path=.../tasks_1-20_v1-2/en-valid-10k

Variants are SIZE_MODEL_LAYERS:
  paper_{mamba,fp_k,fp_h1,fp_h2,fp_h3}_{1,2,4}: width 512, learning rate 5e-4, batch 256, at most
    100 iterations; fp_k has the Kronecker mixer, fp_hR the Householder mixer of rank R. Needs an
    accelerator; not run here. The number of steps is ours, the paper's is not known to us. Paper,
    test accuracy with 1 and 2 layers: mamba 78.28 and 87.08 (4 layers: 86.51), fp_k 79.93 and
    84.16, fp_h1 81.32 and 89.08, fp_h2 81.60 and 87.47, fp_h3 80.79 and 89.55.
  small_{mamba,fp_k,fp_h1,fp_h2,fp_h3}_{1,2}: width 64, for a CPU. Not run: bAbI was not at hand.
  mini_{mamba,fp_h1}_1: one layer on stories of three kinds that are made up, for a CPU; write them
    with `python -m experiments.data.make_babi --out=FOLDER` first.
"""

from __future__ import annotations

from typing import Any

from ml_collections import ConfigDict

from experiments.data import make_babi
from experiments.errors import unknown

MODELS: dict[str, dict[str, Any]] = {
    "mamba": {"name": "mamba"},
    "fp_k": {"name": "fp_mamba", "mixer": "kronecker"},
    "fp_h1": {"name": "fp_mamba", "mixer": "householder", "mixer_rank": 1},
    "fp_h2": {"name": "fp_mamba", "mixer": "householder", "mixer_rank": 2},
    "fp_h3": {"name": "fp_mamba", "mixer": "householder", "mixer_rank": 3},
}
VARIANTS = (
    *(f"paper_{model}_{layers}" for model in MODELS for layers in (1, 2, 4)),
    *(f"small_{model}_{layers}" for model in MODELS for layers in (1, 2)),
    "mini_mamba_1",
    "mini_fp_h1_1",
)


def get_config(variant: str = "small_fp_h1_1") -> ConfigDict:
    """The config of a variant.

    Raises:
      UserError: unknown variant.
    """
    if variant not in VARIANTS:
        raise unknown("variant", variant, VARIANTS)
    size, rest = variant.split("_", 1)
    model, layers = rest.rsplit("_", 1)
    if size == "mini":
        return _mini(model)
    paper = size == "paper"
    options: dict[str, Any] = {
        "vocab_size": 256,  # room for all words of the 20 tasks
        "seq_len": 200,
        "hidden_size": 512 if paper else 64,
        "num_layers": int(layers),
        **MODELS[model],
    }
    if model != "mamba":
        solver: dict[str, Any] = {"preset": "fp_mamba", "train": {"max_steps": 100}}
        if not paper:
            solver = {"preset": "fprm", "train": {"max_steps": 16}, "eval": {"max_steps": 200}}
        options["solver"] = solver
    return ConfigDict(
        {
            "model": options,
            "task": {
                "name": "catbabi",
                "path": "",  # yours
                "vocab_size": 256,
                "eval_split": "test" if paper else "valid",
            },
            "train": {
                "steps": 50_000 if paper else 2000,
                "batch_size": 256 if paper else 16,
                "log_every": 100,
            },
            "optimizer": {
                "learning_rate": 5e-4 if paper else 2e-3,
                "b2": 0.999 if paper else 0.95,
                "weight_decay": 0.01,
                "warmup_steps": 1000 if paper else 100,
                "schedule": "cosine",
                "clip_norm": 1.0,
            },
            "eval": {
                "every": 5000 if paper else 0,
                "lengths": (200,),
                "max_examples": 10_000 if paper else 500,
                "batch_size": 250 if paper else 50,
            },
            "checkpoint": {"every": 2000, "keep": 2},
        }
    )


def _mini(model: str) -> ConfigDict:
    config = get_config(f"small_{model}_1")
    config.model.seq_len = config.task.length = 100
    config.model.vocab_size = config.task.vocab_size = 40
    config.model.state_size = 8
    if model == "mamba":
        config.model.hidden_size = 112  # no fewer parameters than fp_h1
    config.task.tasks = make_babi.KINDS
    config.train.steps = 800
    config.eval.lengths = (100,)
    return config

"""Other bases in the fixed-point reasoner's loop: what mixes tokens in the place of attention.

    python -m experiments.run --config=experiments/configs/bases.py:VARIANT --workdir=DIR

The paper tries Transformers only and names CNNs, MLPs and state-space models as untried. Each base
runs in the same loop, with the same residual scaling, norms, SwiGLU sublayers and solver.

Variants:
  sudoku4_transformer, sudoku4_mlp_mixer, sudoku4_cnn, sudoku4_mamba, sudoku4_fp_rnn: the config
    `sudoku.py:cpu4` (4×4, shipped data) with another base. The recurrent bases read the grid row by
    row in both directions within each sublayer; there is no convolution on the iterate but in the
    transformer's variant, which is cpu4 itself. Parameters: 132,674, 123,906, 125,058, 158,466 and
    255,754. Measured, seed 0 only, one process on one busy core of a shared AMD EPYC: mlp_mixer
    100% of the 471 held-out puzzles (8.7 effective layers, mean of an example), cnn 99.8% (15.3),
    transformer 99.6% (16.6), fp_rnn 87.3% (17.5), mamba 36.1% (12.2), both still rising.
  s3_cnn, s3_mamba, s3_fp_rnn: the config `state_tracking.py:fprm_s3_small` with a causal base
    (forwards only; mlp_mixer cannot be causal). 62,850, 65,090 and 89,412 parameters. Not measured
    yet.
"""

from typing import Any

from ml_collections import ConfigDict

from experiments.configs import state_tracking, sudoku
from experiments.errors import unknown

OPTIONS: dict[str, dict[str, Any]] = {
    "transformer": {},
    "mlp_mixer": {},
    "cnn": {"kernel": 3},
    "mamba": {"state_size": 8},
    "fp_rnn": {"mixer": "householder"},
}
CAUSAL = ("cnn", "mamba", "fp_rnn")
VARIANTS = (*(f"sudoku4_{name}" for name in OPTIONS), *(f"s3_{name}" for name in CAUSAL))


def get_config(variant: str = "sudoku4_cnn") -> ConfigDict:
    """The config of a variant.

    Raises:
      UserError: unknown variant.
    """
    if variant not in VARIANTS:
        raise unknown("variant", variant, VARIANTS)
    task, _, name = variant.partition("_")
    if task == "sudoku4":
        config = sudoku.get_config("cpu4")
    else:
        config = state_tracking.get_config("fprm_s3_small")
    if name != "transformer":
        config.model.base = name
        config.model.base_options = ConfigDict(OPTIONS[name])
        config.model.conv = "none"  # The base itself looks at neighbours.
    return config

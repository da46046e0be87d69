"""TRM, its variants and HRM in the place of FPRM in a config (spec 2 section 4).

Not a config itself: sudoku.py, maze.py, arc.py and state_tracking.py use it.
"""

from typing import Any

from ml_collections import ConfigDict

from fpr.models.transformer import fixed_loops

# Applied to FPRM's config; the options not named here keep the models' own defaults.
RIVALS: dict[str, dict[str, Any]] = {
    "trm": {"name": "trm", "h_cycles": 3, "l_cycles": 6},
    "trm_conv": {"name": "trm", "h_cycles": 3, "l_cycles": 6, "conv": "conv1d", "conv_kernel": 4},
    "trm_single": {"name": "trm", "h_cycles": 3, "l_cycles": 6, "num_levels": 0},
    "trm_six_levels": {"name": "trm", "h_cycles": 3, "l_cycles": 1, "num_levels": 6},
    "hrm": {"name": "hrm", "num_layers": 4, "h_cycles": 2, "l_cycles": 2},
}
SEGMENTS = 16
_OF_FPRM = ("conv", "conv_kernel", "alpha_1", "alpha_2", "norm_placement", "adjoint")


def replace(config: ConfigDict, rival: str, **changes: Any) -> ConfigDict:
    """Puts a rival in FPRM's place, with its segments and their halting; changes `config`.

    In training the Q head ends an example's segments, with 10% exploration; evaluation always runs
    all of them.

    Args:
      config: config of an FPRM, carry regime.
      rival: one of `RIVALS`.
      **changes: model options instead of the rival's.
    """
    shared = {k: v for k, v in config.model.to_dict().items() if k not in _OF_FPRM}
    model = shared | RIVALS[rival] | {"solver": fixed_loops(1, SEGMENTS)} | changes
    config.model = ConfigDict(model)
    config.train.update({"window": 1, "max_windows": SEGMENTS, "halting": "act"})
    config.q_loss_weight = 0.5
    return config

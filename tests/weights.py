"""Flax parameters -> weights as the NumPy references take them: torch names, stored (out, in)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

Weights = dict[str, np.ndarray]
# Module names of FP-RNN that differ, torch -> ours.
RNN_NAMES = {"input_trans": "in_proj", "output_trans": "out_proj", "output_norm": "out_norm"}


def mixer_weights(params: Mapping[str, Any]) -> Weights:
    """Weights of a mixer without weight normalisation."""
    weights = {}
    for name, group in params.items():
        if name.startswith("mixers_"):
            _, place, rest = name.split("_", 2)
            name = f"mixers.{place}.{rest}"
        if "down" in group:
            weights[f"{name}.0.weight"] = np.asarray(group["down"]["kernel"]).T
            weights[f"{name}.1.weight"] = np.asarray(group["up"]["kernel"]).T
            continue
        weights[f"{name}.weight"] = np.asarray(group["kernel"]).T
        if "bias" in group:
            weights[f"{name}.bias"] = np.asarray(group["bias"])
    return weights


def block_weights(params: Mapping[str, Any], names: Mapping[str, str] | None = None) -> Weights:
    """Weights of a block without weight normalisation.

    Args:
      params: its Flax parameters.
      names: torch module names that differ from ours, torch -> ours.
    """
    torch = {ours: theirs for theirs, ours in (names or {}).items()}
    weights = {}
    for name, group in params.items():
        if name == "mixer":
            weights |= {f"mixer.{key}": w for key, w in mixer_weights(group).items()}
            continue
        if not hasattr(group, "items"):
            weights[name] = np.asarray(group)
            continue
        conv = name.startswith("conv")
        path = torch.get(name, name.replace("conv_", "conv1d_"))
        for leaf, value in group.items():
            array = np.asarray(value)
            if leaf == "kernel":
                array = array.T[:, None] if conv else array.T
            weights[f"{path}.{'bias' if leaf == 'bias' else 'weight'}"] = array
    return weights

"""HRM, the Hierarchical Reasoning Model: a slow and a fast network with their own weights.

Spec 2 section 4. TRM's recursion with 4 + 4 layers, 2 × 2 cycles and the one-step gradient.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from fpr.models.fprm import FPRM, FPRMLayer
from fpr.models.trm import TRMConfig, TRMLayer


@dataclasses.dataclass(frozen=True)
class HRMConfig(TRMConfig):
    """Options of HRM: those of `TRMConfig` with other defaults; `num_layers` is per network."""

    num_layers: int = 4
    h_cycles: int = 2
    l_cycles: int = 2
    gradient: str = "step"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_levels < 1:
            raise ValueError(
                f"model.num_levels={self.num_levels!r}, allowed: >= 1 (with a single state the "
                "second network of HRM has nothing to do; use the model trm)"
            )


class HRMLayer(TRMLayer):
    """The recursion with a network for the low states and one for z_H; f is one segment."""

    config: HRMConfig

    def setup(self) -> None:
        self.low_net = self._network()
        self.high_net = self._network()
        self.start = self._start()

    def nets(self) -> tuple[FPRMLayer, FPRMLayer]:
        return self.low_net, self.high_net


class HRM(FPRM):
    """Embedding (and registers), the recursion, a linear head on z_H and a Q head on position 0."""

    config: HRMConfig
    block: ClassVar[Any] = HRMLayer

"""Two baselines of FPRM made of its own blocks: a deep Transformer and a plain looped one.

Spec 2 section 4: "plain looped Transformer (post-norm, fixed loops) and a deep non-looped
Transformer"; spec 1 section 5: Transformer with RoPE or without positions (NoPE).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from fpr.models.fprm import FPRM, FPRMConfig, FPRMLayer


@dataclasses.dataclass(frozen=True)
class TransformerConfig(FPRMConfig):
    """Options of the deep Transformer: those of `FPRMConfig` with other defaults.

    `num_layers` is its depth. By default it is a causal pre-norm Transformer with unscaled
    residuals and a last norm; `norm_type="post"` with `norm_placement="none"` is the original form,
    `rope=False` has no positions. It reads its input once, so what acts on an iterate (`conv`,
    `norm_placement="input"`, a start other than 0) is refused.
    """

    num_layers: int = 6
    causal: bool = True
    norm_type: str = "pre"
    norm_placement: str = "output"
    residual_scale: str = "none"
    z0: str = "fixed"
    z0_std: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        fixed = {"conv": ("none",), "norm_placement": ("none", "output"), "z0": ("fixed",)}
        for name, allowed in {**fixed, "z0_std": (0.0,)}.items():
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"model.{name}={getattr(self, name)!r} acts on an iterate, which a Transformer "
                    f"without a loop does not have; allowed: {', '.join(map(str, allowed))}"
                )


class TransformerLayer(FPRMLayer):
    """All blocks of a deep Transformer: one application of FPRM's f to z = 0."""

    loop = False


class Transformer(FPRM):
    """Embedding (and registers), L blocks, a linear head; no Q head."""

    config: TransformerConfig
    block: ClassVar[Any] = TransformerLayer

    def head(self, h: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        logits = self.lm_head(h[:, self.config.num_registers :])
        return logits.astype(jnp.float32), None


def fixed_loops(train: int, evaluation: int) -> dict[str, Any]:
    """Solver section that applies f a fixed number of times."""
    return {
        "train": {"halting": "never", "max_steps": train},
        "eval": {"halting": "never", "max_steps": evaluation},
    }


@dataclasses.dataclass(frozen=True)
class LoopedTransformerConfig(FPRMConfig):
    """Options of the plain looped Transformer: those of `FPRMConfig` with other defaults.

    z ← post-norm blocks(z + x) from z = 0, a fixed number of times (8 by default, set by
    `solver.*.max_steps` with `halting="never"`), differentiated through all of them
    (`adjoint={"name": "unrolled"}`) or through the last k only
    (`{"name": "one_step", "k": k, "refine": True}`, which runs max_steps + k loops).
    """

    norm_type: str = "post"
    residual_scale: str = "none"
    z0: str = "fixed"
    z0_std: float = 0.0
    solver: Mapping[str, Any] = dataclasses.field(default_factory=lambda: fixed_loops(8, 8))
    adjoint: Mapping[str, Any] = dataclasses.field(default_factory=lambda: {"name": "unrolled"})

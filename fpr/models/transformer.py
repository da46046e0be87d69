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

from fpr.models import base
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
        if self.base != "transformer":
            raise ValueError(
                f"model.base={self.base!r}: a Transformer without a loop mixes tokens by "
                "attention; allowed: transformer (the model looped_transformer takes other bases)"
            )
        fixed = {"conv": ("none",), "norm_placement": ("none", "output"), "z0": ("fixed",)}
        for name, allowed in {**fixed, "z0_std": (0.0,)}.items():
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"model.{name}={getattr(self, name)!r} acts on an iterate, which a Transformer "
                    f"without a loop does not have; allowed: {', '.join(map(str, allowed))}"
                )


class TransformerLayer(FPRMLayer, base.SequentialLayer):
    """All blocks of a deep Transformer: one application of FPRM's f to z = 0.

    Its cache holds each block's keys and values at up to `seq_len` positions.
    """

    loop = False

    def check_sequential(self, length: int) -> None:
        c = self.config
        if length > c.seq_len:
            raise ValueError(
                f"{length} tokens do not fit into the Transformer's cache of model.seq_len="
                f"{c.seq_len} positions"
            )
        for name, allowed in (("causal", True), ("num_registers", 0)):
            if getattr(c, name) != allowed:
                raise ValueError(
                    f"model.{name}={getattr(c, name)!r}, allowed where tokens are decoded one by "
                    f"one: {allowed}"
                )

    def init_cache(self, batch_size: int) -> base.PyTree:
        """Keys and values (L, of B, H, S, K each) and the number of tokens so far (B,)."""
        c = self.config
        shape = (batch_size, c.num_heads, c.seq_len, c.hidden_size // c.num_heads)
        zeros = jnp.zeros(shape, base.dtype_of(c.dtype))
        blocks = tuple((zeros, zeros) for _ in range(c.num_layers))
        return {"blocks": blocks, "position": jnp.zeros((batch_size,), jnp.int32)}

    def inject(self, h: jax.Array, cache: base.PyTree = None) -> base.PyTree:
        x = super().inject(h)
        if cache is None:
            return x
        if not isinstance(cache["position"], jax.core.Tracer):  # Traced: overflow gives NaN.
            self.check_sequential(int(cache["position"].max()) + h.shape[1])
        return {"x": x, "cache": cache}

    def init_state(self, x: base.PyTree, key: jax.Array | None) -> jax.Array:
        return super().init_state(x["x"] if isinstance(x, dict) else x, key)

    def step(self, x: base.PyTree, z: jax.Array) -> base.PyTree:
        """The blocks' output (B, T, D); with a cache also the cache after it."""
        if not isinstance(x, dict):
            return super().step(x, z)
        position, blocks = x["cache"]["position"], []

        def attend(mixer: Any, past: tuple[jax.Array, jax.Array]) -> Any:
            def g(v: jax.Array) -> jax.Array:
                out, (keys, values, _) = mixer(v, (*past, position))
                blocks.append((keys, values))
                return out

            return g

        mixers = [attend(m, past) for m, past in zip(self.token_mixers, x["cache"]["blocks"])]
        z = self.update(x["x"], z, mixers)
        return z, {"blocks": tuple(blocks), "position": position + z.shape[1]}

    def next_cache(self, x: base.PyTree, z: base.PyTree) -> base.PyTree:
        return z[1]

    def readout(self, h: jax.Array, x: base.PyTree, z: base.PyTree) -> jax.Array:
        return z[0] if isinstance(x, dict) else z


class Transformer(FPRM):
    """Embedding (and registers), L blocks, a linear head; no Q head."""

    config: TransformerConfig
    block: ClassVar[Any] = TransformerLayer

    def head(self, h: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        logits = self.lm_head(h[:, self.config.num_registers :])
        return logits.astype(jnp.float32), None


def fixed_loops(train: int, evaluation: int) -> dict[str, Any]:
    """Solver section that applies f a fixed number of times, without damping."""
    return {
        "train": {"halting": "never", "decay": 1.0, "max_steps": train},
        "eval": {"halting": "never", "decay": 1.0, "max_steps": evaluation},
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

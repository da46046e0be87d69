"""Golden checks of the FP-Mamba blocks; see golden_checks_fp for what is compared."""

from __future__ import annotations

from collections.abc import Callable

from fpr.models.fp_mamba import FPMambaConfig, FPMambaLayer
from fpr.solvers import Damped
from tests.golden_checks_fp import Arrays, check_block, mixer_fields, weights_of
from tests.reference.fp_mamba import FPMamba


def _fp_mamba_check(mixer: str, arg: str, glu_in_loop: bool = False) -> Callable[[Arrays], None]:
    def check(arrays: Arrays) -> None:
        width, d = arrays["u"].shape[-1], arrays["y_probe"].shape[-1]
        weights = weights_of(arrays)
        config = FPMambaConfig(
            vocab_size=2, seq_len=1, hidden_size=width, expand=d // width, weight_norm=False,
            conv="conv1d.weight" in weights, glu_in_loop=glu_in_loop,
            state_size=weights["A_log"].shape[1], dt_rank=weights["dt_proj.weight"].shape[1],
            mixer_arg="concat" if arg == "x" else arg,
            hidden_dependence=("b", "c") if arg == "x" else ("Q", "b", "c"),
            **mixer_fields(arrays, mixer),
        )  # fmt: skip
        solver = Damped(
            tolerance=1e-5, max_steps=400, step_size=0.99, decay=1.0, patience=15,
            halting="batch", stop_fraction=0.75, residual="best",
        )  # fmt: skip
        block = FPMamba(weights, arrays["u"], mixer=mixer, arg=arg, glu_in_loop=glu_in_loop)
        check_block(arrays, FPMambaLayer(config), {}, solver, block)

    return check


CHECKS: dict[str, Callable[[Arrays], None]] = {
    "block_fp_mamba_dplr": _fp_mamba_check("dplr", "symmetric"),
    "block_fp_mamba_householderproduct": _fp_mamba_check("householder", "concat"),
    "block_fp_mamba_kronecker": _fp_mamba_check("kronecker", "x"),
    "block_fp_mamba_glu_in_loop": _fp_mamba_check("householder", "concat", glu_in_loop=True),
}

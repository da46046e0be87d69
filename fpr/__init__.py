"""fpr: networks whose layer is a fixed point, in JAX/Flax. The public names."""

from fpr import adjoints, solvers
from fpr.delta import delta_rule
from fpr.fixed_point import Solution, Trace, fixed_point, trace
from fpr.fixed_point_scan import fixed_point_scan
from fpr.generate import (
    Generation,
    decode,
    generate,
    init_cache,
    prefill,
    sequential_difference,
)
from fpr.models.base import Output
from fpr.registry import apply, build, init, load
from fpr.scan import linear_scan, selective_scan
from fpr.ssd import ssd

__all__ = [
    "Generation",
    "Output",
    "Solution",
    "Trace",
    "adjoints",
    "apply",
    "build",
    "decode",
    "delta_rule",
    "fixed_point",
    "fixed_point_scan",
    "generate",
    "init",
    "init_cache",
    "linear_scan",
    "load",
    "prefill",
    "selective_scan",
    "sequential_difference",
    "solvers",
    "ssd",
    "trace",
]

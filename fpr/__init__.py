"""fpr: networks whose layer is a fixed point, in JAX/Flax. The public names."""

from fpr import adjoints, solvers
from fpr.fixed_point import Solution, Trace, fixed_point, trace
from fpr.models.base import Output
from fpr.registry import apply, build, init, load
from fpr.scan import linear_scan, selective_scan

__all__ = [
    "Output",
    "Solution",
    "Trace",
    "adjoints",
    "apply",
    "build",
    "fixed_point",
    "init",
    "linear_scan",
    "load",
    "selective_scan",
    "solvers",
    "trace",
]

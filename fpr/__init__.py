"""fpr: networks whose layer is a fixed point, in JAX/Flax. The public names."""

from fpr import adjoints, solvers
from fpr.delta import delta_rule
from fpr.fixed_point import Solution, Trace, fixed_point, trace
from fpr.models.base import Output
from fpr.registry import apply, build, init, load
from fpr.scan import linear_scan, selective_scan
from fpr.ssd import ssd

__all__ = [
    "Output",
    "Solution",
    "Trace",
    "adjoints",
    "apply",
    "build",
    "delta_rule",
    "fixed_point",
    "init",
    "linear_scan",
    "load",
    "selective_scan",
    "solvers",
    "ssd",
    "trace",
]

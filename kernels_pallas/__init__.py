"""Pallas kernels for scans on TPU (Mosaic) and GPU (Mosaic GPU); depends on JAX alone.

Every function takes platform="tpu" | "gpu"; `fpr.scan` chooses it at lowering.
"""

from kernels_pallas.common import supports_mosaic_gpu, supports_wgmma
from kernels_pallas.delta import delta_rule
from kernels_pallas.fused_fixed_point import Iterate, fused_fixed_point
from kernels_pallas.linear_scan import linear_scan, linear_scan_bwd
from kernels_pallas.selective_scan import selective_scan
from kernels_pallas.sharded import sharded_linear_scan
from kernels_pallas.ssd import ssd

__all__ = [
    "Iterate",
    "delta_rule",
    "fused_fixed_point",
    "linear_scan",
    "linear_scan_bwd",
    "selective_scan",
    "sharded_linear_scan",
    "ssd",
    "supports_mosaic_gpu",
    "supports_wgmma",
]

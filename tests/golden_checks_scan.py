"""Golden checks of the scans: `CHECKS` maps a reference file to a function of its arrays."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from fpr.scan import linear_scan, selective_scan
from tests.reference import scan as reference

OUTPUT, GRADIENT = 1e-5, 1e-4


def _assert_close(actual, expected, tolerance, what):
    scale = max(np.max(np.abs(expected)), 1e-30)
    error = np.max(np.abs(np.asarray(actual, np.float64) - expected)) / scale
    assert error <= tolerance, f"{what}: relative difference {error:.1e} > {tolerance:.0e}"


def check_linear_scan(arrays):
    h, last = reference.linear_scan(arrays["a"], arrays["x"])
    da, dx, _ = reference.linear_scan_grad(
        arrays["a"], arrays["x"], np.zeros_like(last), arrays["ct"], np.zeros_like(last)
    )
    for name, actual, tolerance in (("h", h, OUTPUT), ("da", da, GRADIENT), ("dx", dx, GRADIENT)):
        _assert_close(actual, arrays[name], tolerance, f"{name} (reference)")
    for backend in ("auto", "xla"):
        run = functools.partial(linear_scan, backend=backend)
        h, pull = jax.vjp(lambda a, x, run=run: run(a, x)[0], arrays["a"], arrays["x"])
        da, dx = pull(jnp.asarray(arrays["ct"]))
        _assert_close(h, arrays["h"], OUTPUT, f"h ({backend})")
        _assert_close(da, arrays["da"], GRADIENT, f"da ({backend})")
        _assert_close(dx, arrays["dx"], GRADIENT, f"dx ({backend})")


def check_selective_scan(arrays):
    """The arrays are channels first, (B, D, T) and (B, N, T); ours are time first."""
    time_first = {"u", "delta", "B", "C", "z"}
    names = ("u", "delta", "A", "B", "C", "D", "z", "delta_bias")

    def turned(name, value):
        return value.swapaxes(1, 2) if name in time_first else value

    inputs = {n: jnp.asarray(turned(n, arrays[n])) for n in names}
    y, last = reference.selective_scan(
        **{n: turned(n, arrays[n]) for n in names}, delta_softplus=True
    )
    _assert_close(y, arrays["y"].swapaxes(1, 2), OUTPUT, "y (reference)")
    _assert_close(last, arrays["last_state"], OUTPUT, "last state (reference)")
    for backend in ("auto", "xla"):

        def run(v, backend=backend):
            return selective_scan(**v, delta_softplus=True, backend=backend)

        (y, last), pull = jax.vjp(run, inputs)
        (grads,) = pull((jnp.asarray(arrays["ct"].swapaxes(1, 2)), jnp.zeros_like(last)))
        _assert_close(y, arrays["y"].swapaxes(1, 2), OUTPUT, f"y ({backend})")
        _assert_close(last, arrays["last_state"], OUTPUT, f"last state ({backend})")
        for n in names:
            expected = turned(n, arrays[f"d_{n}"])
            _assert_close(grads[n], expected, GRADIENT, f"d_{n} ({backend})")


CHECKS = {"linear_scan": check_linear_scan, "selective_scan": check_selective_scan}

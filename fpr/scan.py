"""Scans over time: one public function per recurrence, with its gradient rule.

The form is chosen by platform when a program is lowered, never by looking at the devices at hand.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from fpr import _scan_cpu
from fpr._dispatch import carry_type, check_backend, dispatch, same_manual_axes

Array = jax.Array

# -- linear_scan ----------------------------------------------------------------------------------


def _combine(left: tuple[Array, Array], right: tuple[Array, Array]) -> tuple[Array, Array]:
    """The steps h -> a h + x of left, then of right, as one step."""
    return left[0] * right[0], right[0] * left[1] + right[1]


def _first_last(x: Array, reverse: bool) -> tuple[Array, Array]:
    """The rows of (B, T, ...) that a scan reaches first and last."""
    return (x[:, -1], x[:, 0]) if reverse else (x[:, 0], x[:, -1])


def _associative(a: Array, x: Array, h0: Array, *, reverse: bool) -> tuple[Array, Array]:
    """linear_scan in O(log T) steps over whole arrays; about 2.5 temporary arrays."""
    wide = h0.dtype
    a_wide, x_wide = a.astype(wide), x.astype(wide)
    start = -1 if reverse else 0
    x_wide = x_wide.at[:, start].add(a_wide[:, start] * h0)
    h = lax.associative_scan(_combine, (a_wide, x_wide), reverse=reverse, axis=1)[1]
    return h.astype(x.dtype), _first_last(h, reverse)[1]


def _previous(x: Array, edge: Array, reverse: bool) -> Array:
    """x of the step before, `edge` (B, D) before the first."""
    edge = edge[:, None].astype(x.dtype)
    pair = (x[:, 1:], edge) if reverse else (edge, x[:, :-1])
    return jnp.concatenate(pair, axis=1)


def _scan_linear(reverse: bool, backend: str, a: Array, x: Array, h0: Array) -> tuple[Array, Array]:
    """The forward pass by the form that `backend` names; arguments as in `_linear`."""

    def pallas(a, x, h0, *, platform):
        import kernels_pallas

        return kernels_pallas.linear_scan(a, x, h0, reverse=reverse, platform=platform)

    xla = functools.partial(_associative, reverse=reverse)
    loop = functools.partial(_scan_cpu.linear_scan, reverse=reverse)
    return dispatch(
        backend,
        loop if x.shape[1] > 1 else xla,
        xla,
        pallas,
        (x, h0),
        a, x, h0,
    )  # fmt: skip


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _linear(reverse: bool, backend: str, a: Array, x: Array, h0: Array) -> tuple[Array, Array]:
    """h (B, T, D) in x's type and the last state (B, D) in h0's; a, x (B, T, D), h0 (B, D)."""
    return _scan_linear(reverse, backend, a, x, h0)


def _linear_fwd(reverse, backend, a, x, h0):
    h, last = _linear(reverse, backend, a, x, h0)
    return (h, last), (a, h, h0)


def _linear_bwd(reverse, backend, saved, cotangents):
    return _linear_grad(reverse, backend, *saved, *cotangents)


def _composed_grad(reverse, backend, a, h, h0, dh, dlast):
    """The gradient of `_linear` as another `_linear` and products.

    λ_t = dh_t + a_{t+1} λ_{t+1}, from λ = dlast with a = 1 after the end; dx_t = λ_t and
    da_t = λ_t h_{t-1}.
    """
    one = jnp.ones_like(h0, a.dtype)
    lam, _ = _linear(not reverse, backend, _previous(a, one, not reverse), dh, dlast)
    da = lam.astype(h0.dtype) * _previous(h.astype(h0.dtype), h0, reverse)
    dh0 = _first_last(a, reverse)[0].astype(h0.dtype) * _first_last(lam, reverse)[0]
    return da.astype(a.dtype), lam, dh0.astype(h0.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _linear_grad(reverse, backend, a, h, h0, dh, dlast):
    """da, dx, dh0 of `_linear`; itself differentiable to any order through `_composed_grad`."""

    def pallas(a, h, h0, dh, dlast, *, platform):
        import kernels_pallas

        return kernels_pallas.linear_scan_bwd(
            a, h, h0, dh, dlast, reverse=reverse, platform=platform
        )

    xla = functools.partial(_composed_grad, reverse, "xla")
    loop = functools.partial(_scan_cpu.linear_scan_grad, reverse=reverse)
    return dispatch(
        backend,
        loop if h.shape[1] > 1 else xla,
        xla,
        pallas,
        (a, h, h0),
        a, h, h0, dh, dlast,
    )  # fmt: skip


def _linear_grad_fwd(reverse, backend, *args):
    return _linear_grad(reverse, backend, *args), args


def _linear_grad_bwd(reverse, backend, args, cotangents):
    return jax.vjp(functools.partial(_composed_grad, reverse, backend), *args)[1](cotangents)


_linear.defvjp(_linear_fwd, _linear_bwd)
_linear_grad.defvjp(_linear_grad_fwd, _linear_grad_bwd)


def linear_scan(
    a: Array, x: Array, h0: Array | None = None, *, reverse: bool = False, backend: str = "auto"
) -> tuple[Array, Array]:
    """The diagonal linear recurrence h_t = a_t h_{t-1} + x_t along axis 1.

    Differentiable in a, x and h0 to any order (reverse mode; there is no forward-mode rule). The
    gradient keeps a, h and h0 only. The state is carried in float32 for narrower types.

    Args:
      a: (B, T, ...) decays, or any shape that broadcasts to x's.
      x: (B, T, ...) inputs.
      h0: (B, ...) state before the first step processed, or None for zero.
      reverse: h_t = a_t h_{t+1} + x_t instead, from the last step to the first.
      backend: "auto": a sequential loop on CPU, a Pallas kernel on TPU, the associative form
        elsewhere; chosen by platform at lowering. Or one form for every platform: "sequential",
        "xla" (associative) or "pallas" (this, or FPR_GPU_KERNELS=1 in the environment, chooses the
        GPU kernels until they have run on a card).

    Returns:
      h: (B, T, ...) in the common type of a and x.
      h_last: (B, ...) state after the last step processed, in the same type: h[:, -1], or h[:, 0]
        if reverse.

    Raises:
      ValueError: T = 0, shapes that do not match, types that are not floating, unknown backend.
    """
    check_backend(backend)
    a, x = jnp.asarray(a), jnp.asarray(x)
    dtype = jnp.result_type(a, x)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"a has type {a.dtype} and x {x.dtype}; the scan takes floating types")
    if x.ndim < 2 or a.ndim != x.ndim or any(m not in (1, n) for m, n in zip(a.shape, x.shape)):
        raise ValueError(f"a {a.shape} must broadcast to x {x.shape}, which must be (B, T, ...)")
    batch, time, *rest = x.shape
    if time == 0:
        raise ValueError(f"x {x.shape} has T = 0 steps; the scan takes T ≥ 1")
    state = (batch, *rest)
    if h0 is None:
        h0 = jnp.zeros(state, carry_type(dtype))
    if h0.shape != state:
        raise ValueError(f"h0 has shape {h0.shape}; x {x.shape} needs {state}")
    if 0 in state:
        return x.astype(dtype), h0.astype(dtype)
    flat = (batch, time, -1)
    args = same_manual_axes(
        jnp.broadcast_to(a, x.shape).astype(dtype).reshape(flat),
        x.astype(dtype).reshape(flat),
        h0.astype(carry_type(dtype)).reshape(batch, -1),
    )
    h, last = _linear(reverse, backend, *args)
    return h.reshape(x.shape), last.reshape(state).astype(dtype)


# -- selective_scan -------------------------------------------------------------------------------

_CHUNK = 32


def _in_blocks(x: Array, size: int, blocks: int) -> Array:
    """(B, T, n) as (blocks, B, size, n), zeros after the end."""
    pad = blocks * size - x.shape[1]
    x = jnp.pad(x, ((0, 0), (0, pad), (0, 0)))
    return x.reshape(x.shape[0], blocks, size, -1).swapaxes(0, 1)


def _from_blocks(x: Array, time: int) -> Array:
    """The inverse of `_in_blocks`."""
    return x.swapaxes(0, 1).reshape(x.shape[1], -1, x.shape[3])[:, :time]


def _block(
    u: Array, dt: Array, a: Array, b_in: Array, c_out: Array, h: Array
) -> tuple[Array, Array]:
    """y (B, size, D) and the next state of one block; its states exist only here."""
    u, dt, b_in, c_out = (v.astype(h.dtype) for v in (u, dt, b_in, c_out))
    decay = jnp.exp(dt[:, :, None, :] * a)
    x = b_in[:, :, :, None] * (dt * u)[:, :, None, :]
    x = x.at[:, 0].add(decay[:, 0] * h)
    states = lax.associative_scan(_combine, (decay, x), axis=1)[1]
    return jnp.einsum("btn,btnd->btd", c_out, states), states[:, -1]


def _selective_xla(
    u: Array, dt: Array, a: Array, b_in: Array, c_out: Array, h0: Array, *, keep: bool
) -> tuple[Array, ...]:
    """Blocks one after the other, an associative scan inside; differentiable to any order.

    Steps after the end have Δ = 0: they leave the state alone.
    """
    size, blocks = _scan_cpu.selective_length(u.shape[1], _CHUNK)

    def step(h, block):
        u_k, dt_k, b_k, c_k = block
        y, after = jax.checkpoint(_block)(u_k, dt_k, a, b_k, c_k, h)
        return after, (y.astype(u.dtype), h if keep else None)

    long = tuple(_in_blocks(v, size, blocks) for v in (u, dt, b_in, c_out))
    last, (y, kept) = lax.scan(step, h0, long)
    y = _from_blocks(y, u.shape[1])
    return (y, last, kept.swapaxes(0, 1)) if keep else (y, last)


def _selective_xla_grad(u, dt, a, b_in, c_out, kept, dy, dlast):
    """Gradients of `_selective_xla` from the kept states, the last block first."""
    time = u.shape[1]
    size, blocks = _scan_cpu.selective_length(time, _CHUNK)

    def step(carry, block):
        da, dh = carry
        u_k, dt_k, b_k, c_k, dy_k, h = block
        pull = jax.vjp(_block, u_k, dt_k, a, b_k, c_k, h)[1]
        du, ddt, da_k, db, dc, dh = pull((dy_k.astype(h.dtype), dh))
        return (da + da_k, dh), (du, ddt, db, dc)

    long = tuple(_in_blocks(v, size, blocks) for v in (u, dt, b_in, c_out, dy))
    carry = (jnp.zeros_like(a), dlast)
    (da, dh0), grads = lax.scan(step, carry, (*long, kept.swapaxes(0, 1)), reverse=True)
    du, ddt, db, dc = (_from_blocks(g, time) for g in grads)
    return du, ddt, da, db, dc, dh0


def _finish(y: Array, u: Array, ends: dict[str, Array]) -> Array:
    """(y + D u) silu(z) in u's type, with those of "D" (D,) and "z" (B, T, D) that `ends` holds."""
    if not ends:
        return y
    wide = carry_type(u.dtype)
    y = y.astype(wide)
    if "D" in ends:
        y = y + ends["D"].astype(wide) * u.astype(wide)
    if "z" in ends:
        y = y * jax.nn.silu(ends["z"].astype(wide))
    return y.astype(u.dtype)


def _selective_forms(
    backend: str, names: tuple[str, ...], keep: bool, u: Array, *rest: Array
) -> tuple[Array, ...]:
    """y, the last state and, if `keep`, what the gradient needs, by the form of `backend`.

    That is the states before each block and, if there is a gate, y before skip and gate.
    """
    h0 = rest[4]
    blocks = _scan_cpu.selective_length(u.shape[1], _CHUNK)[1]
    kept = jax.ShapeDtypeStruct((u.shape[0], blocks, *h0.shape[1:]), h0.dtype)
    outs: list[Array | jax.ShapeDtypeStruct] = [u, h0]
    if keep:
        outs += [kept, u] if "z" in names else [kept]

    def pallas(*args, platform):
        y, last = _pallas_selective(platform, names, *args)
        # The kernel's gradient uses h0 alone of what is kept.
        saved = (jnp.zeros_like(kept).at[:, 0].set(args[5]), jnp.zeros_like(u))
        return (y, last, *saved)[: len(outs)]

    def finished(form):
        def run(*args):
            raw, last, *states = form(*args[:6])
            y = _finish(raw, args[0], dict(zip(names, args[6:])))
            return (y, last, *states, raw)[: len(outs)]

        return run

    xla = finished(functools.partial(_selective_xla, keep=keep))
    loop = finished(functools.partial(_scan_cpu.selective_scan, chunk=_CHUNK, keep=keep))
    return dispatch(backend, loop if u.shape[1] > 1 else xla, xla, pallas, outs, u, *rest)


def _pallas_selective(platform, names, u, dt, a, b_in, c_out, h0, *ends):
    """The kernel, skip and gate included, with states as this file keeps them, channels last."""
    import kernels_pallas

    h0 = h0.swapaxes(1, 2)
    y, last = kernels_pallas.selective_scan(
        u, dt, a.T, b_in, c_out, h0=h0, platform=platform, **dict(zip(names, ends))
    )
    return y, last.swapaxes(1, 2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _selective(backend, names, u, dt, a, b_in, c_out, h0, *ends):
    """y, last state; u, dt (B, T, D), a (N, D), b_in, c_out (B, T, N), h0 (B, N, D) wide.

    `ends` are those of "D" (D,) and "z" (B, T, D) that `names` lists, in this order.
    """
    return _selective_forms(backend, names, False, u, dt, a, b_in, c_out, h0, *ends)


def _selective_fwd(backend, names, *args):
    y, last, *saved = _selective_kept(backend, names, *args)
    return (y, last), (args, saved)


def _selective_bwd(backend, names, residuals, cotangents):
    args, saved = residuals
    return _selective_grad(backend, names, *args[:5], saved[0], *cotangents, *args[6:], *saved[1:])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _selective_kept(backend, names, *args):
    """`_selective` that also returns what is kept; its own function for second derivatives."""
    return _selective_forms(backend, names, True, *args)


def _selective_kept_fwd(backend, names, *args):
    outs = _selective_kept(backend, names, *args)
    return tuple(outs), (args, outs[2:])


def _selective_kept_bwd(backend, names, residuals, cotangents):
    # Second derivatives take h0 alone from what is kept: no cotangent reaches the rest.
    dy, dlast, dkept, *_ = cotangents
    grads = _selective_bwd(backend, names, residuals, (dy, dlast))
    return *grads[:5], grads[5] + dkept[:, 0], *grads[6:]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _selective_grad(backend, names, u, dt, a, b_in, c_out, kept, dy, dlast, *tail):
    """Gradients of `_selective`; of kept[:, 0] = h0 in the sixth place.

    `tail` is `ends` and, if there is a gate, y before skip and gate.
    """

    def loop(*args):
        du, ddt, da, db, dc, dh0 = _scan_cpu.selective_scan_grad(*args, chunk=_CHUNK)
        return du, ddt, da.sum(0), db, dc, dh0

    def through_ends(form):
        def run(*args):
            u, dy, ends = args[0], args[6], dict(zip(names, args[8:]))
            # Without a gate the gradient does not depend on y.
            raw = args[-1] if "z" in names else jnp.zeros_like(u)
            draw, du_skip, dends = jax.vjp(_finish, raw, u, ends)[1](dy)
            du, *grads = form(*args[:6], draw, args[7])
            return du + du_skip, *grads, *(dends[name] for name in names)

        return run if names else form

    def pallas(u, dt, a, b_in, c_out, kept, dy, dlast, *tail, platform):
        # The kernel keeps its own states, so its forward pass runs again here.
        run = functools.partial(_pallas_selective, platform, names)
        ends = tail[: len(names)]
        return jax.vjp(run, u, dt, a, b_in, c_out, kept[:, 0], *ends)[1]((dy, dlast))

    xla = through_ends(_selective_xla_grad)
    sequential = through_ends(loop) if u.shape[1] > 1 else xla
    outs = (u, dt, a, b_in, c_out, dlast, *tail[: len(names)])
    args = (u, dt, a, b_in, c_out, kept, dy, dlast, *tail)
    return dispatch(backend, sequential, xla, pallas, outs, *args)


def _selective_grad_fwd(backend, names, *args):
    return _selective_grad(backend, names, *args), args


def _selective_grad_bwd(backend, names, args, cotangents):
    def run(u, *rest):
        y, last = _selective_xla(u, *rest[:5], keep=False)
        return _finish(y, u, dict(zip(names, rest[5:]))), last

    def composed(u, dt, a, b_in, c_out, kept, dy, dlast, *tail):
        ends = tail[: len(names)]
        return jax.vjp(run, u, dt, a, b_in, c_out, kept[:, 0], *ends)[1]((dy, dlast))

    return jax.vjp(composed, *args)[1](tuple(cotangents))


_selective.defvjp(_selective_fwd, _selective_bwd)
_selective_kept.defvjp(_selective_kept_fwd, _selective_kept_bwd)
_selective_grad.defvjp(_selective_grad_fwd, _selective_grad_bwd)


def selective_scan(
    u: Array,
    delta: Array,
    A: Array,
    B: Array,
    C: Array,
    D: Array | None = None,
    z: Array | None = None,
    h0: Array | None = None,
    *,
    delta_bias: Array | None = None,
    delta_softplus: bool = False,
    backend: str = "auto",
) -> tuple[Array, Array]:
    """Mamba's scan: h_t = exp(Δ_t A) h_{t-1} + Δ_t u_t B_t, y_t = (C_t·h_t + D u_t) silu(z_t).

    Δ = delta + delta_bias, through softplus if `delta_softplus` (Gu and Dao, arXiv 2312.00752).
    States exist for one block of time at a time, never as (B, T, D, N). Differentiable in every
    array to any order; the gradient keeps the inputs and one state per block of 32 steps.

    Args:
      u: (B, T, D) input.
      delta: (B, T, D) step sizes before bias and softplus.
      A: (D, N) decay rates, negative for a stable state.
      B, C: (B, T, N) input and output maps of each step.
      D: (D,) skip weights, or None for none.
      z: (B, T, D) gate, or None for none.
      h0: (B, D, N) state before the first step, or None for zero.
      delta_bias: (D,), or None for zero.
      delta_softplus: pass delta + delta_bias through softplus.
      backend: "auto": a sequential loop on CPU, a Pallas kernel where there is one, blocks with an
        associative scan inside elsewhere; chosen by platform at lowering. Or one form for every
        platform: "sequential", "xla" or "pallas".

    Returns:
      y: (B, T, D) in u's type.
      h_last: (B, D, N) state after the last step, in at least float32.

    Raises:
      ValueError: T = 0, shapes that do not match, u that is not floating, unknown backend.
    """
    check_backend(backend)
    u, delta, A, B, C = (jnp.asarray(v) for v in (u, delta, A, B, C))
    if u.ndim != 3 or A.ndim != 2 or not jnp.issubdtype(u.dtype, jnp.floating):
        raise ValueError(f"u {u.dtype}{u.shape} must be floating (B, T, D), A {A.shape} be (D, N)")
    batch, time, dim = u.shape
    if time == 0:
        raise ValueError(f"u {u.shape} has T = 0 steps; the scan takes T ≥ 1")
    n = A.shape[1]
    wanted = {
        "delta": (delta, u.shape), "A": (A, (dim, n)), "B": (B, (batch, time, n)),
        "C": (C, (batch, time, n)), "D": (D, (dim,)), "z": (z, u.shape),
        "h0": (h0, (batch, dim, n)), "delta_bias": (delta_bias, (dim,)),
    }  # fmt: skip
    for name, (value, shape) in wanted.items():
        if value is not None and value.shape != shape:
            raise ValueError(f"{name} has shape {value.shape}; u {u.shape}, N={n} need {shape}")
    wide = carry_type(u.dtype)
    if delta_bias is not None or delta_softplus:
        delta = delta.astype(wide)
    if delta_bias is not None:
        delta = delta + delta_bias.astype(wide)
    if delta_softplus:
        delta = jax.nn.softplus(delta)
    h0 = jnp.zeros((batch, dim, n), wide) if h0 is None else h0.astype(wide)
    ends = {} if D is None else {"D": jnp.asarray(D).astype(wide)}
    if z is not None:
        ends["z"] = jnp.asarray(z).astype(jnp.result_type(z, u))
    if 0 in h0.shape:
        return _finish(jnp.zeros_like(u), u, ends), h0
    state = h0.swapaxes(1, 2)
    args = same_manual_axes(u, delta, A.astype(wide).T, B, C, state, *ends.values())
    y, last = _selective(backend, tuple(ends), *args)
    return y, last.swapaxes(1, 2)

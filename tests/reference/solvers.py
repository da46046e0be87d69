"""The damped solvers of both papers in plain NumPy float64, one sample and one token at a time."""

import numpy as np


def residual(new, old):
    """max over tokens of ‖new - old‖_∞ / (‖new‖_∞ + 1e-8) of one sample (T, D)."""
    worst = 0.0
    for t in range(new.shape[0]):
        change = np.max(np.abs(new[t] - old[t])) / (np.max(np.abs(new[t])) + 1e-8)
        worst = max(worst, change)
    return worst


def fprm_trajectory(f, z0, tolerance, decay, patience, iterations, step_size=1.0):
    """FPOPT (spec 2 section 2) without halting: per-iteration z, residual, step size, patience.

    f maps (B, T, D) to (B, T, D); samples are treated one by one.
    """
    z = np.array(z0, np.float64)
    b = z.shape[0]
    eta, p, best = np.full(b, step_size), np.full(b, float(patience)), np.full(b, np.inf)
    zs, rs, etas, ps = [], [], [], []
    for _ in range(iterations):
        new = f(z)
        r = np.array([residual(new[i], z[i]) for i in range(b)])
        for i in range(b):
            z[i] = eta[i] * new[i] + (1 - eta[i]) * z[i]
            if r[i] < best[i]:
                best[i], p[i] = r[i], patience
            else:
                p[i] -= 1
            if p[i] <= 0 and r[i] >= tolerance:
                eta[i], p[i] = decay * eta[i], patience
        zs.append(z.copy())
        rs.append(r)
        etas.append(eta.copy())
        ps.append(p.copy())
    return np.array(zs), np.array(rs), np.array(etas), np.array(ps)


def fp_rnn_solve(f, y0, tolerance, step_size, decay, patience, cap, outliers):
    """Batch-wide halting of spec 1 section 4: final y, best residuals, step sizes per iteration."""
    y = np.array(y0, np.float64)
    b = y.shape[0]
    s, p, best = np.full(b, step_size), np.full(b, patience), np.full(b, np.inf)
    bests, sizes = [], []
    for _ in range(cap):
        new = f(y)
        for i in range(b):
            r = residual(new[i], y[i])
            y[i] = s[i] * new[i] + (1 - s[i]) * y[i]
            if r < best[i]:
                best[i], p[i] = r, patience
            else:
                p[i] -= 1
            if p[i] <= 0:
                s[i], p[i] = s[i] * decay, patience
        bests.append(best.copy())
        sizes.append(s.copy())
        if np.quantile(best, 1 - outliers) < tolerance or np.max(s) < 1e-3:
            break
    return y, np.array(bests), np.array(sizes)

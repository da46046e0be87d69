"""Token losses of spec 2 section 3 in NumPy float64, one token at a time."""

import numpy as np

IGNORED = -100


def stablemax(x):
    """s(x) = x+1 for x >= 0, 1/(1-x) below; probabilities s / sum(s). x: (V,)."""
    s = np.array([v + 1.0 if v >= 0 else 1.0 / (1.0 - v) for v in np.asarray(x, np.float64)])
    return s / s.sum()


def softmax(x):
    x = np.asarray(x, np.float64)
    e = np.exp(x - x.max())
    return e / e.sum()


def cross_entropy(probabilities, logits, labels):
    """-log probability of each label; logits (..., V), labels (...); 0 where ignored."""
    out = np.zeros(labels.shape)
    for index in np.ndindex(labels.shape):
        if labels[index] != IGNORED:
            out[index] = -np.log(probabilities(logits[index])[labels[index]])
    return out


def stablemax_gradient(logits, labels):
    """Gradient of the summed stablemax cross entropy: s'(x_j) (1/sum(s) - [j = label]/s_j)."""
    out = np.zeros(logits.shape)
    for index in np.ndindex(labels.shape):
        if labels[index] == IGNORED:
            continue
        x = np.asarray(logits[index], np.float64)
        s = np.array([v + 1.0 if v >= 0 else 1.0 / (1.0 - v) for v in x])
        ds = np.array([1.0 if v >= 0 else 1.0 / (1.0 - v) ** 2 for v in x])
        for j in range(len(x)):
            out[index][j] = ds[j] / s.sum() - (ds[j] / s[j] if j == labels[index] else 0.0)
    return out

"""LSTM (Hochreiter & Schmidhuber 1997, with a forget gate) in plain NumPy float64.

Parameters are Flax's: input kernels ii, if, ig, io and recurrent hi, hf, hg, ho with the biases.
"""

import numpy as np

from tests.reference.fprm import sigmoid


def block(params, u):
    """What an LSTM layer adds to the stream, one sample (T, D)."""
    cell = params["lstm"]["cell"]
    width = cell["hi"]["bias"].shape[0]
    h, c = np.zeros(width), np.zeros(width)
    rows = []
    for x in u:
        i, f, g, o = (
            x @ cell[f"i{gate}"]["kernel"]
            + h @ cell[f"h{gate}"]["kernel"]
            + cell[f"h{gate}"]["bias"]
            for gate in "ifgo"
        )
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        h = sigmoid(o) * np.tanh(c)
        rows.append(h)
    return np.stack(rows) @ params["out_proj"]["kernel"]

"""Random numbers as pure functions of names and counters: no generator state, nothing to save.

A stream has a key made from names (`stream_key`); its values are hashes of key and counter, so that
example 10^9 costs as much as example 0 and two machines draw the same.
"""

from __future__ import annotations

import hashlib

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def hash64(counter: np.ndarray) -> np.ndarray:
    """SplitMix64's output function: uint64 counters to well-mixed uint64 values."""
    x = counter * _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def stream_key(*parts: object) -> np.uint64:
    """A 64-bit key for the stream named by `parts`; different parts, unrelated streams."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return np.uint64(int.from_bytes(digest, "little"))


def draws(key: np.uint64, index: np.ndarray, count: int) -> np.ndarray:
    """`count` values of a stream for each index.

    Args:
      key: from `stream_key`.
      index: (B,) non-negative integers.
      count: values per index.

    Returns:
      (B, count) uint64.
    """
    rows = hash64(key ^ hash64(index.astype(np.uint64)))
    return hash64(rows[:, None] + np.arange(1, count + 1, dtype=np.uint64))


def permutations(values: np.ndarray) -> np.ndarray:
    """Random permutations of 0..n-1 along the last axis of (..., n) random values."""
    return np.argsort(values, axis=-1, kind="stable")


def epochs(seed: int, size: int, position: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Walks through `size` examples epoch by epoch, each epoch in another order.

    Within an epoch the order is i -> (a i + b) mod size with a coprime to size.

    Args:
      seed: seed of the orders.
      size: number of examples.
      position: (B,) numbers of the examples seen since the start of training.

    Returns:
      (B,) epoch and (B,) index of the example, in 0..size-1.
    """
    epoch, index = np.divmod(position, size)
    shuffled = np.empty_like(index)
    for e in np.unique(epoch):
        rng = np.random.Generator(np.random.Philox(key=[seed, int(e)]))
        a, b = int(rng.integers(1, size + 1)), int(rng.integers(size))
        while np.gcd(a, size) != 1:
            a = a % size + 1
        mine = epoch == e
        shuffled[mine] = (index[mine] * a + b) % size
    return epoch, shuffled

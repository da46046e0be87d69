"""Finite groups as multiplication tables, looked up by names such as `S5`, `A4`, `Z60` or `Z2xS3`.

Elements are the integers 0..n-1 and element 0 is the identity.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re

import numpy as np

MAX_ORDER = 5040  # S7; the int16 table of the largest group takes 51 MB


@dataclasses.dataclass(frozen=True)
class Group:
    """A finite group.

    Attributes:
      name: canonical name, for example "A5" or "Z2xS3".
      table: (n, n) int16, `table[p, q]` is the product p·q. For permutations p·q means
        "first p, then q": (p·q)[i] = q[p[i]].
    """

    name: str
    table: np.ndarray

    @property
    def order(self) -> int:
        """Number of elements."""
        return len(self.table)


def _permutations(n: int, even_only: bool) -> np.ndarray:
    """All (even) permutations of 0..n-1 in lexicographic order, (order, n)."""
    perms = np.array(list(itertools.permutations(range(n))), np.int64).reshape(-1, n)
    if even_only:
        inversions = np.zeros(len(perms), np.int64)
        for i, j in itertools.combinations(range(n), 2):
            inversions += perms[:, i] > perms[:, j]
        perms = perms[inversions % 2 == 0]
    return perms


def _permutation_table(n: int, even_only: bool) -> np.ndarray:
    perms = _permutations(n, even_only)
    weights = n ** np.arange(n)[::-1]  # a permutation read as a number in base n, so sorted
    codes = perms @ weights
    table = np.empty((len(perms), len(perms)), np.int16)
    for p, perm in enumerate(perms):
        table[p] = np.searchsorted(codes, perms[:, perm] @ weights)  # (p·q)[i] = q[p[i]]
    return table


def _cyclic_table(n: int) -> np.ndarray:
    i = np.arange(n)
    return ((i[:, None] + i[None, :]) % n).astype(np.int16)


def _product_table(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Table of the direct product; the pair (g, h) is element g·|H| + h."""
    m = len(second)
    table = first[:, None, :, None].astype(np.int32) * m + second[None, :, None, :]
    return table.reshape(len(first) * m, -1).astype(np.int16)


def _factor_order(kind: str, n: int) -> int:
    return {"S": math.factorial(n), "A": max(1, math.factorial(n) // 2), "Z": n}[kind]


def canonical_name(name: str) -> str:
    """Returns the name as the library spells it ("z2xs3" -> "Z2xS3").

    Raises:
      ValueError: if the name is not that of a supported group, or the group is too large.
    """
    allowed = "allowed: S<n>, A<n>, Z<n> and direct products such as Z2xS3"
    parts = re.split("[x×*]", name.strip().lower()) if isinstance(name, str) else []
    factors = [re.fullmatch(r"([saz])_?([1-9]\d{0,5})", part) for part in parts]
    if not factors or not all(factors):
        raise ValueError(f"unknown group {name!r}; {allowed}")
    kinds = [(m.group(1).upper(), int(m.group(2))) for m in factors if m]
    order = 1
    for kind, n in kinds:
        # 12! is far past the limit; stopping there keeps S99999 from computing a factorial.
        order *= _factor_order(kind, n if kind == "Z" else min(n, 12))
    if order > MAX_ORDER:
        raise ValueError(
            f"group {name!r} has more than {MAX_ORDER} elements, too many for a multiplication "
            "table and for one token per element; the largest are S7 (5040), A7 (2520), Z5040"
        )
    return "x".join(f"{kind}{n}" for kind, n in kinds)


@functools.cache
def group(name: str) -> Group:
    """Builds the group called `name`: "S5", "A5", "Z60", "Z2xS3".

    Raises:
      ValueError: if the name is unknown or the group has more than `MAX_ORDER` elements.
    """
    name = canonical_name(name)
    tables = []
    for part in name.split("x"):
        kind, n = part[0], int(part[1:])
        if kind == "Z":
            tables.append(_cyclic_table(n))
        else:
            tables.append(_permutation_table(n, even_only=kind == "A"))
    table = functools.reduce(_product_table, tables)
    table.setflags(write=False)
    return Group(name, table)

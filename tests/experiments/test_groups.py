import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.tasks import groups

NAMES = ("S1", "S2", "S3", "S4", "S5", "A3", "A4", "A5", "Z1", "Z2", "Z7", "Z60", "Z2xS3", "A4xZ5")


@st.composite
def group_elements(draw):
    group = groups.group(draw(st.sampled_from(NAMES)))
    element = st.integers(0, group.order - 1)
    return group, draw(element), draw(element), draw(element)


@settings(max_examples=200, deadline=None)
@given(group_elements())
def test_axioms(case):
    group, a, b, c = case
    t = group.table
    assert t[t[a, b], c] == t[a, t[b, c]]
    assert t[0, a] == t[a, 0] == a
    inverse = int(np.argmax(t[a] == 0))
    assert t[a, inverse] == t[inverse, a] == 0


@pytest.mark.parametrize("name", NAMES)
def test_rows_and_columns_are_permutations(name):
    t = groups.group(name).table
    everyone = np.arange(len(t))
    assert (np.sort(t, axis=0) == everyone[:, None]).all()
    assert (np.sort(t, axis=1) == everyone).all()


@pytest.mark.parametrize(
    ("name", "order"), [("S3", 6), ("A4", 12), ("S5", 120), ("A5", 60), ("Z60", 60), ("Z2xS3", 12)]
)
def test_order(name, order):
    assert groups.group(name).order == order


def test_only_cyclic_groups_commute():
    commutes = {n: (groups.group(n).table == groups.group(n).table.T).all() for n in NAMES}
    assert {n for n, yes in commutes.items() if yes} == {"S1", "S2", "A3", "Z1", "Z2", "Z7", "Z60"}


def test_permutations_compose_left_to_right():
    perms = [p for p in itertools.permutations(range(4))]
    t = groups.group("S4").table
    for p, q in [(1, 5), (7, 20), (23, 11)]:
        assert perms[t[p, q]] == tuple(perms[q][perms[p][i]] for i in range(4))


@pytest.mark.parametrize("name", ["a5", " A5 ", "A_5"])
def test_spelling(name):
    assert groups.group(name).name == "A5"


@pytest.mark.parametrize("name", ["", "D4", "A", "5", "A0", "Z-3", "S3x", "xZ2", 5, None])
def test_unknown_name(name):
    with pytest.raises(ValueError, match="unknown group"):
        groups.group(name)


@pytest.mark.parametrize("name", ["S8", "A8", "Z5041", "S99999", "S6xZ8", "S6xS6xS6"])
def test_too_large(name):
    with pytest.raises(ValueError, match="more than 5040 elements"):
        groups.group(name)

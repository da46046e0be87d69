"""Modular arithmetic: the value mod 5 of an expression such as `2*(3+4)-1=` (spec 1 section 6).

`*` binds tighter than `+` and `-`, which go from left to right. Every expression has a digit more
than it has operators, so that its length with the `=` is even.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from experiments.tasks.answer import AnswerTask

MODULUS = 5
SYMBOLS = "01234+-*()="


def expression(length: int, brackets: bool, rng: np.random.Generator) -> str:
    """A random expression of `length` characters, an odd number.

    The first term of an expression is a digit or a bracket of a random size; so is the last one. A
    bracket always holds an operator and never just another bracket.

    Args:
      length: its characters.
      brackets: whether it may have any.
      rng: random numbers.
    """
    random = iter(rng.random(2 * length).tolist())

    def choose(options: str) -> str:
        return options[int(next(random) * len(options))]

    # Texts to write and sizes of expressions to expand, the next one last. A negative size is that
    # of an expression which may be one whole bracket: one that follows an operator.
    todo: list[int | str] = [length]
    out: list[str] = []
    while todo:
        item = todo.pop()
        if isinstance(item, str):
            out.append(item)
            continue
        size = abs(item)
        if size == 1:
            out.append(choose(SYMBOLS[:MODULUS]))
            continue
        # Sizes of the first term: 1, or 5 and more, at least 2 less than all; or all of it.
        sizes = max(0, (size - 5) // 2) if brackets else 0
        whole = brackets and item < 0 and size >= 5
        which = int(next(random) * (1 + sizes + whole))
        if which == 0:
            todo += [2 - size, choose("+-*"), choose(SYMBOLS[:MODULUS])]
        elif which <= sizes:
            first = 3 + 2 * which
            todo += [first + 1 - size, choose("+-*"), ")", first - 2, "("]
        else:
            todo += [")", size - 2, "("]
    return "".join(out)


def value(text: str) -> int:
    """The value mod 5 of an expression, without `=`."""
    total, product = 0, 1  # sum of the finished terms; the present term with its sign
    outer: list[tuple[int, int]] = []
    for character in text:
        if character == "(":
            outer.append((total, product))
            total, product = 0, 1
        elif character == ")":
            inside = total + product
            total, product = outer.pop()
            product = product * inside % MODULUS
        elif character in "+-":
            total, product = total + product, 1 if character == "+" else -1
        elif character != "*":
            product = product * int(character) % MODULUS
    return (total + product) % MODULUS


@dataclasses.dataclass(frozen=True)
class Arithmetic(AnswerTask):
    """Arithmetic mod 5.

    Attributes:
      brackets: whether expressions have brackets.
    """

    brackets: bool = True

    @property
    def answers(self) -> int:
        return MODULUS

    @property
    def symbols(self) -> str:
        return SYMBOLS  # the same 12 token ids with and without brackets

    @property
    def stride(self) -> int:
        return 2

    @property
    def name(self) -> str:
        return f"arithmetic mod {MODULUS} {'with' if self.brackets else 'without'} brackets"

    def questions(
        self, key: np.uint64, index: np.ndarray, lengths: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        tokens = np.zeros((len(index), max(lengths)), np.int32)
        answers = np.zeros(len(index), np.int64)
        for row, (number, length) in enumerate(zip(index.tolist(), lengths.tolist())):
            rng = np.random.Generator(np.random.Philox(key=[int(key), number]))
            text = expression(length - 1, self.brackets, rng)
            tokens[row, : length - 1] = [SYMBOLS.index(c) + 1 for c in text]
            answers[row] = value(text)
        return tokens, answers

"""Formal languages with one answer at the end: parity, even pairs, cycle navigation (spec 1).

parity: is the number of ones odd. even_pairs: is the number of neighbours that differ odd.
cycle_navigation: where on a cycle of 5 places one ends after steps of 0, +1 and -1 from place 0.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from experiments.tasks import streams
from experiments.tasks.answer import AnswerTask

PLACES = 5
# Symbols (answers first, `=` last) and number of answers of each language.
LANGUAGES = {
    "parity": ("01=", 2),
    "even_pairs": ("01=", 2),
    "cycle_navigation": ("01234.+-=", PLACES),
}


@dataclasses.dataclass(frozen=True)
class Formal(AnswerTask):
    """One formal language.

    Attributes:
      language: "parity", "even_pairs" or "cycle_navigation".
    """

    language: str = "parity"

    def __post_init__(self) -> None:
        if self.language not in LANGUAGES:
            raise ValueError(
                f"unknown task.language {self.language!r}; valid: {', '.join(LANGUAGES)}"
            )
        super().__post_init__()

    @property
    def answers(self) -> int:
        return LANGUAGES[self.language][1]

    @property
    def symbols(self) -> str:
        return LANGUAGES[self.language][0]

    @property
    def name(self) -> str:
        return self.language.replace("_", " ")

    def questions(
        self, key: np.uint64, index: np.ndarray, lengths: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        cycle = self.language == "cycle_navigation"
        drawn = streams.draws(key, index, max(lengths) - 1)
        values = (drawn % np.uint64(3 if cycle else 2)).astype(np.int64)
        counts = np.arange(max(lengths) - 1) < lengths[:, None] - 1
        if cycle:
            moves = np.array([0, 1, -1])[values]
            return values + PLACES + 1, (moves * counts).sum(axis=1) % PLACES
        if self.language == "parity":
            return values + 1, (values * counts).sum(axis=1) % 2
        pairs = values[:, 1:] != values[:, :-1]
        return values + 1, (pairs & counts[:, 1:]).sum(axis=1) % 2

"""The papers' tables: rows with the paper's numbers, and which runs of ours belong to each.

Numbers marked paper are those of arXiv 2503.10799 (spec 1 section 7) and 2606.18206 (spec 2 section
6); `experiments.report` puts the runs beside them. A run belongs to a row by its config alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

Flat = Mapping[str, Any]  # {"model.name": "fprm", ...}, lists as tuples
Result = Mapping[str, Any]  # result.json


@dataclasses.dataclass(frozen=True)
class Row:
    """A row.

    Attributes:
      label: its name.
      paper: the paper's number as text, "" where it gives none.
      where: flat config keys with the value that a run of this row has; a set accepts any of its
        values.
    """

    label: str
    paper: str
    where: Mapping[str, Any]

    def matches(self, config: Flat) -> bool:
        """Whether a run with this config belongs here."""
        for key, wanted in self.where.items():
            allowed = wanted if isinstance(wanted, set | frozenset) else {wanted}
            if _comparable(config.get(key)) not in {_comparable(value) for value in allowed}:
                return False
        return True


def _comparable(value: Any) -> Any:
    """Lists in a config are sets of names here: their order says nothing."""
    return tuple(sorted(map(str, value))) if isinstance(value, tuple) else value


@dataclasses.dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
      title: what it shows.
      metric: names of the result, the first that it has is compared: a share by length.
      lengths: which of the evaluated lengths count: (config, lengths) -> those to show, ascending.
      rows: the rows.
      scale: 100 for percent.
      note: what else a reader must know.
      figure: what is drawn: "length" (the metric by length), "budget" (accuracy by layers) or
        "rows" (one bar a row).
    """

    title: str
    metric: tuple[str, ...]
    lengths: Callable[[Flat, list[int]], list[int]]
    rows: tuple[Row, ...]
    scale: float = 1.0
    note: str = ""
    figure: str = "rows"


def longest(config: Flat, lengths: list[int]) -> list[int]:
    """The longest evaluated length."""
    return lengths[-1:]


def every(config: Flat, lengths: list[int]) -> list[int]:
    """All evaluated lengths."""
    return lengths


def twice(config: Flat, lengths: list[int]) -> list[int]:
    """The evaluated length that is nearest to twice the training length."""
    return [min(lengths, key=lambda n: abs(n - 2 * config["task.length"]))]


def _copy(label: str, paper: str, *depends: str) -> Row:
    return Row(
        label,
        paper,
        {
            "task.name": "copy",
            "model.name": "fp_mamba",
            "model.hidden_dependence": depends,
        },
    )


COPY = Table(
    title="Copying strings of twice the training length, by what depends on shift(y)",
    metric=("string_accuracy",),
    lengths=twice,
    rows=(
        _copy("none", ".11 ± .00"),
        _copy("λ", ".53 ± .02", "lambda"),
        _copy("Q", ".45 ± .05", "Q"),
        _copy("λ, Q", ".55 ± .05", "lambda", "Q"),
        _copy("b, c", ".81 ± .01", "b", "c"),
        _copy("b, c, λ", ".88 ± .01", "lambda", "b", "c"),
        _copy("b, c, Q (the code's default)", ".86 ± .02", "Q", "b", "c"),
        _copy("all", ".94 ± .03", "lambda", "Q", "b", "c"),
        Row("Mamba", "", {"task.name": "copy", "model.name": "mamba"}),
        Row("Gated DeltaNet", "", {"task.name": "copy", "model.name": "deltanet"}),
    ),
    note="whole strings right, teacher-forced; paper: FP-Mamba with the Householder mixer. The "
    "paper names .53 and .45, and .88 and .86, for one of λ and Q without saying which is which.",
)


def _arithmetic(label: str, paper: str, brackets: bool, **model: Any) -> Row:
    where = {f"model.{key}": value for key, value in model.items()}
    return Row(label, paper, {"task.name": "arithmetic", "task.brackets": brackets, **where})


def _arithmetic_rows(brackets: bool, paper: tuple[str, ...]) -> tuple[Row, ...]:
    models: dict[str, dict[str, Any]] = {
        "Transformer": {"name": "transformer"},
        "mLSTM": {"name": "mlstm"},
        "sLSTM": {"name": "slstm"},
        "Mamba": {"name": "mamba"},
        "DeltaNet": {"name": "deltanet", "num_householder": 1},
        "Gated DeltaProduct": {"name": "deltanet", "num_householder": 2, "decay": True},
        "FP-Mamba, Householder r=4": {"name": "fp_mamba", "mixer_rank": 4},
    }
    return tuple(
        _arithmetic(label, number, brackets, **model)
        for (label, model), number in zip(models.items(), paper, strict=True)
    )


ARITHMETIC = Table(
    title="Arithmetic mod 5 with brackets",
    metric=("scaled_accuracy",),
    lengths=longest,
    rows=_arithmetic_rows(True, (".025", ".034", ".173", ".136", ".200", ".342", ".384")),
    note="(accuracy - 1/5) / (4/5) at the longest evaluated length; paper: 2 layers, width 128, "
    "lengths 40-256.",
)
ARITHMETIC_PLAIN = Table(
    title="Arithmetic mod 5 without brackets",
    metric=("scaled_accuracy",),
    lengths=longest,
    rows=_arithmetic_rows(False, ("",) * 7),
    note="(accuracy - 1/5) / (4/5) at the longest evaluated length.",
)


def _catbabi() -> tuple[Row, ...]:
    paper = {
        "Mamba": ("78.28", "87.08", "86.51"),
        "FP-K": ("79.93", "84.16", ""),
        "FP-H r=1": ("81.32", "89.08", ""),
        "FP-H r=2": ("81.60", "87.47", ""),
        "FP-H r=3": ("80.79", "89.55", ""),
    }
    models: dict[str, dict[str, Any]] = {
        "Mamba": {"model.name": "mamba"},
        "FP-K": {"model.name": "fp_mamba", "model.mixer": "kronecker"},
        **{
            f"FP-H r={r}": {
                "model.name": "fp_mamba",
                "model.mixer": "householder",
                "model.mixer_rank": r,
            }
            for r in (1, 2, 3)
        },
    }
    return tuple(
        Row(
            f"{label}, {layers} layer{'s' if layers > 1 else ''}",
            number,
            {"task.name": "catbabi", "model.num_layers": layers, **models[label]},
        )
        for label, numbers in paper.items()
        for layers, number in zip((1, 2, 4), numbers)
        if number
    )


CATBABI = Table(
    title="catbAbI",
    metric=("qa_accuracy",),
    lengths=longest,
    rows=_catbabi(),
    scale=100,
    note="percent of answers right, 20 tasks, 200-token windows; paper: width 512.",
)

_WORD_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "FP-Mamba-1, Kronecker": (
        "best of the FP mixers",
        {"model.name": "fp_mamba", "model.mixer": "kronecker"},
    ),
    **{
        f"FP-Mamba-1, Householder r={r}": (
            "",
            {
                "model.name": "fp_mamba",
                "model.mixer": "householder",
                "model.mixer_rank": r,
            },
        )
        for r in (1, 2, 3, 4)
    },
    "FP-Mamba-1, DPLR": ("", {"model.name": "fp_mamba", "model.mixer": "dplr"}),
    "FP-Mamba-2": ("", {"model.name": "fp_mamba2"}),
    "FP-RNN, Kronecker": ("", {"model.name": "fp_rnn", "model.mixer": "kronecker"}),
    "FP-RNN, Householder": ("", {"model.name": "fp_rnn", "model.mixer": "householder"}),
    "Mamba": ("fails at 16", {"model.name": "mamba"}),
    "Mamba-2": ("fails at 16", {"model.name": "mamba2"}),
    "LSTM": ("solves", {"model.name": "lstm"}),
    "FPRM": ("", {"model.name": "fprm"}),
}
WORD_PROBLEM = Table(
    title="Word problems: accuracy on whole sequences by length",
    metric=("sequence_accuracy",),
    lengths=every,
    rows=tuple(
        Row(label, paper, {"task.name": "word_problem", **where})
        for label, (paper, where) in _WORD_MODELS.items()
    ),
    note="every running product of a sequence right; paper, A5 and S5 trained at 16: in words.",
    figure="length",
)


def _cap(label: str, paper: str, where: Mapping[str, Any]) -> Row:
    rnns = {"fp_mamba", "fp_mamba2", "fp_rnn"}
    return Row(label, paper, {"task.name": "word_problem", "model.name": rnns, **where})


CAPS = Table(
    title="Word problems: cap on the solver in training",
    metric=("sequence_accuracy",),
    lengths=every,
    rows=(
        *(
            _cap(
                f"cap {cap}",
                "falls when the cap is < 16" if cap < 16 else "",
                {"model.solver.train.max_steps": cap, "train.random_cap.distribution": "none"},
            )
            for cap in (2, 4, 8, 16, 32)
        ),
        _cap(
            "a random cap for each sequence, gamma", "", {"train.random_cap.distribution": "gamma"}
        ),
    ),
    note="model.solver.train.max_steps of fixed-point RNNs, and train.random_cap below it; paper: "
    "A5 and S5 trained at 16.",
    figure="length",
)

_SUDOKU = {"task.name": "sudoku"}
_FPRM = {"model.name": "fprm", "model.base": "transformer"}  # the paper's own base
_NEVER: frozenset[str] = frozenset()  # a row for which the paper cites other papers


def _reasoners(task: str, where: Mapping[str, Any], paper: Mapping[str, str]) -> Iterator[Row]:
    ours = {"FPRM": "fprm", "TRM": "trm", "HRM": "hrm"}
    for label, number in paper.items():
        name = ours.get(label, _NEVER)
        cited = "" if label in ours else " (cited)"
        model = _FPRM if name == "fprm" else {"model.name": name}
        yield Row(f"{task}: {label}{cited}", number, {**where, **model})


REASONERS = Table(
    title="Reasoners",
    metric=("pass_at_2", "puzzle_accuracy"),
    lengths=longest,
    rows=(
        *_reasoners(
            "Sudoku",
            {"task.name": "sudoku"},
            {
                "FPRM": "94.2",
                "TRM": "74.7 reported, 72.6 again",
                "HRM": "55.0",
                "URM": "77.6",
                "EqR": "93.0",
                "SFPRM": "96.6",
            },
        ),
        *_reasoners(
            "mazes",
            {"task.name": "maze"},
            {"FPRM": "87.0", "TRM": "85.3 reported, 79.0 again", "HRM": "74.5", "SFPRM": "87.9"},
        ),
        *_reasoners(
            "ARC-1",
            {"task.name": "arc", "task.path": "arc-agi-1"},
            {"FPRM": "47.5", "TRM": "44.6 reported, 40.0 again", "HRM": "40.3"},
        ),
        *_reasoners(
            "ARC-2",
            {"task.name": "arc", "task.path": "arc-agi-2"},
            {"FPRM": "6.2", "TRM": "7.8 reported, 6.2 again", "HRM": "5.0"},
        ),
    ),
    scale=100,
    note="percent of whole puzzles; ARC: pass@2. Paper: Sudoku-Extreme (9×9), Maze-Hard (30×30); "
    "7M parameters, HRM 27M, URM 14M, EqR 5M. Compare only what has the same data.",
    figure="budget",
)


def _state_tracking() -> tuple[Row, ...]:
    paper = {
        ("FPRM", "A5"): "98.1 ± 2.2",
        ("FPRM", "S5"): "98.8 ± 0.9",
        ("TRM", "A5"): "45.8",
        ("TRM", "S5"): "39.4",
        ("TRM + convolution", "A5"): "91.4",
        ("TRM + convolution", "S5"): "97.2",
    }
    models: dict[str, dict[str, Any]] = {
        "FPRM": _FPRM,
        "TRM": {"model.name": "trm", "model.conv": "none"},
        "TRM + convolution": {"model.name": "trm", "model.conv": "conv1d"},
    }
    return tuple(
        Row(
            f"{label}, {group}",
            paper.get((label, group), ""),
            {"task.name": "word_problem", "task.group": group, **where},
        )
        for label, where in models.items()
        for group in ("A5", "S5", "S3", "A4", "Z2xS3")
    )


STATE_TRACKING = Table(
    title="State tracking with reasoners",
    metric=("sequence_accuracy",),
    lengths=longest,
    rows=_state_tracking(),
    scale=100,
    note="percent of whole sequences at the longest evaluated length; paper: trained at 32, tested "
    "at 128 within 320 layers.",
    figure="budget",
)
ALPHAS = Table(
    title="FPRM on Sudoku: start of the residual scales (α1, α2)",
    metric=("puzzle_accuracy",),
    lengths=longest,
    rows=tuple(
        Row(
            f"({a1}, {a2})",
            {(0.75, 0.25): "94.23", (0.25, 0.25): "83.44"}.get((a1, a2), ""),
            {**_SUDOKU, **_FPRM, "model.alpha_1": a1, "model.alpha_2": a2},
        )
        for a1 in (0.25, 0.75)
        for a2 in (0.25, 0.75)
    ),
    scale=100,
    note="percent of whole puzzles; paper: Sudoku-Extreme (9×9); compare only the same data.",
)
COMPARISON = Table(
    title="Reasoners and Transformers on Sudoku at an equal budget",
    metric=("puzzle_accuracy",),
    lengths=longest,
    rows=(
        Row(
            "FPRM",
            "94.2",
            {**_SUDOKU, **_FPRM, "model.alpha_1": 0.75, "model.alpha_2": 0.25},
        ),
        Row(
            "FPRM with another base",
            "",
            {
                **_SUDOKU,
                "model.name": "fprm",
                "model.base": {"mlp_mixer", "cnn", "mamba", "fp_rnn"},
                "model.alpha_1": 0.75,
                "model.alpha_2": 0.25,
            },
        ),
        Row("TRM", "74.7", {**_SUDOKU, "model.name": "trm"}),
        Row("HRM", "55.0", {**_SUDOKU, "model.name": "hrm"}),
        Row("looped Transformer, post-norm", "", {**_SUDOKU, "model.name": "looped_transformer"}),
        Row("deep Transformer", "", {**_SUDOKU, "model.name": "transformer"}),
    ),
    scale=100,
    note="percent of whole puzzles, with the effective layers and FLOPs that each spends; paper: "
    "Sudoku-Extreme (9×9); compare only the same data.",
    figure="budget",
)

TABLES: dict[str, Table] = {
    "copy": COPY,
    "arithmetic": ARITHMETIC,
    "arithmetic_plain": ARITHMETIC_PLAIN,
    "catbabi": CATBABI,
    "word_problem": WORD_PROBLEM,
    "caps": CAPS,
    "reasoners": REASONERS,
    "state_tracking": STATE_TRACKING,
    "alphas": ALPHAS,
    "comparison": COMPARISON,
}

"""Rebuilds a paper's table from finished runs: the paper's number beside ours, and the figure.

    python -m experiments.report TABLE --runs=DIR [DIR ...] [--out=DIR]

TABLE is one of `experiments.tables.TABLES`. A DIR is a workdir, one of its evaluations, the folder
`evaluations/` of them, or a folder of workdirs. Runs that differ in nothing but their seed share a
line: median, range and number of seeds. A model whose Q head may end its segments has a second line
for that (ACT at inference). The table and its figure go to --out (default: reports) as TABLE.md and
TABLE.png; where the figure is about budgets, TABLE_by_MEASURE.png shows accuracy, effective layers
and FLOPs against each measure of difficulty that the runs have.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from experiments import cli, plots, table_plots
from experiments import config as configs
from experiments.errors import UserError, unknown
from experiments.identity import data_name
from experiments.tables import TABLES, Row, Table
from experiments.tasks.arc_files import PUBLIC

# These differ between runs of one line, unless an evaluation of the row overrides them.
NOT_TOLD = ("seed", "eval.", "checkpoint.", "train.log_every")
COLUMNS = (
    "model", "length", "paper", "ours", "seeds", "layers", "MFLOPs", "parameters", "apart by",
    "data",
)  # fmt: skip
ACT = "ACT at inference"  # what sets apart the line of examples that the Q head ended
EFFORT = ("effective_layers", "flops_per_example")
SHOWN = 7  # columns on the terminal, with the data below the model; the page has them all


@dataclasses.dataclass(frozen=True)
class Finished:
    """A finished run or evaluation: its directory, flat config and result.json."""

    path: Path
    config: Mapping[str, Any]
    result: Mapping[str, Any]

    @property
    def lengths(self) -> list[int]:
        """Evaluated lengths, ascending."""
        return sorted(int(n) for n in self.result["examples"])

    def signature(self, overridden: Collection[str]) -> Mapping[str, Any]:
        """The config without what may differ within a line, and the hash of the evaluated data.

        Args:
          overridden: keys that are kept, as an evaluation has another value of them than its run.
        """
        kept = {
            k: v for k, v in self.config.items() if k in overridden or not k.startswith(NOT_TOLD)
        }
        digest = self.result.get("data", {}).get("eval", {}).get("sha256")
        return kept | ({"task.sha256": str(digest)[:8]} if digest else {})


@dataclasses.dataclass(frozen=True)
class Line:
    """Runs of one row that differ in their seed only, at one length.

    Attributes:
      row: the row of the table.
      apart: what sets this line apart from the other lines of its row.
      length: the evaluated length; None where the row was not run.
      runs: the runs.
      values: the metric of each.
      act: whether the Q head ended the examples of these runs; the line before has all segments.
    """

    row: Row
    apart: str
    length: int | None
    runs: tuple[Finished, ...]
    values: tuple[float, ...]
    act: bool = False

    @property
    def label(self) -> str:
        """The row's label and what sets the line apart."""
        return ", ".join(text for text in (self.row.label, self.apart) if text)


def find(paths: Iterable[str]) -> tuple[list[Finished], list[str]]:
    """Finished runs in the given directories, and a note on each that holds none.

    Raises:
      UserError: a directory does not exist.
    """
    found: dict[Path, Finished] = {}
    notes = []
    for text in paths:
        folder = Path(text)
        if not folder.is_dir():
            raise UserError(f"--runs: {text} is not a directory")
        mine = [folder] if (folder / "config.json").exists() else []
        mine += [folder] if not mine and (folder / "result.json").exists() else []
        mine = mine or sorted(p.parent for p in folder.glob("*/config.json"))
        mine = mine or sorted(p.parent for p in folder.glob("*/result.json"))  # evaluations/
        if not mine:
            notes.append(f"{text}: no run here (no config.json)")
        for path in mine:
            try:
                found.setdefault(path.resolve(), _read(path))
            except FileNotFoundError as error:
                notes.append(f"{path}: no {Path(str(error.filename)).name} yet")
            except (OSError, ValueError, KeyError) as error:
                notes.append(f"{path}: {error!r}")
    return list(found.values()), notes


def _read(path: Path) -> Finished:
    result = json.loads((path / "result.json").read_text())
    home = path if (path / "config.json").exists() else path.parent.parent
    # Keys that are newer than the run have their defaults.
    config = configs.flatten(configs.complete(json.loads((home / "config.json").read_text())))
    for key, change in result.get("overrides", {}).items():
        here = change["here"]
        config[key] = tuple(here) if isinstance(here, list) else here
    config["seed"] = result["seed"]
    digest = result.get("data", {}).get("eval", {}).get("sha256")
    if digest in PUBLIC:  # A folder with the tasks of a public set is that set.
        config["task.path"] = PUBLIC[digest]
    return Finished(path, config, result)


def lines(table: Table, runs: Sequence[Finished]) -> list[Line]:
    """The table's lines in the order of its rows; a row without runs has one without values."""
    found = []
    for row in table.rows:
        groups: dict[str, list[Finished]] = {}
        mine = [run for run in runs if row.matches(run.config) and metric_of(table, run)]
        overridden = {key for run in mine for key in run.result.get("overrides", {})}
        for run in mine:
            key = json.dumps(run.signature(overridden), sort_keys=True, default=str)
            groups.setdefault(key, []).append(run)
        signatures = [group[0].signature(overridden) for group in groups.values()]
        for signature, group in zip(signatures, groups.values()):
            apart = ", ".join(_apart(signature, signatures))
            shared = set.intersection(*(set(run.lengths) for run in group))
            for length in table.lengths(group[0].config, sorted(shared)) if shared else []:
                found.append(Line(row, apart, length, tuple(group), _values(table, group, length)))
                ended = [_with_act(run) for run in group if "act" in run.result]
                if ended:
                    # The paper's number is of all segments.
                    found.append(
                        Line(
                            dataclasses.replace(row, paper=""),
                            ", ".join(text for text in (apart, ACT) if text),
                            length,
                            tuple(ended),
                            _values(table, ended, length),
                            act=True,
                        )
                    )
        if not groups:
            found.append(Line(row, "", None, (), ()))
    return found


def _values(table: Table, runs: Sequence[Finished], length: int) -> tuple[float, ...]:
    return tuple(table.scale * run.result[metric_of(table, run)][str(length)] for run in runs)


def _with_act(run: Finished) -> Finished:
    """The run with the results of ACT at inference in the place of those of all segments."""
    by_length = run.result["act"]
    names = next(iter(by_length.values()))
    act = {name: {n: by_length[n][name] for n in by_length} for name in names}
    return dataclasses.replace(run, result={**run.result, **act})


def metric_of(table: Table, run: Finished) -> str:
    """The table's metric that this run has, "" if it has none."""
    return next((name for name in table.metric if name in run.result), "")


def _apart(mine: Mapping[str, Any], all_of_them: Sequence[Mapping[str, Any]]) -> list[str]:
    """As many keys in which the row's configs differ as tell this one from all others."""
    keys = {k for s in all_of_them for k in s} - {"model.vocab_size", "model.seq_len"}
    told = [k for k in keys if any(s.get(k) != mine.get(k) for s in all_of_them)]
    told.sort(key=lambda k: (not k.startswith("task."), "solver" in k, k))
    rivals = [s for s in all_of_them if s is not mine]
    enough = []
    for key in told:
        if rivals:
            enough.append(key)
            rivals = [s for s in rivals if s.get(key) == mine.get(key)]
    return [f"{k.split('.', 1)[-1]}={mine.get(k)}" for k in enough]


def cells(line: Line) -> tuple[str, ...]:
    """The texts of `COLUMNS`."""
    if not line.runs:
        return (line.row.label, "", line.row.paper, "not run", *[""] * (len(COLUMNS) - 4))
    values, length = line.values, str(line.length)
    seeds = len({run.config["seed"] for run in line.runs})
    decimals = 1 if max(values) > 1.5 else 3
    results = [run.result for run in line.runs]

    def median(name: str, scale: float = 1.0) -> str:
        known = [r[name][length] for r in results if name in r and r[name].get(length) is not None]
        return f"{scale * float(np.median(known)):.4g}" if known else ""

    ours = f"{np.median(values):.{decimals}f}"
    if len(values) > 1:
        ours += f" [{min(values):.{decimals}f}, {max(values):.{decimals}f}]"
    return (
        line.row.label,
        length,
        line.row.paper,
        ours,
        str(seeds),
        median("effective_layers_mean"),
        median("flops_per_example_mean", 1e-6),
        f"{results[0]['parameters']:,}",
        line.apart,
        data_name(
            results[0].get("data", {}).get("eval", {}), [r["examples"][length] for r in results]
        ),
    )


def terminal(table: Table, rows: Sequence[tuple[str, ...]]) -> Grid:
    """The table for a terminal: fewer columns, and each label once, with its data below."""
    grid = Grid(
        title=table.title, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False,
        collapse_padding=True,
    )  # fmt: skip
    for name in COLUMNS[:SHOWN]:
        left = name in ("model", "paper")
        width = 16 if name == "model" else None
        grid.add_column(
            name, justify="left" if left else "right", no_wrap=not left, min_width=width,
            overflow="fold" if left else "ellipsis",
        )  # fmt: skip
    last = ("", "", "")
    for row in rows:
        label, paper, apart, data = (row[0], row[2], *row[-2:])
        if label == last[0]:
            paper = ""  # the paper's number stands on the first line of a row
        below = [text for text in (*apart.split(", "), data) if text]
        if (label, apart, data) == last:
            label = ""
        elif label == last[0]:
            label = "  " + "\n  ".join(below)
        else:
            label = "\n  ".join([label, *below])
        last = (row[0], apart, data)
        grid.add_row(*(Text(text) for text in (label, row[1], paper, *row[3:SHOWN])))
    return grid


def markdown(table: Table, rows: Sequence[tuple[str, ...]], notes: Sequence[str]) -> str:
    """The table as a Markdown page."""
    texts = [f"# {table.title}", "", "| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
    texts += ["| " + " | ".join(text.replace("|", "\\|") for text in row) + " |" for row in rows]
    return "\n".join([*texts, "", *footnotes(table, notes), ""])


def footnotes(table: Table, notes: Sequence[str]) -> list[str]:
    """What the columns are, the table's note, and the notes on directories."""
    metric = " or ".join(table.metric)
    return [
        f"{metric}: {table.note} ours: median over seeds; layers: mean effective layers of an "
        "example; MFLOPs: mean of an example.",
        *notes,
    ]


def draw(table: Table, found: Sequence[Line], path: Path) -> Path | None:
    """Draws the table's figure; None if there is nothing to draw."""
    told = [line for line in found if line.runs]
    if not told:
        return None
    if table.figure == "length":
        groups: dict[str, dict[int, tuple[float, ...]]] = {}
        for line in told:
            groups.setdefault(line.label, {})[line.length or 0] = line.values
        if any(len(by_length) > 1 for by_length in groups.values()):
            return table_plots.plot_by_length(groups, table.metric[0], path, table.title)
    if table.figure == "budget":
        curves = {
            line.label: [_curve(run, str(line.length)) for run in line.runs]
            for line in told
            if not line.act  # marked on the curve of the line before
        }
        if any(len(c["sequence_accuracy"]) > 1 for seeds in curves.values() for c in seeds):
            return table_plots.plot_budgets(curves, path, table.title)
    bars = [(line.label, line.row.paper, line.values) for line in told]
    return table_plots.plot_rows(bars, table.metric[0], path, table.title)


def _curve(run: Finished, length: str) -> Mapping[str, Any]:
    """Accuracy over budgets, see `budget.summarise`; without a loop, all there is is one point."""
    if length in run.result.get("budget", {}):
        return run.result["budget"][length]
    right = {"sequence_accuracy": [run.result["sequence_accuracy"][length]]}
    means = zip(plots.MEAN, (f"{name}_mean" for name in EFFORT))
    spent = {name: [run.result[mean][length]] for name, mean in means if mean in run.result}
    return right | spent | {"halting": right | {plots.MEAN[n]: v for n, v in spent.items()}}


def draw_difficulty(table: Table, found: Sequence[Line], stem: Path) -> list[Path]:
    """Draws accuracy and effort by difficulty, where the table is about budgets.

    Args:
      table: the table.
      found: its lines.
      stem: path of the figures without their "_by_MEASURE.png".
    """
    measures: dict[str, dict[str, list[Any]]] = {}
    for line in found if table.figure == "budget" else ():
        for run in line.runs:
            for name, buckets in _by_difficulty(run, line.length).items():
                measures.setdefault(name, {}).setdefault(line.label, []).append(buckets)
    return [
        table_plots.plot_difficulties(
            groups, name, stem.with_name(f"{stem.name}_by_{name}.png"), table.title
        )
        for name, groups in measures.items()
    ]


def _by_difficulty(run: Finished, length: int | None) -> dict[str, list[Mapping[str, Any]]]:
    """{measure: buckets} of a run: its task's at a length, and its lengths if it has several."""
    found = {
        name.removeprefix("by_"): value[str(length)]
        for name, value in run.result.items()
        if name.startswith("by_")
    }
    if len(run.lengths) > 1:
        names = ("sequence_accuracy", *(f"{e}_{s}" for e in EFFORT for s in ("median", "mean")))
        found["length"] = [
            {"from": n, "to": n} | {k: run.result[k][str(n)] for k in names if k in run.result}
            for n in run.lengths
        ]
    return found


def parse(argv: Sequence[str]) -> tuple[str, list[str], Path]:
    """(table, runs, out) of a command line without the program's name.

    Raises:
      UserError: a mistake in it.
    """
    parser = cli.Parser("report", __doc__)
    parser.add_argument("table", metavar="TABLE", help=", ".join(TABLES))
    parser.add_argument("--runs", action="append", default=[], metavar="DIR")
    parser.add_argument("--out", default="reports", metavar="DIR")
    known, rest = parser.parse_known_args(list(argv))
    for word in rest:
        if word.startswith("-"):
            raise unknown("flag", word.split("=")[0], ("--runs", "--out"))
    if known.table not in TABLES:
        raise unknown("table", known.table, TABLES)
    return known.table, [*known.runs, *rest], Path(known.out)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    return cli.exit_code(lambda: _report(*parse(sys.argv[1:] if argv is None else argv)))


def _report(name: str, paths: Sequence[str], out: Path) -> int:
    table = TABLES[name]
    runs, notes = find(paths)
    found = lines(table, runs)
    used = {run.path for line in found for run in line.runs}
    strangers = [str(run.path) for run in runs if run.path not in used]
    if strangers:
        notes.append(f"in no row of {name}: {' '.join(strangers)}")
    rows = [cells(line) for line in found]
    console = Console()
    console.print(terminal(table, rows), markup=False)
    for text in footnotes(table, notes):
        console.print(text, markup=False, soft_wrap=True)
    out.mkdir(parents=True, exist_ok=True)
    page = out / f"{name}.md"
    page.write_text(markdown(table, rows, notes))
    figures = [draw(table, found, out / f"{name}.png"), *draw_difficulty(table, found, out / name)]
    written = " and ".join(str(path) for path in (page, *figures) if path)
    console.print(f"wrote {written}", markup=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The paper's classification tables with our own results in them, as Markdown, CSV and a picture."""

from __future__ import annotations

import csv
import io
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.style
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from asc.files import write_whole
from asc.report.paper_numbers import ASC, TABLES, Column, PaperTable, also_printed
from asc.report.words import plural
from asc.tasks.classify.results import Protocol, Result

CAVEAT = (
    "Rows of the paper are printed numbers of networks that were pre-trained on a cluster (ViT-B and larger, hundreds "
    "of thousands of videos or millions of images). Rows marked “ours” were measured with this program on the encoders "
    "they name. Scale and data differ, so the rows stand side by side for orientation; only rows that are ours, on the "
    "same data, can be compared with each other."
)
_TITLES: dict[Protocol, str] = {"knn": "Nearest neighbours", "linear": "Linear evaluation", "finetune": "Fine-tuned"}
_METRICS = {"top1": "top-1", "mean_per_class": "mean per class", "map11": "11-point mAP"}
_LAST_NUMBER = re.compile(r"[-_]?(seed)?[-_]?\d+$")


@dataclass(frozen=True)
class Cell:
    """A value of a table, or several that it is the mean of; in per cent."""

    values: tuple[float, ...]
    also: tuple[tuple[float, str], ...] = ()
    """Other values that the paper prints for it, and where."""

    @property
    def mean(self) -> float:
        """The value."""
        return statistics.mean(self.values)

    @property
    def deviation(self) -> float | None:
        """Standard deviation, of two values or more."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    def text(self) -> str:
        """The value with its deviation, and what else the paper prints."""
        spread = "" if self.deviation is None else f" ± {self.deviation:.1f}"
        return f"{self.mean:.1f}{spread}" + "".join(f" ({value:.1f} in {place})" for value, place in self.also)


@dataclass(frozen=True)
class Row:
    """A line of a table."""

    label: str
    cells: dict[Column, Cell]
    ours: bool = False


@dataclass(frozen=True)
class Table:
    """A table that is ready to be shown."""

    key: str
    title: str
    columns: tuple[Column, ...]
    rows: list[Row]
    notes: list[str] = field(default_factory=list)


def write_report(results: Sequence[Result], out: Path, pool: bool = False) -> None:
    """Write the tables of results to a folder and print them."""
    tables = make_tables(results, pool)
    text = markdown(tables)
    write_whole(out / "tables.md", text.encode())
    write_whole(out / "tables.csv", csv_text(tables).encode())
    write_whole(out / "tables.png", lambda path: _draw(tables, path))
    print(text)
    print(f"written to {out / 'tables.md'}, {out / 'tables.csv'} and {out / 'tables.png'}")


# --- Making them ------------------------------------------------------------------------------------------


def make_tables(results: Sequence[Result], pool: bool = False) -> list[Table]:
    """The paper's tables with our rows in them, then tables of what the paper does not have."""
    tables = [_with_ours(table, results, pool) for table in TABLES]
    in_paper = {column[1:3] for table in TABLES for column in table.columns}
    for protocol in ("linear", "finetune"):
        others = [r for r in results if r.protocol == protocol and (r.dataset, r.protocol) not in in_paper]
        if others:
            columns = _columns(others)
            title = f"{_TITLES[others[0].protocol]}, other datasets"
            tables.append(Table(f"other_{protocol}", title, columns, _our_rows(columns, others, pool), _notes(others)))
    neighbours = [result for result in results if result.protocol == "knn"]
    if neighbours:
        columns = _columns(neighbours)
        tables.append(Table("knn", _TITLES["knn"], columns, _our_rows(columns, neighbours, pool), _notes(neighbours)))
    return tables


def _with_ours(table: PaperTable, results: Sequence[Result], pool: bool) -> Table:
    rows = []
    for method, values in table.rows.items():
        cells = {}
        for column, value in zip(table.columns, values, strict=True):
            if value is not None:
                cells[column] = Cell((value,), tuple(also_printed(table, method, column)))
        rows.append(Row(method, cells))
    wanted = {column[1:3] for column in table.columns}
    own = [result for result in results if (result.dataset, result.protocol) in wanted]
    return Table(table.key, table.title, table.columns, rows + _our_rows(table.columns, own, pool), _notes(own))


def _columns(results: Iterable[Result]) -> tuple[Column, ...]:
    """A column for every dataset and, for kNN, every number of neighbours."""
    found: dict[Column, None] = {}
    for result in results:
        for name in result.headline:
            metric, _, k = name.partition("@")
            title = f"{result.dataset} ({_METRICS.get(metric, metric)}{f', k = {k}' if k else ''})"
            found[Column(title, result.dataset, result.protocol, name)] = None
    return tuple(found)


def _our_rows(columns: Sequence[Column], results: Sequence[Result], pool: bool) -> list[Row]:
    groups: dict[tuple[str, str, str], list[Result]] = {}
    for result in results:
        name, identity = result.encoder["name"], result.encoder["identity"]
        if pool:
            name, identity = _LAST_NUMBER.sub("", name) or name, ""
        groups.setdefault((name, identity, result.recipe), []).append(result)
    encoders = Counter(name for name, _ in {(name, identity) for name, identity, _ in groups})
    rows = []
    for (name, identity, recipe), own in groups.items():
        # Two encoders of one name are told apart by what they are.
        shown = f"{name} ({identity[:6]})" if encoders[name] > 1 else name
        count = len({(result.encoder["identity"], result.seed) for result in own})
        cells = {column: cell for column in columns if (cell := _cell(column, own)) is not None}
        rows.append(Row(f"ours: {shown}, {recipe}, {plural(count, 'run' if pool else 'seed')}", cells, ours=True))
    return rows


def _cell(column: Column, results: Sequence[Result]) -> Cell | None:
    values = [
        100 * result.test[column.metric or result.metric]
        for result in results
        if (result.dataset, result.protocol) == column[1:3] and (column.metric or result.metric) in result.test
    ]
    return Cell(tuple(values)) if values else None


def _notes(results: Sequence[Result]) -> list[str]:
    """What the encoders are, and what the data lack, each said once."""
    encoders = [f"{result.encoder['name']}: {result.encoder['description']}" for result in results]
    data = [str(note) for result in results for note in result.data["notes"]]
    return list(dict.fromkeys([*encoders, *data]))


# --- Showing them -----------------------------------------------------------------------------------------


def markdown(tables: Sequence[Table]) -> str:
    """All tables; rows that are ours are bold."""
    lines = ["# Classification", "", CAVEAT, ""]
    for table in tables:
        lines += [f"## {table.title}", "", _line(["method", *(column.title for column in table.columns)])]
        lines.append(_line(["---", *("---:" for _ in table.columns)]))
        for row in table.rows:
            values = [row.cells[column].text() if column in row.cells else "–" for column in table.columns]
            lines.append(_line([f"**{row.label}**" if row.ours else row.label, *values]))
        if not any(row.ours for row in table.rows):
            lines += ["", "No result of ours yet."]
        lines.append("")
    # Once for all tables: most of them are about the same encoders and data.
    notes = dict.fromkeys(note for table in tables for note in table.notes)
    if notes:
        lines += ["## Notes on our rows", "", *(f"- {note}" for note in notes), ""]
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def csv_text(tables: Sequence[Table]) -> str:
    """One line for every value: table, row, dataset, protocol, metric, mean, deviation, number of values."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(
        ["table", "row", "ours", "dataset", "protocol", "metric", "mean", "deviation", "values", "also_printed"]
    )
    for table in tables:
        for row in table.rows:
            for column, cell in row.cells.items():
                spread = "" if cell.deviation is None else f"{cell.deviation:.4f}"
                also = "; ".join(f"{value:g} in {place}" for value, place in cell.also)
                metric = column.metric or "main"
                named = [table.key, row.label, int(row.ours), column.dataset, column.protocol, metric]
                writer.writerow([*named, f"{cell.mean:.4f}", spread, len(cell.values), also])
    return stream.getvalue()


def _draw(tables: Sequence[Table], path: Path) -> None:
    """A panel for every table that has a row of ours: ours beside the paper's, over the columns we have."""
    shown = [table for table in tables if any(row.ours and row.cells for row in table.rows)]
    with matplotlib.style.context("default"):
        figure = Figure(figsize=(8, 1 + 3.4 * max(1, len(shown))), dpi=150, layout="constrained", facecolor="white")
        FigureCanvasAgg(figure)  # needs no screen
        for axes, table in zip(figure.subplots(max(1, len(shown)), squeeze=False)[:, 0], shown, strict=False):
            _draw_table(axes, table)
        figure.suptitle("The paper's numbers and ours: scale and data differ", fontsize=10)
        figure.savefig(str(path), format="png")


def _draw_table(axes: Any, table: Table) -> None:
    rows = [row for row in table.rows if row.label == ASC] + [row for row in table.rows if row.ours]
    columns = [column for column in table.columns if any(row.ours and column in row.cells for row in rows)]
    width = 0.8 / len(rows)
    for number, row in enumerate(rows):
        places = [at for at, column in enumerate(columns) if column in row.cells]
        cells = [row.cells[columns[at]] for at in places]
        shifted = [at + (number - (len(rows) - 1) / 2) * width for at in places]
        # Ours are counted alone, so that an encoder has its colour whether or not the paper stands beside it.
        ours = number - (rows[0].label == ASC)
        colour = matplotlib.colormaps["tab10"](ours % 10) if row.ours else "#b8bcc2"
        spread = [cell.deviation or 0.0 for cell in cells] if row.ours else None
        axes.bar(shifted, [cell.mean for cell in cells], width, yerr=spread, color=colour, label=row.label, capsize=2)
    axes.set_xticks(range(len(columns)), [column.title for column in columns], rotation=20, ha="right", fontsize=8)
    axes.set_ylabel("per cent")
    axes.set_ylim(0, 100)
    axes.set_title(table.title, fontsize=10)
    axes.grid(axis="y", color="#e4e6e9", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))

"""From cells to tables: Markdown, CSV and pictures, with the paper's numbers beside ours."""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asc.ablate.cells import FAILED, FINISHED, Cell, read_cells
from asc.ablate.pictures import draw_curves, draw_tables
from asc.ablate.study import Mode, Protocol
from asc.ablate.tables import TABLES, AblationTable, Column, Part, TableName
from asc.ablate.variants import PLAIN, VARIANTS
from asc.files import write_whole
from asc.report.words import plural

TABLE_FILE, CSV_FILE, TABLE_PICTURE, CURVE_PICTURE = "ablations.md", "ablations.csv", "ablations.png", "curves.png"
Chosen = Mapping[tuple[Mode, Part], Protocol]
"""For every kind of cell the protocol of those that are shown."""

CAVEAT = (
    "Scale and data differ from the paper's, which pre-trained a ViT-B at 224 pixels on millions of clips: the rows of "
    "a table can be compared with each other, our numbers and the paper's cannot. Ours are mean ± standard deviation "
    "over pre-training seeds, whose number stands in brackets."
)
_MODES: dict[Mode, str] = {"steps": "equal steps", "time": "equal time"}
_NOTHING = "–"


@dataclass(frozen=True)
class Value:
    """What several seeds gave."""

    values: tuple[float, ...]
    """One of each seed."""
    percent: bool = True
    """Whether they are shares, shown in per cent."""

    @property
    def mean(self) -> float:
        """Mean over the seeds."""
        return statistics.fmean(self.values)

    @property
    def deviation(self) -> float | None:
        """Standard deviation over the seeds, of a sample; None of a single one."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    def text(self) -> str:
        """For a table."""
        digits, factor = (1, 100) if self.percent else (3, 1)
        spread = "" if self.deviation is None else f" ± {factor * self.deviation:.{digits}f}"
        return f"{factor * self.mean:.{digits}f}{spread} ({len(self.values)})"


@dataclass(frozen=True)
class Paired:
    """Differences between two networks, one of each seed."""

    values: tuple[float, ...]
    """At least two."""

    @property
    def mean(self) -> float:
        """Mean over the seeds."""
        return statistics.fmean(self.values)

    @property
    def reach(self) -> float:
        """Half the width of the 95% interval."""
        from scipy.stats import t  # slow to import

        count = len(self.values)
        return float(t.ppf(0.975, count - 1) * statistics.stdev(self.values) / math.sqrt(count))

    def text(self) -> str:
        """For a table."""
        low, high = 100 * (self.mean - self.reach), 100 * (self.mean + self.reach)
        return f"{100 * self.mean:+.1f} ({low:+.1f} to {high:+.1f})"


@dataclass(frozen=True)
class Filled:
    """A table of the paper with our numbers in it."""

    table: AblationTable
    """The paper's."""
    mode: Mode
    """What our runs have in common."""
    titles: tuple[str, ...]
    """Of the columns, with the labelled set that stands for the paper's."""
    rows: dict[str, tuple[Value | None, ...]]
    """Our numbers by variant, in the order of the columns."""

    @property
    def measured(self) -> list[int]:
        """The columns that have a number of ours. At equal time the plain network's alone does not count: as a rule it
        is that of equal steps, shown once more to compare with."""
        own = [values for row, values in self.rows.items() if self.mode == "steps" or row != PLAIN]
        return [number for number in range(len(self.titles)) if any(values[number] for values in own)]


class Evidence:
    """The cells that are shown.

    Args:
        cells: All cells of a folder.
        chosen: Which protocols to show; None: of every kind of cell the one with most cells.
    """

    def __init__(self, cells: Sequence[Cell], chosen: Chosen | None) -> None:
        chosen = _most_common(cells) if chosen is None else chosen
        # Of two cells for one thing, which other versions of a variant can leave, the newest counts.
        newest = {_place(cell): cell for cell in sorted(cells, key=_when) if _belongs(cell, chosen)}
        shown = sorted(newest.values(), key=lambda cell: str(cell["name"]))
        self.cells = [cell for cell in shown if cell["status"] == FINISHED]
        self.failed = [cell for cell in shown if cell["status"] == FAILED]
        self.others = len(cells) - len(shown)
        self.modes = tuple(mode for mode in _MODES if any(cell["mode"] == mode for cell in self.cells))
        judged = [cell for cell in self.cells if cell["part"] == "judge"]
        self.sets: tuple[str, ...] = tuple(judged[0]["values"]["sets"]) if judged else ()
        times = [cell["settings"]["training"]["time"] for cell in self.cells if cell["mode"] == "time"]
        # Steps of the plain network that equal time is measured by; None: it is a time of its own.
        self._measure = times[0].get("steps") if times else None

    def of(self, variant: str, mode: Mode, part: Part) -> list[Cell]:
        """The cells of a variant, by seed."""
        is_measure = mode == "time" and variant == PLAIN and self._measure is not None
        kind = ("steps" if is_measure else mode, part)
        found = [cell for cell in self.cells if variant in cell["stands_for"] and (cell["mode"], cell["part"]) == kind]
        if is_measure:
            found = [cell for cell in found if cell["settings"]["training"]["train"]["steps"] == self._measure]
        return sorted(found, key=lambda cell: cell["seed"])

    def pairs(self, variant: str, mode: Mode) -> list[tuple[Cell, Cell]]:
        """The labelled sets' cells of a variant and of the plain network, where both have the seed."""
        plain = {cell["seed"]: cell for cell in self.of(PLAIN, mode, "judge")}
        return [(cell, plain[cell["seed"]]) for cell in self.of(variant, mode, "judge") if cell["seed"] in plain]

    def variants(self, mode: Mode) -> list[str]:
        """The variants that were trained, each under its first name."""
        first = {name: cell["variant"] for cell in self.cells for name in cell["stands_for"]}
        return [name for name in VARIANTS if first.get(name) == name and self.of(name, mode, "judge")]

    def value(self, cells: Sequence[Cell], take: Callable[[Mapping[str, Any]], float], percent: bool) -> Value | None:
        """One number of each of the cells."""
        return Value(tuple(take(cell["values"]) for cell in cells), percent) if cells else None

    def column(self, variant: str, mode: Mode, column: Column) -> Value | None:
        """What stands in a column of the paper."""
        if column.part == "judge" and not self.sets:
            return None
        name = column.set_of(self.sets) if column.part == "judge" else ""

        def take(values: Mapping[str, Any]) -> float:
            return float(values["sets"][name][column.metric] if name else values[column.metric])

        return self.value(self.of(variant, mode, column.part), take, column.percent)

    def filled(self, table: AblationTable, mode: Mode) -> Filled:
        """A table of the paper with our numbers."""
        titles = tuple(
            f"{column.title}, {column.set_of(self.sets)}" if column.part == "judge" and self.sets else column.title
            for column in table.columns
        )
        rows = {row: tuple(self.column(row, mode, column) for column in table.columns) for row in table.rows}
        return Filled(table, mode, titles, rows)


def _place(cell: Cell) -> tuple[str, str, int, str]:
    return cell["variant"], cell["mode"], cell["seed"], cell["part"]


def _when(cell: Cell) -> str:
    return str(cell["when"])


def _belongs(cell: Cell, chosen: Chosen) -> bool:
    wanted = chosen.get((cell["mode"], cell["part"]))
    if wanted is None:
        return False
    own = Protocol(**cell["protocol"])
    return own.plain == wanted.plain if cell["variant"] == PLAIN else own == wanted


def _most_common(cells: Sequence[Cell]) -> Chosen:
    counts: dict[tuple[Mode, Part], Counter[Protocol]] = {}
    for cell in sorted(cells, key=_when, reverse=True):  # of equally many, the newest
        own = Protocol(**cell["protocol"])
        counts.setdefault((cell["mode"], cell["part"]), Counter())[own] += cell["status"] == FINISHED
    return {kind: counter.most_common(1)[0][0] for kind, counter in counts.items()}


def write_report(folder: Path, tables: Sequence[TableName], chosen: Chosen | None) -> Path:
    """Write tables and pictures of the cells of a folder, and print the tables.

    Returns:
        The file of tables.
    """
    evidence = Evidence(list(read_cells(folder).values()), chosen)
    filled = [evidence.filled(TABLES[key], mode) for key in tables for mode in evidence.modes]
    filled = [one for one in filled if one.mode == "steps" or one.measured]
    text = markdown(evidence, filled)
    write_whole(folder / TABLE_FILE, text.encode())
    write_whole(folder / CSV_FILE, csv_text(evidence, filled).encode())
    write_whole(folder / TABLE_PICTURE, lambda path: draw_tables(filled, path))
    write_whole(folder / CURVE_PICTURE, lambda path: draw_curves(_curves(evidence, tables), path))
    print(text)
    print(f"written to {folder}: {TABLE_FILE}, {CSV_FILE}, {TABLE_PICTURE}, {CURVE_PICTURE}")
    return folder / TABLE_FILE


def _curves(evidence: Evidence, tables: Sequence[TableName]) -> dict[tuple[str, str], list[Mapping[str, Any]]]:
    """The curves of all seeds, by what is equal and by variant; of kNN those that can be compared."""
    usual, rows = _usually_followed_on(evidence), {row for key in tables for row in TABLES[key].rows}
    found: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for mode in evidence.modes:
        for name in evidence.variants(mode):
            for cell in evidence.of(name, mode, "judge"):
                if rows.intersection(cell["stands_for"]):
                    run = cell["training"]
                    curves = run["curves"] if _followed_on(run) == usual else {**run["curves"], "knn": {}}
                    found.setdefault((_MODES[mode], name), []).append(curves)
    return found


def _followed_on(run: Mapping[str, Any]) -> tuple[int, ...]:
    """Known and judged images of the kNN accuracy while training."""
    return tuple(run["followed_on"])


def _usually_followed_on(evidence: Evidence) -> tuple[int, ...]:
    counts = Counter(_followed_on(cell["training"]) for cell in evidence.cells if cell["part"] == "judge")
    return counts.most_common(1)[0][0] if counts else ()


# --- Markdown ---------------------------------------------------------------------------------------------


def markdown(evidence: Evidence, filled: Sequence[Filled]) -> str:
    """Everything that the cells say."""
    parts = ["# Ablations", CAVEAT, *_conditions(evidence)]
    if not evidence.cells:
        parts.append("No cell is finished yet.")
    for one in filled:
        parts += [f"## {one.table.title}, {_MODES[one.mode]}", _filled_table(one)]
        parts += [one.table.note] if one.table.note else []
    for mode in evidence.modes:
        parts += [f"## All labelled sets, {_MODES[mode]}", _set_table(evidence, mode)]
        parts += _against_plain(evidence, mode)
    if evidence.cells:
        parts += ["## How the runs went", _run_table(evidence), _run_notes(evidence)]
        parts.append(f"![Tokens and kNN over the steps]({CURVE_PICTURE})")
    parts += _list("Warnings of collapse and other troubles", _warnings(evidence))
    parts += _list("Failed", [f"{_who(cell)}, {cell['part']}: {cell['reason']}" for cell in evidence.failed])
    if evidence.others:
        parts.append(f"Not shown: {plural(evidence.others, 'cell')} of other settings in this folder.")
    return "\n\n".join(parts) + "\n"


def _conditions(evidence: Evidence) -> list[str]:
    if not evidence.cells:
        return []
    settings = evidence.cells[0]["settings"]["training"]
    model, train = settings["model"], settings["train"]
    devices = sorted({cell["machine"]["device"] for cell in evidence.cells})
    return [
        f"Conditions: images of {model['image_size']} pixels, patches of {model['patch_size']}, width "
        f"{model['width']}, {model['depth']} blocks, batches of {train['batch']} clips, on {', '.join(devices)}. "
        f"Accuracies in per cent, by linear classifiers on frozen pooled features, whose weight decay is chosen on "
        f"training images."
    ]


def _filled_table(one: Filled) -> str:
    heads = ["", *(f"{title}{'' if column.rises else ' ↓'} | paper: {column.paper}" for title, column in _heads(one))]
    lines = [heads, ["---"] + ["---: | ---:"] * len(one.titles)]
    for row, values in one.rows.items():
        printed = one.table.paper.get(row, (None,) * len(values))
        pairs = [
            f"{_text(value)} | {_NOTHING if paper is None else f'{paper:g}'}"
            for value, paper in zip(values, printed, strict=True)
        ]
        lines.append([VARIANTS[row].label, *pairs])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _heads(one: Filled) -> list[tuple[str, Column]]:
    return list(zip(one.titles, one.table.columns, strict=True))


def _set_table(evidence: Evidence, mode: Mode) -> str:
    columns = [(name, metric) for metric in ("linear", "knn") for name in (*evidence.sets, "mean")]
    heads = ["", *(f"{'kNN' if metric == 'knn' else metric}, {name}" for name, metric in columns)]
    lines = [heads, ["---", *("---:" for _ in columns)]]
    for variant in evidence.variants(mode):
        cells = evidence.of(variant, mode, "judge")
        values = [evidence.value(cells, _taker(name, metric), percent=True) for name, metric in columns]
        lines.append([VARIANTS[variant].label, *map(_text, values)])
    return _table(lines)


def _against_plain(evidence: Evidence, mode: Mode) -> list[str]:
    """What every variant has before the plain network, seed by seed, if both have several."""
    columns = [(name, metric) for metric in ("linear", "knn") for name in (*evidence.sets, "mean")]
    heads = ["", *(f"{'kNN' if metric == 'knn' else metric}, {name}" for name, metric in columns), "seeds"]
    lines = [heads, ["---", *("---:" for _ in heads[1:])]]
    for variant in evidence.variants(mode):
        pairs = evidence.pairs(variant, mode)
        if variant != PLAIN and len(pairs) > 1:
            found = [Paired(tuple(_differences(pairs, _taker(name, metric)))) for name, metric in columns]
            lines.append([VARIANTS[variant].label, *(one.text() for one in found), str(len(pairs))])
    title = f"## Before the plain network, {_MODES[mode]}"
    told = "Points of accuracy, paired by seed; in brackets the 95% interval of the mean by Student's t."
    return [title, told, _table(lines)] if len(lines) > 2 else []


def _differences(pairs: Sequence[tuple[Cell, Cell]], take: Callable[[Mapping[str, Any]], float]) -> list[float]:
    return [take(ours["values"]) - take(plain["values"]) for ours, plain in pairs]


def _taker(name: str, metric: str) -> Callable[[Mapping[str, Any]], float]:
    def take(values: Mapping[str, Any]) -> float:
        sets = values["sets"]
        if name == "mean":
            return statistics.fmean(one[metric] for one in sets.values())
        return float(sets[name][metric])

    return take


def _run_table(evidence: Evidence) -> str:
    heads = ["", "equal", "seeds", "steps", "seconds", "aim", "images/s", "tokens entering a block", "left at the end"]
    lines = [[*heads, "warnings"], ["---", "---", *("---:" for _ in heads[1:])]]
    for mode in evidence.modes:
        for variant in evidence.variants(mode):
            runs = [cell["training"] for cell in evidence.of(variant, mode, "judge")]
            steps, aims = ([run["plan"][name] for run in runs] for name in ("steps", "seconds"))
            aim = _NOTHING if aims[0] is None else f"{statistics.fmean(aims):.1f}"
            means = {name: statistics.fmean(run[name] for run in runs) for name in _MEANS}
            numbers = [f"{means[name]:{form}}" for name, form in _MEANS.items()]
            warned = sum(len(run["warnings"]) for run in runs)
            shown = [VARIANTS[variant].label, mode, str(len(runs)), f"{statistics.fmean(steps):.0f}"]
            lines.append([*shown, numbers[0], aim, *numbers[1:], str(warned)])
    return _table(lines)


def _run_notes(evidence: Evidence) -> str:
    """What must be known to read the table and the curves."""
    notes = [
        "Seconds and images/s are those of the runs as they went, several at a time on one device where there were "
        "several workers; how many steps make equal time comes from short runs alone (aim, in seconds)."
    ]
    usual = _usually_followed_on(evidence)
    judged = [cell["training"] for cell in evidence.cells if cell["part"] == "judge"]
    if others := sum(_followed_on(run) != usual for run in judged):
        notes.append(f"kNN was followed on other numbers of images in {plural(others, 'run')}, which are not drawn.")
    return " ".join(notes)


_MEANS = {"seconds": ".1f", "images_per_second": ".0f", "tokens_share": ".1%", "tokens_left": ".1%"}


def _warnings(evidence: Evidence) -> list[str]:
    lines = []
    for cell in evidence.cells:
        warned = [*cell["training"]["warnings"], *cell["warnings"]]
        if cell["part"] == "judge" and warned:
            lines.append(f"{_who(cell)}: {plural(len(warned), 'warning')}, the first: {warned[0]}")
    return lines


def _who(cell: Cell) -> str:
    return f"{VARIANTS[cell['variant']].label}, {_MODES[cell['mode']]}, seed {cell['seed']}"


def _list(title: str, lines: Sequence[str]) -> list[str]:
    return [f"## {title}", "\n".join(f"- {line}" for line in lines)] if lines else []


def _text(value: Value | None) -> str:
    return _NOTHING if value is None else value.text()


def _table(lines: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)


# --- CSV --------------------------------------------------------------------------------------------------


def csv_text(evidence: Evidence, filled: Sequence[Filled]) -> str:
    """One line for every number: those of the paper's tables, then all others."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(["table", "equal", "variant", "column", "mean", "deviation", "seeds", "paper"])

    def write(table: str, mode: str, variant: str, column: str, value: Value | None, paper: float | None) -> None:
        if value is None:
            numbers = ["", "", 0]
        else:
            spread = "" if value.deviation is None else f"{value.deviation:.6f}"
            numbers = [f"{value.mean:.6f}", spread, len(value.values)]
        writer.writerow([table, mode, variant, column, *numbers, "" if paper is None else paper])

    for one in filled:
        for row, values in one.rows.items():
            printed = one.table.paper.get(row, (None,) * len(values))
            for title, value, paper in zip(one.titles, values, printed, strict=True):
                write(one.table.key, one.mode, row, title, value, paper)
    for mode in evidence.modes:
        for variant in evidence.variants(mode):
            cells = evidence.of(variant, mode, "judge")
            for name in (*evidence.sets, "mean"):
                for metric in ("linear", "knn"):
                    value = evidence.value(cells, _taker(name, metric), percent=True)
                    write("sets", mode, variant, f"{metric}, {name}", value, None)
                    pairs = evidence.pairs(variant, mode)
                    if variant != PLAIN and pairs:
                        ahead = Value(tuple(_differences(pairs, _taker(name, metric))))
                        write("before plain", mode, variant, f"{metric}, {name}", ahead, None)
            for name in _MEANS:
                run_value = Value(tuple(float(cell["training"][name]) for cell in cells), percent=False)
                write("runs", mode, variant, name, run_value, None)
    return stream.getvalue()

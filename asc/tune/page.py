"""The results of a search: a page, and a table for other programs."""

from __future__ import annotations

import csv
import io
import itertools
import json
import statistics
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.style
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import PercentFormatter

from asc.files import write_whole
from asc.pretrain.run import RESULT_FILE
from asc.report.page import Figure, Page, Table
from asc.report.pictures import Pixels
from asc.report.words import duration, plural
from asc.tune.space import Point
from asc.tune.study import Search

PAGE_FILE, TABLE_FILE = "index.html", "trials.csv"
COMPLETE, PRUNED, FAILED = "complete", "given up", "failed"
_STATES = {"COMPLETE": COMPLETE, "PRUNED": PRUNED, "FAIL": FAILED, "RUNNING": "running", "WAITING": "running"}
# Fewer trials say nothing about which setting matters.
_LEAST_FOR_IMPORTANCE = 8
# A box of so many lines is still read; the table has all of them.
_MOST_MESSAGES = 40
_WIDTH, _HEIGHT, _DPI = 4.0, 2.6, 160
# Values that differ by such a factor are seen better on a scale of factors.
_WIDE = 8.0


@dataclass(frozen=True)
class Row:
    """A trial and what came of it."""

    number: int
    state: str
    point: Point
    record: dict[str, Any]
    """The trial's ``result.json``; empty while it runs."""

    @property
    def knn(self) -> float | None:
        """Mean kNN accuracy over sets and seeds."""
        return self.record.get("knn")

    @property
    def warnings(self) -> list[str]:
        """What its runs warned of."""
        return list(self.record.get("warnings", []))

    def words(self) -> str:
        """Its values."""
        return ", ".join(f"{name} {_text(value)}" for name, value in self.point.items())


def read_rows(search: Search) -> list[Row]:
    """All trials, the best first, then those given up, running and failed."""
    rows = []
    for trial in search.trials():
        file = search.folder(trial.number) / RESULT_FILE
        finished = trial.state.is_finished() and file.is_file()
        record = json.loads(file.read_text()) if finished else {}
        rows.append(Row(trial.number, _STATES[trial.state.name], dict(trial.params), record))
    order = list(dict.fromkeys(_STATES.values()))
    return sorted(rows, key=lambda row: (order.index(row.state), -(row.knn or 0.0), row.number))


def best_row(rows: Sequence[Row]) -> Row | None:
    """The trial with the highest accuracy among those that ran to their end."""
    return next((row for row in rows if row.state == COMPLETE), None)


def importance(search: Search) -> dict[str, float]:
    """Share of each setting in what makes the good trials good, by PED-ANOVA; empty for a handful of trials."""
    complete = [trial for trial in search.trials() if trial.state.name == "COMPLETE"]
    if len(complete) < _LEAST_FOR_IMPORTANCE or len({trial.value for trial in complete}) < 2:
        return {}
    module = search.optuna.importance
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of few trials; the page says how many there are
        shares = module.get_param_importances(search.study, evaluator=module.PedAnovaImportanceEvaluator())
    return {name: float(share) for name, share in shares.items()}


def write_results(search: Search) -> Path:
    """Write the page and the table.

    Returns:
        The page.
    """
    rows = read_rows(search)
    write_whole(search.out / TABLE_FILE, _csv(rows).encode())
    page = Page("Search for settings", _lead(search.settings, rows))
    best = best_row(rows)
    if best is not None:
        page.statement(
            f"Best: trial {best.number} with kNN accuracy {best.record['knn']:.1%} "
            f"(± {100 * best.record['knn_error']:.1f} points by the number of images judged): {best.words()}."
        )
        for sentence in _remarks(rows, best):
            page.paragraph(sentence)
    told = [f"trial {row.number}: {message}" for row in rows for message in row.warnings]
    page.warnings("What trials warned of", _shortened(told))
    failed = [f"trial {row.number} ({row.words()}): {row.record['failed']}" for row in rows if "failed" in row.record]
    page.warnings("Trials that failed", _shortened(failed))
    page.heading("Trials")
    page.tables([Table("Best first", _columns(rows), [_cells(row, rows) for row in rows])])
    shares = importance(search)
    page.heading("What matters")
    if shares:
        page.tables(
            [Table("Importance for being among the best", [], [[n, f"{s:.0%}"] for n, s in shares.items()], True)]
        )
    else:
        page.paragraph(f"Which setting matters most is said from {_LEAST_FOR_IMPORTANCE} trials on.")
    page.plots(_plots(rows))
    page.write(search.out / PAGE_FILE)
    return search.out / PAGE_FILE


# --- In words ---------------------------------------------------------------------------------------------


def _lead(settings: dict[str, Any], rows: Sequence[Row]) -> str:
    network = "the plain Vision Transformer" if settings["plain"] else "superpixels"
    counted = {state: sum(row.state == state for row in rows) for state in dict.fromkeys(_STATES.values())}
    said = ", ".join(f"{count} {state}" for state, count in counted.items() if count)
    on = ", ".join(settings["images"]) or "embedded scenes"
    return (
        f"Recipe {settings['recipe']} with {network}, {plural(len(settings['seeds']), 'seed')} a trial: {said}. "
        f"Judged by kNN on {settings['val_share']:.0%} of the training part of {on}; test images were not opened."
    )


def _shortened(messages: list[str]) -> list[str]:
    left = len(messages) - _MOST_MESSAGES
    return [*messages[:_MOST_MESSAGES], f"and {left} more, in {TABLE_FILE}"] if left > 0 else messages


def _remarks(rows: Sequence[Row], best: Row) -> list[str]:
    complete = [row for row in rows if row.state == COMPLETE]
    top, error = best.record["knn"], best.record["knn_error"]
    close = [row.number for row in complete if row is not best and row.record["knn"] > top - error]
    sentences = []
    if close:
        sentences.append(
            f"{plural(len(close), 'other trial')} cannot be told from it, being less than that error behind: "
            f"{', '.join(map(str, close))}."
        )
    for name, value in best.point.items():
        numbers = {row.point[name] for row in rows}
        if len(numbers) > 1 and all(_is_number(number) for number in numbers) and value in (min(numbers), max(numbers)):
            end = "largest" if value == max(numbers) else "smallest"
            sentences.append(f"{name} {_text(value)} is the {end} that was tried: a better one may lie beyond.")
    return sentences


def _columns(rows: Sequence[Row]) -> list[str]:
    sets = _sets(rows)
    own = [f"kNN {name}" for name in sets] if len(sets) > 1 else []
    measured = ["validation loss", "tokens", "steps", "time", "warnings"]
    return ["trial", "state", *_names(rows), "kNN", "over seeds", *own, *measured]


def _cells(row: Row, rows: Sequence[Row]) -> list[str]:
    record, sets = row.record, _sets(rows)
    by_seed = list(record.get("knn_by_seed", {}).values())
    by_set = record.get("knn_by_set", {})
    own = [_percent(by_set.get(name)) for name in sets] if len(sets) > 1 else []
    spread = f"± {100 * statistics.stdev(by_seed):.1f}" if len(by_seed) > 1 else "–"
    loss, seconds = record.get("validation_loss"), record.get("seconds")
    return [
        str(row.number),
        row.state,
        *(_text(row.point.get(name)) for name in _names(rows)),
        _percent(row.knn),
        spread,
        *own,
        "–" if loss is None else f"{loss:.3f}",
        _percent(record.get("tokens_share")),
        str(record.get("steps", "–")),
        "–" if seconds is None else duration(seconds),
        str(len(row.warnings)) if record else "–",
    ]


def _csv(rows: Sequence[Row]) -> str:
    names, sets = _names(rows), _sets(rows)
    measured = ["knn", "knn_error", "validation_loss", "loss", "tokens_share", "images_per_second", "steps", "seconds"]
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["trial", "state", *names, *measured, *(f"knn {name}" for name in sets), "warnings", "failed"])
    for row in rows:
        record = row.record
        by_set = [record.get("knn_by_set", {}).get(name) for name in sets]
        told = ["; ".join(row.warnings), record.get("failed")]
        values = [row.point.get(name) for name in names]
        table.writerow([row.number, row.state, *values, *(record.get(name) for name in measured), *by_set, *told])
    return text.getvalue()


def _names(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row.point))


def _sets(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row.record.get("knn_by_set", {})))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "–" if value is None else str(value)


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.1%}"


# --- In pictures ------------------------------------------------------------------------------------------


def _plots(rows: Sequence[Row]) -> list[Figure]:
    judged = [row for row in rows if row.knn is not None]
    if not judged:
        return []
    figures = [Figure([_drawn(partial(_history, rows=judged))], "kNN accuracy over the trials", ["History"])]
    for name in _names(judged):
        picture = _drawn(partial(_against, rows=judged, name=name))
        figures.append(Figure([picture], f"kNN accuracy by {name}", [name]))
    return figures


def _drawn(draw: Callable[[Any], None]) -> Pixels:
    # The settings of a user's own matplotlib must not turn the page dark or the text tiny.
    with matplotlib.style.context("default"):
        figure = Canvas(figsize=(_WIDTH, _HEIGHT), dpi=_DPI, layout="constrained", facecolor="white")
        canvas: Any = FigureCanvasAgg(figure)  # needs no screen
        axes: Any = figure.subplots()
        draw(axes)
        axes.grid(color="#e4e6e9", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_ylabel("kNN accuracy")
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=1))
        canvas.draw()
    return np.ascontiguousarray(np.asarray(canvas.buffer_rgba())[..., :3])


def _history(axes: Any, rows: Sequence[Row]) -> None:
    complete = sorted((row for row in rows if row.state == COMPLETE), key=lambda row: row.number)
    pruned = [row for row in rows if row.state == PRUNED]
    axes.plot([row.number for row in pruned], [row.knn for row in pruned], "x", color="#9aa0a6", label=PRUNED)
    axes.plot([row.number for row in complete], [row.knn for row in complete], "o", markersize=4, label=COMPLETE)
    best = list(itertools.accumulate((row.record["knn"] for row in complete), max))
    axes.step([row.number for row in complete], best, where="post", color="#202124", label="best so far")
    axes.set_xlabel("trial")
    axes.legend(fontsize=8, frameon=False)


def _against(axes: Any, rows: Sequence[Row], name: str) -> None:
    own = [row for row in rows if name in row.point and row.state == COMPLETE]
    values = [row.point[name] for row in own]
    if all(_is_number(value) for value in values):
        places = values
        if values and min(values) > 0 and max(values) >= _WIDE * min(values):
            axes.set_xscale("log")
    else:
        shown = sorted({_text(value) for value in values})
        places = [shown.index(_text(value)) for value in values]
        axes.set_xticks(range(len(shown)), shown)
    axes.plot(places, [row.knn for row in own], "o", markersize=4, alpha=0.6)
    at: dict[Any, list[float]] = {}
    for place, row in sorted(zip(places, own, strict=True), key=lambda pair: pair[0]):
        at.setdefault(place, []).append(row.record["knn"])
    if len(at) < len(own):
        axes.plot(list(at), [statistics.fmean(scores) for scores in at.values()], color="#202124", label="mean")
        axes.legend(fontsize=8, frameon=False)
    axes.set_xlabel(name)

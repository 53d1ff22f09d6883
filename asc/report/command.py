"""``asc report``: tables of results that ``asc eval`` wrote."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro

from asc.report.tables import write_report
from asc.tasks.classify.results import read_results


@dataclass(frozen=True)
class ReportSettings:
    """Put results beside the paper's numbers: its tables with ours in them, as Markdown, CSV and a picture."""

    results: tyro.conf.Positional[tuple[Path, ...]]
    """Result files of ``asc eval``, or folders of them."""
    out: Path = Path("report")
    """Folder for ``tables.md``, ``tables.csv`` and ``tables.png``."""
    pool: bool = False
    """Whether encoders whose names differ only in a number at the end (``mine_0``, ``mine_1``) are one row: the mean
    over pre-training runs, rather than over seeds of the evaluation alone."""


def run_report(settings: ReportSettings) -> None:
    """Write the tables and print them."""
    write_report(read_results(settings.results), settings.out, settings.pool)

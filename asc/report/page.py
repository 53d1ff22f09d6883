"""A self-contained HTML page: pictures inside the file, nothing to fetch, no scripts.

All text is escaped; a page is one file that can be mailed or put on any server.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from PIL import Image

from asc.files import write_whole
from asc.report.pictures import Pixels

# Nothing may be fetched, whatever text finds its way onto the page.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"

_STYLE = """
:root { color-scheme: light dark; --ink: #202124; --soft: #5f6368; --paper: #fff; --card: #f6f7f9;
  --line: #dadce0; --warn: #fff4de; --warn-line: #e0a030; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8eaed; --soft: #a6abb1; --paper: #17181b; --card: #212327;
    --line: #3c4043; --warn: #3a2f18; --warn-line: #b98a2c; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 88rem; padding: 1.25rem 1rem 4rem; background: var(--paper);
  color: var(--ink); font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0.5rem 0; }
h2 { font-size: 1.3rem; margin: 2.5rem 0 0.5rem; padding-top: 1.25rem; border-top: 1px solid var(--line); }
h3 { font-size: 1.05rem; margin: 1.75rem 0 0.5rem; }
p { max-width: 46rem; margin: 0.5rem 0; overflow-wrap: anywhere; }
.lead { color: var(--soft); }
.statement { font-size: 1.15rem; }
.warnings { background: var(--warn); border-left: 4px solid var(--warn-line); border-radius: 4px;
  max-width: 46rem; padding: 0.6rem 1rem; margin: 1rem 0; }
.warnings ul { margin: 0.25rem 0; padding-left: 1.2rem; }
.tables { display: grid; gap: 1rem 2rem; margin: 1rem 0;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr)); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.85rem; font-variant-numeric: tabular-nums; width: 100%; }
caption { text-align: left; font-weight: 600; padding: 0.25rem 0; }
th, td { padding: 0.2rem 0.5rem; text-align: right; border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 600; vertical-align: bottom; }
.named th:first-child { text-align: left; }
tbody th { color: var(--ink); font-weight: 400; }
.card { background: var(--card); border-radius: 10px; padding: 0.9rem; margin: 1rem 0;
  display: grid; gap: 0.9rem; grid-template-columns: minmax(0, 1fr) minmax(0, 5fr); }
.card > h3 { grid-column: 1 / -1; margin: 0; }
.card > figure { position: sticky; top: 0.5rem; align-self: start; }
.strips { display: grid; gap: 1.1rem; min-width: 0; }
.strips > div { min-width: 0; }
.strip-name { font-size: 0.85rem; font-weight: 600; margin: 0 0 0.35rem; }
.strip { display: grid; grid-auto-flow: column; grid-auto-columns: minmax(9rem, 1fr); gap: 0.6rem;
  overflow-x: auto; padding-bottom: 0.2rem; }
figure { margin: 0; min-width: 0; }
figure img { display: block; width: 100%; height: auto; border-radius: 4px; margin-bottom: 0.35rem; }
figcaption { font-size: 0.78rem; line-height: 1.35; color: var(--soft); font-variant-numeric: tabular-nums; }
figcaption b { color: var(--ink); }
.plots { display: grid; gap: 1rem; margin: 1rem 0;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 27rem), 1fr)); }
/* Plots are drawn in dark ink: their paper stays white in the dark, too. */
.plots > figure { background: #fff; border: 1px solid var(--line); border-radius: 10px; padding: 0.75rem; }
.plots figcaption { color: #5f6368; }
.plots figcaption b { color: #202124; font-size: 0.95rem; }
@media (max-width: 46rem) {
  .card { grid-template-columns: minmax(0, 1fr); }
  .card > figure { max-width: 16rem; position: static; }
  table { font-size: 0.72rem; }
  th, td { padding: 0.2rem; }
}
"""


@dataclass(frozen=True)
class Figure:
    """One or more pictures above each other, with a caption."""

    pictures: Sequence[Pixels]
    """RGB pictures."""
    alt: str
    """What they show, in words."""
    caption: Sequence[str]
    """Lines below them; the first is set bold."""


@dataclass(frozen=True)
class Table:
    """A small table of text."""

    caption: str
    """What it shows."""
    head: Sequence[str]
    """Names of the columns; empty: they need none."""
    rows: Sequence[Sequence[str]]
    """The cells, row by row."""
    named_rows: bool = False
    """Whether the first cell of a row names it."""


class Page:
    """A page that is built from top to bottom, then written."""

    def __init__(self, title: str, lead: str = "") -> None:
        self.title = title
        self._parts = [f"<h1>{escape(title)}</h1>"]
        if lead:
            self._parts.append(f'<p class="lead">{escape(lead)}</p>')

    def heading(self, text: str) -> None:
        """Begin a section."""
        self._parts.append(f"<h2>{escape(text)}</h2>")

    def paragraph(self, text: str) -> None:
        """Add running text."""
        self._parts.append(f"<p>{escape(text)}</p>")

    def statement(self, text: str) -> None:
        """Add the sentence that a reader should take away."""
        self._parts.append(f'<p class="statement">{escape(text)}</p>')

    def warnings(self, title: str, messages: Sequence[str]) -> None:
        """Add a box that cannot be overlooked; nothing if there is nothing to warn of."""
        if messages:
            items = "".join(f"<li>{escape(message)}</li>" for message in messages)
            self._parts.append(f'<div class="warnings"><b>{escape(title)}</b><ul>{items}</ul></div>')

    def tables(self, tables: Sequence[Table]) -> None:
        """Add tables, side by side where the screen is wide enough."""
        body = "".join(f'<div class="scroll">{_table(table)}</div>' for table in tables)
        self._parts.append(f'<div class="tables">{body}</div>')

    def plots(self, figures: Sequence[Figure]) -> None:
        """Add plots on white paper, side by side where the screen is wide enough."""
        self._parts.append(f'<div class="plots">{"".join(map(_figure, figures))}</div>')

    def card(self, title: str, figure: Figure, strips: Mapping[str, Sequence[Figure]]) -> None:
        """Add a picture with named strips of others beside it (on a phone: below it)."""
        named = "".join(_strip(name, figures) for name, figures in strips.items())
        body = f'<h3>{escape(title)}</h3>{_figure(figure)}<div class="strips">{named}</div>'
        self._parts.append(f'<section class="card">{body}</section>')

    def html(self) -> str:
        """The whole page."""
        body = "\n".join(self._parts)
        return (
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            '<link rel="icon" href="data:,">\n'
            f"<title>{escape(self.title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
        )

    def write(self, file: Path) -> None:
        """Write the page to a file."""
        write_whole(file, self.html().encode())


def png_bytes(image_HW3: Pixels) -> bytes:
    """The image as a PNG file."""
    buffer = io.BytesIO()
    Image.fromarray(image_HW3).save(buffer, format="PNG", optimize=True)
    return buffer.getvalue()


def _table(table: Table) -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in table.head)
    rows = "".join(f"<tr>{_cells(row, table.named_rows)}</tr>" for row in table.rows)
    caption = f"<caption>{escape(table.caption)}</caption>"
    kind = ' class="named"' if table.named_rows else ""
    top = f"<thead><tr>{head}</tr></thead>" if head else ""
    return f"<table{kind}>{caption}{top}<tbody>{rows}</tbody></table>"


def _cells(row: Sequence[str], named: bool) -> str:
    name = f'<th scope="row">{escape(row[0])}</th>' if named else ""
    return name + "".join(f"<td>{escape(cell)}</td>" for cell in row[named:])


def _strip(name: str, figures: Sequence[Figure]) -> str:
    body = "".join(map(_figure, figures))
    return f'<div><p class="strip-name">{escape(name)}</p><div class="strip">{body}</div></div>'


def _figure(figure: Figure) -> str:
    pictures = "".join(_img(picture, figure.alt) for picture in figure.pictures)
    first, *others = map(escape, figure.caption)
    lines = "<br>".join([f"<b>{first}</b>", *others])
    return f"<figure>{pictures}<figcaption>{lines}</figcaption></figure>"


def _img(image_HW3: Pixels, alt: str) -> str:
    height, width = image_HW3.shape[:2]
    data = base64.b64encode(png_bytes(image_HW3)).decode()
    return f'<img src="data:image/png;base64,{data}" width="{width}" height="{height}" alt="{escape(alt)}">'

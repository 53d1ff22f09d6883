"""Reports: pictures of superpixels, and self-contained HTML pages to show them on."""

from asc.report.page import Figure, Page, Table, png_bytes
from asc.report.pictures import boundaries, contact_sheet, draw_boundaries, enlarged, paint_means, pixel_labels

__all__ = [
    "Figure",
    "Page",
    "Table",
    "boundaries",
    "contact_sheet",
    "draw_boundaries",
    "enlarged",
    "paint_means",
    "pixel_labels",
    "png_bytes",
]

"""HTML and SVG from Python calls, safe by construction: text is escaped unless it is `Markup` already.

The result is well-formed XML, so that a parser can check it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

_EMPTY = ("meta", "br", "line", "rect", "circle", "path")  # HTML's parser would leave any other open after <name/>
_CONTROL = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # what XML 1.0 cannot hold


class Markup(str):
    """Text that is markup already and goes into a page as it is."""

    __slots__ = ()


def text(value: object) -> Markup:
    """Any value as markup: escaped, and without control characters."""
    if isinstance(value, Markup):
        return value
    return Markup(escape(_CONTROL.sub("\ufffd", str(value)), quote=True))


def tag(name: str, /, *children: object, **attributes: object) -> Markup:
    """An element. `class_` is the attribute `class`, other underscores are hyphens; None leaves an attribute out."""
    written = []
    for key, value in attributes.items():
        if value is not None:
            shown = f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else value
            written.append(f' {key.rstrip("_").replace("_", "-")}="{text(shown)}"')
    start = name + "".join(written)
    closed = name in _EMPTY and not children
    return Markup(f"<{start}/>" if closed else f"<{start}>{join(*children)}</{name}>")


def join(*parts: object) -> Markup:
    """Several pieces one after the other; None is nothing."""
    return Markup("".join(text(part) for part in parts if part is not None))


def table(rows: Sequence[Sequence[object]], *, header: Sequence[str], caption: str) -> Markup:
    """A table whose first column heads its rows; the other columns are figures, aligned to the right."""
    head = tag("tr", *(tag("th", name, scope="col") for name in header))
    lines = [tag("tr", tag("th", row[0], scope="row"), *(tag("td", cell) for cell in row[1:])) for row in rows]
    return tag("table", tag("caption", caption), tag("thead", head), tag("tbody", *lines))


def style() -> Markup:
    """The style sheet, for a page or a chart that is a file."""
    return tag("style", Markup((Path(__file__).parent / "style.css").read_text(encoding="utf-8")))


def section(title: str, note: str, *content: object) -> Markup:
    """A section of the page under its heading."""
    return tag("section", tag("h2", title), tag("p", note, class_="note"), *content)


def unfold(summary: str, *content: object) -> Markup:
    """Content that is folded until the reader opens it."""
    return tag("details", tag("summary", summary), tag("div", *content, class_="scroll"))

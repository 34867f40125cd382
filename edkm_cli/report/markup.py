"""Pages and charts come from the jinja2 templates beside this file, which escape all that is not markup already.

The result is well-formed XML, so that a parser can check it.
"""

import math
import re
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from edkm_cli.export.ownership import GENERATOR
from edkm_cli.summaries import duration, fixed, megabytes

_CONTROL = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # what XML 1.0 cannot hold


def render(template: str, **values: Any) -> str:
    return _environment().get_template(f"{template}.jinja").render(values)


def chart(name: str, **values: Any) -> Markup:
    return Markup(getattr(_environment().get_template("charts.jinja").module, name)(**values).strip())


def figure(value: float) -> str:
    """A number for people: four significant digits, thousands separated, powers of ten below 0.001.

    >>> [figure(value) for value in (1234567, 3.14159, 0.000217)]
    ['1,234,567', '3.142', '2.17e-4']
    """
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else str(value)
    if (size := abs(value)) < 1e-3:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{max(0, 3 - math.floor(math.log10(size)))}f}".rstrip("0").rstrip(".")


def setting(value: object) -> str:
    """What a run was set to, as text."""
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None else figure(value) if isinstance(value, float) else str(value)


@cache
def _environment() -> Environment:
    here = Path(__file__).parent
    options: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": True, "undefined": StrictUndefined}
    made = Environment(loader=FileSystemLoader(here), autoescape=True, finalize=_written, **options)
    made.globals |= {"generator": GENERATOR, "style": Markup((here / "style.css").read_text(encoding="utf-8"))}
    made.filters |= {one.__name__: one for one in (figure, fixed, setting, megabytes, duration)}
    made.filters |= {"number": format, "zip": zip}
    return made


def _written(value: object) -> object:
    """What stands in the page for a value: nothing for None, two digits of a position, no control characters."""
    if value is None or isinstance(value, Markup):
        return value or ""
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else _CONTROL.sub("\ufffd", str(value))

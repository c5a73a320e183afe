"""Render a self-contained HTML page: no request leaves it, Plotly is inlined once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.reporting.style import PAGE
from paceline.text import percent, signed_percent, times


def render(template: str, figures: Mapping[str, Any], **values: Any) -> str:
    """Fill a template of `reporting/templates`.

    Args:
        template: file name.
        figures: element id -> Plotly figure as a dictionary.
        values: what the template names; strings are escaped.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from plotly.offline import get_plotlyjs

    environment = Environment(
        loader=PackageLoader("paceline.reporting", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"percent": percent, "signed": signed_percent, "times": times}
    return environment.get_template(template).render(
        figures=figures, plotly_js=get_plotlyjs(), colours=PAGE, **values
    )

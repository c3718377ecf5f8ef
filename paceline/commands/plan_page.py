"""A plan as one HTML file: tables, advice and curves, without scripts and without anything from elsewhere."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from paceline.commands.plan_output import LEGEND, rows, size, title
from paceline.core.errors import UserError
from paceline.core.extras import install
from paceline.topology.planner import Plan
from paceline.topology.planner_curves import Curve, curves

INK = "#0a0b0c"  # stands for "the page's own text colour"
LINES = ("#a1b2c1", "#a1b2c2", "#a1b2c3", "#a1b2c4")  # stand for the page's colours, light or dark
DASHES = ("solid", "dashed", "dashdot", "dotted")


def write_page(plan: Plan, file: Path) -> None:
    """Raises UserError when it cannot be written, or when the packages for it are not installed."""
    try:
        import jinja2
        import matplotlib  # noqa: F401 (asked for here, before any work)
    except ModuleNotFoundError as error:
        raise UserError(f"--html needs the package {error.name}; run: {install('report')}") from error
    template = Path(__file__).with_name("plan.html").read_text(encoding="utf-8")
    speculating = [one for one in plan.groups if one.group.drafters]
    largest = max(speculating, key=lambda one: one.group.count, default=None)
    charts = [
        (curve.title, picture(curve, str(index)))
        for index, curve in enumerate(curves(plan.inputs, largest.configured.setting) if largest else [])
    ]
    page = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(template)
    shown: dict[str, Any] = {"title": title(plan), "rows": list(rows(plan)), "legend": LEGEND, "size": size}
    text = page.render(plan=plan, charts=charts, of=largest, **shown)
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{file}: cannot be written: {error.strerror}") from None


def picture(curve: Curve, salt: str) -> str:
    """An SVG element whose colours are the page's."""
    import matplotlib
    from matplotlib.figure import Figure

    settings: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": salt,
        "font.family": "sans-serif",
        "text.color": INK,
        "axes.edgecolor": INK,
        "axes.labelcolor": INK,
        "xtick.color": INK,
        "ytick.color": INK,
    }
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(6.2, 3.6), layout="constrained")
        figure.patch.set_alpha(0.0)
        axes = figure.add_subplot()
        axes.patch.set_alpha(0.0)
        for index, line in enumerate(curve.lines):
            style: dict[str, Any] = {"color": LINES[index], "linestyle": DASHES[index], "linewidth": 2, "marker": "."}
            axes.plot(curve.xs, line.ys, label=line.name, **style)
        axes.axvline(curve.here, color=INK, linewidth=0.8, linestyle="dotted", label="this plan")
        for (words, at), dashes in zip(curve.marks, DASHES[1:], strict=False):
            axes.axvline(at, color=INK, linewidth=0.8, linestyle=dashes, label=f"{words} {at:g}")
        if curve.xs[0] >= 1 and curve.xs[-1] >= 32:
            axes.set_xscale("log", base=2)
            axes.set_xticks(curve.xs, [f"{x:g}" for x in curve.xs])
            axes.minorticks_off()
        axes.set_xlabel(curve.x_label)
        axes.set_ylabel("tokens/s")
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=9)
        buffer = io.StringIO()
        figure.savefig(
            buffer, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")), transparent=True
        )
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    for index, colour in enumerate(LINES):
        text = text.replace(colour, f"var(--line-{index})")
    return text.replace(INK, "currentColor")

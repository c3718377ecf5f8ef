"""A report as one HTML file: without scripts and without anything from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.core.errors import UserError
from paceline.core.extras import install
from paceline.core.files import write_whole
from paceline.edge.report import table
from paceline.edge.report.analysis import Analysis
from paceline.edge.report.charts import charts, pictures


def write_page(analyses: Sequence[Analysis], summaries: Sequence[dict[str, Any]], file: Path) -> None:
    """Raises UserError when it cannot be written, or when the packages for it are not installed."""
    try:
        import jinja2
        import matplotlib  # noqa: F401 (asked for here, before any work)
    except ModuleNotFoundError as error:
        raise UserError(f"--html needs the package {error.name}; run: {install('report')}") from error
    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    drawn = [(chart, list(pictures(chart, analyses))) for chart in charts()]
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    text = environment.from_string(template).render(
        reports=summaries,
        title=" · ".join(report["run"] for report in summaries),
        charts=[(chart, svgs) for chart, svgs in drawn if any(svgs)],
        missing=[chart.title for chart, svgs in drawn if not any(svgs)],
        longest=max((_whole(report) for report in summaries), default=0.0) or 1.0,
        whole=_whole,
        tables=list(table.page_tables(summaries)),
        number=table.number,
        made_by=table.made_by,
    )
    try:
        write_whole(file, text)
    except OSError as error:
        raise UserError(f"{file}: cannot be written: {error.strerror}") from None


def _whole(report: dict[str, Any]) -> float:
    """Milliseconds of a round, here and away."""
    return float(sum(stage["mean"] for stage in report["stages_ms"].values()) + report["away_ms"]["mean"])

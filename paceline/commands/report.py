"""`paceline report`: where the time of drafted rounds went, on the device that drafted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.commands.options import Json
from paceline.core.printable import printable

if TYPE_CHECKING:
    from paceline.edge.report.analysis import Analysis


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run directories, or NAME.rec out of them.")],
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Also write a page with curves, in one file.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show what drafters recorded: latency by stage, over time, context and batch; power, energy, and what limits."""
    from paceline.edge.report.summary import summary

    analyses = list(_analyses(runs))
    summaries = [summary(analysis) for analysis in analyses]
    if html is not None:
        from paceline.edge.report.page import write_page

        write_page(analyses, summaries, html)
    if as_json:
        typer.echo(json.dumps(summaries, indent=2))
        return
    from rich.console import Console

    from paceline.edge.report.table import tables

    Console(highlight=False).print(tables(summaries))
    if html is not None:
        typer.echo(f"curves: {printable(str(html))}")


def _analyses(runs: list[Path]) -> list[Analysis]:
    """One for each drafter; a title names the run, and the drafter where a run has several."""
    from paceline.edge.report.analysis import Analysis
    from paceline.edge.report.recording import find_recordings, read_recording

    found = []
    for run in runs:
        paths = find_recordings(run)
        for path in paths:
            folder = path.resolve().parent.name
            title = printable(folder if len(paths) == 1 else f"{folder}/{path.stem}")
            found.append(Analysis(read_recording(path), title))
    return found

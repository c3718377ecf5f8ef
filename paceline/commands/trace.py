"""`paceline trace`: a recorded run for ui.perfetto.dev or chrome://tracing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from paceline.commands.options import finite
from paceline.core.errors import UserError
from paceline.core.files import write_whole
from paceline.core.printable import printable


def trace(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory, or a NAME.rec out of one.")],
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Default: NAME.trace.json beside the recording.")
    ] = None,
    last: Annotated[
        float | None,
        typer.Option("--last", metavar="SECONDS", min=0.001, callback=finite, help="Only the end of the run."),
    ] = None,
) -> None:
    """Write what drafters recorded as a trace: forwards, sends, and each session's rounds on a track of its own."""
    from paceline.edge.report.recording import find_recordings, read_recording
    from paceline.edge.report.trace import trace as make_trace

    paths = find_recordings(run)
    if out is not None and len(paths) > 1:
        names = ", ".join(path.name for path in paths)
        raise UserError(f"--out takes one drafter's trace, and {run} holds {names}: name one of them")
    for path in paths:
        made = make_trace(read_recording(path), last)
        file = out or path.with_name(f"{path.stem}.trace.json")
        try:
            write_whole(file, json.dumps(made, separators=(",", ":")))
        except OSError as error:
            raise UserError(f"{file}: cannot be written: {error.strerror}") from None
        typer.echo(f"{printable(str(file))}: {len(made['traceEvents'])} events; open it at https://ui.perfetto.dev")

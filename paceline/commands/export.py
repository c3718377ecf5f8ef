"""`paceline export`: a bundle for a drafter's runtime or for a target, checked before it counts as done."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.commands.options import Json
from paceline.core.errors import UserError
from paceline.core.extras import install
from paceline.core.manifest import Dtype, Profile, Quantization, Role, RuntimeName

if TYPE_CHECKING:
    from paceline.export.bundle import Report
    from paceline.export.options import Request


def export(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model's folder, or a hub id.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="The bundle's folder; it must not be there yet.")],
    role: Annotated[Role, typer.Option("--role", help="What the bundle is for.")] = "drafter",
    runtime: Annotated[
        RuntimeName | None,
        typer.Option(
            "--runtime",
            metavar="RUNTIME",
            help="What will run it: onnxruntime, tensorrt or torch. Default: onnxruntime; torch for a target.",
        ),
    ] = None,
    profile: Annotated[
        Profile | None,
        typer.Option(
            "--profile",
            metavar="PROFILE",
            help="How the graph keeps its KV: gqa, concat, static-compat or static-native. Default: gqa; "
            "static-compat for tensorrt.",
        ),
    ] = None,
    dtype: Annotated[
        Dtype | None,
        typer.Option(
            "--dtype",
            metavar="DTYPE",
            help="float16, bfloat16, float32 or float64. Default: float32; float16 for tensorrt; the model's own for "
            "torch.",
        ),
    ] = None,
    quantize: Annotated[Quantization | None, typer.Option("--quantize", help="Of weights, for onnxruntime.")] = None,
    max_context: Annotated[
        int | None,
        typer.Option("--max-context", min=16, help="Longest session in tokens. Default: 2048; all for torch."),
    ] = None,
    max_sessions: Annotated[int, typer.Option("--max-sessions", min=1, help="Most sessions at a time.")] = 16,
    texts: Annotated[
        Path | None,
        typer.Option("--texts", metavar="FILE.jsonl", help='Real text to compare on: lines with "text" or "prompt".'),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the bundle that is there.")] = False,
    as_json: Json = False,
) -> None:
    """Make a bundle of a model. A drafter's is done only once it agrees with torch: exit 1 names the layer that does
    not. A target's weights are converted, and nothing is compared."""
    from paceline.export.options import Request, check

    request = Request(model, out, role, runtime, profile, dtype, quantize, max_context, max_sessions, texts, force)
    check(request)
    with _interruptible():
        report = _make(request)
    if as_json:
        typer.echo(json.dumps(_as_dict(report), indent=2))
    else:
        from paceline.commands.export_output import show

        show(report)


def _make(request: Request) -> Report:
    try:
        from paceline.commands.export_output import ProgressBar
        from paceline.export.bundle import export as make
    except ModuleNotFoundError as error:
        if (error.name or "paceline").startswith("paceline"):
            raise
        raise UserError(f"paceline export needs the package {error.name}; run: {install('export')}") from None
    with ProgressBar() as watch:
        return make(request, watch)


@contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM ends it as Ctrl-C does: what was begun is removed, which is said."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("stopped: nothing was made", err=True)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def _as_dict(report: Report) -> dict[str, Any]:
    return {
        "out": str(report.out),
        "seconds": {step: round(seconds, 3) for step, seconds in report.seconds.items()},
        "sizes": report.sizes,
        "manifest": report.manifest.model_dump(mode="json"),
    }

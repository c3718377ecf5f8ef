"""`paceline engine`: the TensorRT engine of a drafter bundle, built and checked on the machine that will run it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from paceline.commands.options import Json, gpu

if TYPE_CHECKING:
    from paceline.export.engine import BuiltEngine
    from paceline.export.engine_check import Agreement

Library = Literal["tensorrt", "tensorrt_rtx"]


def engine(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="What `paceline export --runtime tensorrt` made.")],
    library: Annotated[Library, typer.Option("--library", help="Which TensorRT builds and runs it.")] = "tensorrt",
    device: Annotated[str, typer.Option("--device", help="cuda or cuda:1.")] = "cuda:0",
    max_batch: Annotated[
        int | None, typer.Option("--max-batch", min=1, help="Most sessions in one step. Default: 8.")
    ] = None,
    chunk: Annotated[int, typer.Option("--chunk", min=1, help="Most tokens of a prompt in one step.")] = 256,
    no_check: Annotated[bool, typer.Option("--no-check", help="Do not compare it with the bundle's graph.")] = False,
    ignore_memory: Annotated[
        bool, typer.Option("--ignore-memory", help="Build even where memory seems too small.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Build the TensorRT engine of a bundle for this machine; done only once it agrees with the bundle's graph."""
    from paceline.core import manifest as manifests
    from paceline.edge.runtimes.tensorrt_library import import_library
    from paceline.export.engine import build_engine, look_at_graph
    from paceline.export.engine_check import can_check, check_engine, graph_runtime
    from paceline.export.engine_config import EngineShapes

    gpu(device)
    manifest = manifests.read(bundle)
    look_at_graph(bundle, manifest)
    import_library(library)
    reference = None
    if not no_check:  # what is missing for it is said before the build, which takes minutes
        can_check(manifest, device)
        reference = graph_runtime(bundle, manifest)
    shapes = EngineShapes(rows=max_batch, chunk=chunk)
    with _Bar() as bar:
        built = build_engine(
            bundle,
            library=library,
            device=device,
            shapes=shapes,
            check_memory=not ignore_memory,
            progress=bar.show,
        )
        agreement = None
        if reference is not None:
            agreement = check_engine(bundle, built, reference, device, lambda share: bar.show("Comparing", share))
    if as_json:
        typer.echo(json.dumps(_as_dict(built, agreement), indent=2))
        return
    typer.echo(f"{built.path}: {built.size / 2**20:.1f} MiB for {built.key}, built in {built.seconds:.0f} s.")
    typer.echo(f"Compared: {agreement}." if agreement else "Not compared with the bundle's graph.")


class _Bar:
    """One line on stderr: the phase and how far it is; nothing where stderr is no terminal."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import Progress

        console = Console(stderr=True)
        self._progress = Progress(console=console, transient=True, disable=not console.is_terminal)
        self._tasks: dict[str, Any] = {}

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def show(self, phase: str, share: float) -> None:
        if phase not in self._tasks:
            self._tasks[phase] = self._progress.add_task(phase, total=1.0)
        self._progress.update(self._tasks[phase], completed=share)


def _as_dict(built: BuiltEngine, agreement: Agreement | None) -> dict[str, Any]:
    return {
        "file": str(built.path),
        "bytes": built.size,
        "seconds": round(built.seconds, 3),
        **built.key._asdict(),
        "layers": built.layers,
        "checked": str(agreement) if agreement else None,
    }

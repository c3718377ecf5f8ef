"""`paceline profile`: measure a model here, and write what an emulated node or `plan` needs of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.commands.options import Json, gpu
from paceline.core import manifest as manifests
from paceline.core.errors import UserError

if TYPE_CHECKING:
    from paceline.profiling import Measured


def profile(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model's folder, a bundle, or a hub id.")],
    device: Annotated[str, typer.Option("--device", help="cpu, cuda or cuda:0.")] = "cpu",
    dtype: Annotated[str, typer.Option("--dtype", help="auto, float32, bfloat16 or float16.")] = "auto",
    threads: Annotated[int | None, typer.Option("--threads", min=1, help="CPU threads.")] = None,
    context: Annotated[int, typer.Option("--context", min=1, help="Tokens that each session holds.")] = 512,
    sessions: Annotated[int, typer.Option("--sessions", min=1, help="Most sessions in one pass.")] = 8,
    draft_length: Annotated[int, typer.Option("--draft-length", min=1, max=16, help="Of a verification.")] = 4,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Passes of each kind.")] = 20,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Where to write the profile.")] = None,
    as_json: Json = False,
) -> None:
    """Measure a model's passes on this device, for `profile:` in a topology and for `plan --profile`."""
    import yaml

    from paceline.commands.profile_output import doubts, head
    from paceline.core.clock import RealClock
    from paceline.profiling import measure, turns

    if out is not None and not out.parent.is_dir():
        raise UserError(f"--out {out}: there is no folder {out.parent}")
    if threads is None and device == "cpu":
        typer.echo("warning: --threads was not given, so the runtime chooses: give what the node will have", err=True)
    loaded, drafts_only, chosen = _load(model, device, dtype, threads, sessions, context + draft_length + 1)
    done = 0

    def progress(count: int) -> None:
        nonlocal done
        done += count
        if sys.stderr.isatty():
            typer.echo(f"\r\x1b[Kmeasuring {model}: turn {done} of {turns(repeats)}", err=True, nl=False)

    found = measure(
        loaded,
        RealClock(),
        context=context,
        sessions=sessions,
        draft_length=None if drafts_only else draft_length,
        repeats=repeats,
        progress=progress,
    )
    if sys.stderr.isatty():
        typer.echo("\r\x1b[K", err=True, nl=False)
    for doubt in doubts(found):
        typer.echo(f"warning: {doubt}", err=True)
    how = f"{device}, {dtype}, {chosen}, context {context}"
    said = head(found, model, how, repeats) + yaml.safe_dump(found.profile, sort_keys=False)
    text = json.dumps(found.profile) + "\n" if as_json else said
    if out is None:
        typer.echo(text, nl=False)
        return
    try:
        out.write_text(text)
    except OSError as error:
        raise UserError(f"--out {out}: {error.strerror}") from None
    typer.echo(f"written to {out}", err=True)


def _load(
    model: str, device: str, dtype: str, threads: int | None, sessions: int, length: int
) -> tuple[Measured, bool, str]:
    """What is measured, whether it is a drafter's graph, which verifies nothing, and its CPU threads in words."""
    folder = Path(model)
    if manifests.is_bundle(folder) and (runtime := manifests.read(folder).runtime) != "torch":
        from paceline.edge.rows import ContiguousRows
        from paceline.edge.runtimes.bundle import load_runtime

        if runtime == "tensorrt":
            gpu(device)
        if dtype != "auto":
            raise UserError(f"--dtype {dtype}: the graph of {model} has the type that it was exported with")
        graph = load_runtime(runtime, folder, device=device, threads=threads, max_sessions=sessions)
        chosen = f"threads {threads or 'as the runtime chooses'}"
        return (ContiguousRows(graph) if graph.rows == "contiguous" else graph), True, chosen
    from paceline.core.lm.arena import PAGE
    from paceline.core.lm.loading import cpu_threads, load
    from paceline.profiling import CHUNK

    longest = max(length, CHUNK + 32)
    slots = sessions * -(-longest // PAGE) * PAGE
    torch_model = load(model, device=device, dtype=dtype, threads=threads, kv_slots=slots, max_context=longest)
    return torch_model, False, f"threads {cpu_threads()}{'' if threads else ' (torch chose)'}"

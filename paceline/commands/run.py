"""`paceline run`: the whole topology on this machine, once, from prompts to texts and times."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.commands.options import Json, NoDrafter, RunDir, TopologyFile, finite
from paceline.core.errors import UserError

if TYPE_CHECKING:
    from paceline.topology.spec import Topology

DEFAULT_PROMPTS = ("def add(a, b):\n", "import os\n\n\nclass ", '"""This module provides ')


def run(
    topology_file: TopologyFile,
    prompt: Annotated[list[str] | None, typer.Option("--prompt", help="A prompt; may be given several times.")] = None,
    prompts: Annotated[
        Path | None, typer.Option("--prompts", metavar="FILE.jsonl", help='Lines of {"prompt": "…"}.')
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Most tokens of an answer.")] = 128,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0.0, max=2.0, callback=finite, help="0 is greedy.")
    ] = 0.0,
    top_p: Annotated[
        float, typer.Option("--top-p", min=0.0, max=1.0, callback=finite, help="Share of probability to choose from.")
    ] = 1.0,
    seed: Annotated[int, typer.Option("--seed", min=0, max=2**64 - 1, help="Same seed, same text.")] = 0,
    no_drafter: NoDrafter = False,
    run_dir: RunDir = None,
    as_json: Json = False,
) -> None:
    """Start a whole topology here, generate, print the texts and a table, stop everything."""
    from paceline.deployment import run_directory
    from paceline.topology.spec import load_topology, require_models

    topology = load_topology(topology_file)
    require_models(topology, str(topology_file))
    texts = [*(prompt or []), *(_read_prompts(prompts) if prompts else [])] or list(DEFAULT_PROMPTS)
    for text in texts:
        if not _is_text(text):
            raise UserError(f"the prompt {text[:40]!a} is not UTF-8 text")
    options = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
    for target in topology.targets:
        if max_tokens >= target.max_context:
            raise UserError(
                f"--max-tokens {max_tokens} leaves no room in {target.name}'s context of {target.max_context}"
            )
    with run_directory(run_dir) as directory:
        job = _Job(topology, topology_file, texts, options, not no_drafter)
        report = asyncio.run(job.until_interrupted(directory))
    if as_json:
        typer.echo(json.dumps(report, ensure_ascii=False))
    else:
        from paceline.commands.run_output import show

        show(report)


@dataclass(frozen=True)
class _Job:
    """What one call of `run` is to do. options: of the completions API, the same for every prompt."""

    topology: Topology
    topology_file: Path
    prompts: list[str]
    options: dict[str, Any]
    with_drafters: bool

    async def until_interrupted(self, run_dir: Path) -> dict[str, Any]:
        """The report. SIGINT and SIGTERM cancel the run, which stops every node before it ends."""
        task = asyncio.current_task()
        assert task is not None
        stopped: list[int] = []

        def interrupt(number: int) -> None:
            if not stopped:
                stopped.append(number)
                task.cancel()

        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, interrupt, number)
        try:
            return await self.run(run_dir)
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None

    async def run(self, run_dir: Path) -> dict[str, Any]:
        """Starts everything, sends the prompts, waits for the answers, stops everything."""
        from paceline.star import running_star

        count, tokens = len(self.prompts), self.options["max_tokens"]
        with _progress(count * tokens) as progress:
            progress.say(f"starting {self.topology.name}: loading models")
            star_runs = running_star(self.topology, self.topology_file, run_dir, with_drafters=self.with_drafters)
            async with star_runs as star:
                progress.say(f"generating {count} texts")
                completions = await star.complete(self.prompts, self.options, progress.advance)
                await star.settle()
                progress.say("stopping")
                warnings = star.warnings()
            for warning in warnings:
                typer.echo(f"warning: {warning}", err=True)
            return star.report(completions)


class _Progress:
    """A bar on stderr where someone looks at it, nothing where not."""

    def __init__(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("tokens"),
            TimeElapsedColumn(),
        )
        self.bar = Progress(
            *columns,
            console=Console(stderr=True),
            transient=True,
            disable=sys.stderr is None or not sys.stderr.isatty(),
        )
        self._task = self.bar.add_task("", total=total)

    def say(self, words: str) -> None:
        self.bar.update(self._task, description=words)

    def advance(self, tokens: int) -> None:
        self.bar.advance(self._task, tokens)


@contextlib.contextmanager
def _progress(total: int) -> Iterator[_Progress]:
    progress = _Progress(total)
    with progress.bar:
        yield progress


def _is_text(prompt: str) -> bool:
    """False with half a surrogate pair in it, or bytes of the command line that are no UTF-8."""
    try:
        prompt.encode()
    except UnicodeEncodeError:
        return False
    return True


def _read_prompts(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # splitlines() would also split inside texts
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--prompts {path}: {getattr(error, 'strerror', None) or error}") from None
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found.append(json.loads(line)["prompt"])
        except (ValueError, KeyError, TypeError, RecursionError):
            raise UserError(f'{path}:{number}: each line is an object like {{"prompt": "…"}}') from None
        if not isinstance(found[-1], str):
            raise UserError(f"{path}:{number}: prompt must be a text")
    if not found:
        raise UserError(f"{path} holds no prompts")
    return found

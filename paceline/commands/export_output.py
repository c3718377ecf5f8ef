"""What `paceline export` shows: a bar while it works, then sizes, times and differences in one table."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from paceline.core.printable import printable
from paceline.export.bundle import Report
from paceline.export.watch import Watch


class ProgressBar(Watch):
    """One line on stderr for each step, while `with` holds it; nothing where stderr is no terminal."""

    def __init__(self) -> None:
        super().__init__()
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        console = Console(stderr=True)
        self._progress = Progress(*columns, console=console, disable=not console.is_terminal)
        self._task = TaskID(0)

    def __enter__(self) -> ProgressBar:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def begin(self, step: str, total: int | None) -> None:
        self._task = self._progress.add_task(step, total=total)

    def advance(self, count: int) -> None:
        self._progress.advance(self._task, count)

    def end(self) -> None:
        if self._progress.tasks[-1].total is None:
            self._progress.update(self._task, total=1, completed=1)
        self._progress.stop_task(self._task)


def show(report: Report) -> None:
    """The table, and what to do next."""
    manifest = report.manifest
    kind = " ".join(filter(None, [manifest.runtime, manifest.profile, manifest.weight_dtype, manifest.quantization]))
    title = escape(printable(f"{manifest.model.name}: {manifest.role} bundle, {kind}"))
    table = Table(title=title, show_header=False, title_justify="left")
    for name, size in sorted(report.sizes.items(), key=lambda item: -item[1])[:4]:
        table.add_row(Text(name), decimal(size))
    table.add_row("all files", decimal(sum(report.sizes.values())))
    table.add_section()
    for step, seconds in report.seconds.items():
        table.add_row(step, f"{seconds:.1f} s")
    if manifest.parity:
        table.add_section()
        for words, value in _differences(manifest.parity):
            table.add_row(words, value)
    if not manifest.parity:
        table.add_section()
        table.add_row("compared", "nothing: each weight was converted, rounded once at the most")
    table.add_section()
    table.add_row("sessions", f"{manifest.max_sessions} of up to {manifest.max_context} tokens")
    table.add_row("licence", Text(printable(", ".join(manifest.licences) or "none beside the model")))
    console = Console(highlight=False)
    console.print(table)
    console.print(printable(f"{report.out} is done.{_next(report)}"), markup=False, soft_wrap=True)
    if report.engines_gone:
        gone = ", ".join(report.engines_gone)
        console.print(f"Engines of the bundle before it are gone with its graph: {gone}", markup=False, soft_wrap=True)


def _differences(parity: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [
        ("compared", f"{parity['subject']} with {parity['reference']}, {parity['steps']} steps"),
        ("largest difference of a logit", f"{parity['max_difference']:.2g}"),
        ("the same, in standard deviations", f"{parity['logit_difference']:.2g}"),
        ("keys and values, likewise", f"{parity['kv_difference']:.2g}"),
        ("same likeliest token on real text", f"{parity['top1_agreement']:.1%} of {parity['text_positions']}"),
        ("same proposal at temperature", _shares(parity["agreement"])),
    ]
    before = parity.get("before_quantization")
    return [*rows, ("before it was quantised", _shares(before["agreement"]))] if before else rows


def _shares(agreement: dict[str, float]) -> str:
    return ", ".join(f"{temperature}: {share:.1%}" for temperature, share in agreement.items())


def _next(report: Report) -> str:
    """A topology's paths are relative to its file, so that the whole one is shown."""
    if report.manifest.runtime == "tensorrt":
        return f" Build its engine on the machine that will run it: paceline engine {report.out}"
    return f" In a topology: {{model: {report.out.absolute()}}}"

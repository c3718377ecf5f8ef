"""A report for a terminal of 80 columns: one column a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

Summary = dict[str, Any]
Row = tuple[str, list[str]]

HEAD_STAGES = Text("\nwhere a round's time goes, mean ms (p99)", style="bold")
HEAD_PREDICTION = Text("\nplanned → measured", style="bold")
HEAD_DEVICE = Text("\ndevice", style="bold")
HEAD_ABSENT = Text("\nsensors that are missing", style="bold")


def tables(reports: Sequence[Summary]) -> RenderableType:
    """Everything that is shown of one run, or of several side by side."""
    parts: list[RenderableType] = [_table(reports, _overview(reports), header=True)]
    parts += [HEAD_STAGES, _table(reports, _stages(reports))]
    if any(report["prediction"]["rows"] for report in reports):
        parts += [HEAD_PREDICTION, _table(reports, _prediction(reports))]
    parts += [HEAD_DEVICE, _table(reports, _device(reports))]
    if any(report["sensors"]["absent"] for report in reports):
        parts.append(HEAD_ABSENT)
        parts += [Text(line, style="dim") for line in _absent(reports)]
    parts.append(Text())
    for report in reports:
        lines = [*report["limits"]]
        if report["prediction"]["why"]:
            lines.append(f"No prediction: {report['prediction']['why']}.")
        for line in lines:
            parts.append(Text(f"• {report['run'] + ': ' if len(reports) > 1 else ''}{line}"))
    return Group(*parts)


def _table(reports: Sequence[Summary], rows: Iterator[Row], header: bool = False) -> Table:
    """header: the runs' names."""
    table = Table(show_header=header, pad_edge=False, box=None)
    table.add_column("", style="dim", no_wrap=True)
    for report in reports:
        table.add_column(Text(report["run"]), justify="right", overflow="fold")
    for name, cells in rows:
        table.add_row(Text(name), *map(Text, cells))  # as they are: a recording's words are no markup
    return table


def _overview(reports: Sequence[Summary]) -> Iterator[Row]:
    def row(name: str, cell: Any) -> Row:
        return name, [cell(report) for report in reports]

    yield row("drafter", lambda r: f"{r['drafter']}, {made_by(r)}{' (emulated figures)' if r['emulated'] else ''}")
    yield row("began", lambda r: f"{r['began']}, {r['seconds']:.1f} s")
    yield row("targets / sessions", lambda r: f"{len(r['targets'])} / {r['sessions']}")
    yield row("rounds / token steps", lambda r: f"{r['rounds']} / {r['steps']}")
    yield row("rounds made ahead", _ahead)
    yield row("busy", lambda r: _percent(r["busy"]["in_all"]))
    yield row("  of it reading", lambda r: _percent(r["busy"]["reading"]))
    yield row("drafting ahead, besides", lambda r: _percent(r["busy"]["ahead"]))
    yield row("round here, p50 / p90 / p99 ms", lambda r: spread(r["latency_ms"]))
    yield row("round away, p50 / p90 / p99 ms", lambda r: spread(r["away_ms"]))
    yield row("token step, p50 / p90 / p99 ms", lambda r: spread(r["step_ms"]))
    yield row("sessions in a step", lambda r: f"{r['batch']:.2f}")
    yield row("tokens drafted / accepted", lambda r: f"{r['tokens']['drafted']} / {r['tokens']['accepted']}")
    yield row("acceptance length", lambda r: f"{r['acceptance_length']:.2f}")
    yield row("agreement", lambda r: "–" if r["agreement"] is None else f"{r['agreement']:.3f}")
    yield row("mJ a token drafted / accepted", lambda r: energy(r["energy"]))


def _stages(reports: Sequence[Summary]) -> Iterator[Row]:
    for stage, name in reports[0]["stage_names"].items():
        values = [report["stages_ms"][stage] for report in reports]
        yield name, [f"{number(value['mean'])} ({number(value['p99'])})" for value in values]


def _prediction(reports: Sequence[Summary]) -> Iterator[Row]:
    first = next(report["prediction"]["rows"] for report in reports if report["prediction"]["rows"])
    for place, row in enumerate(first):
        cells = []
        for report in reports:
            rows = report["prediction"]["rows"]
            cells.append(f"{number(rows[place]['predicted'])} → {number(rows[place]['measured'])}" if rows else "–")
        yield f"{row['what']}, {row['unit']}", cells


def _device(reports: Sequence[Summary]) -> Iterator[Row]:
    yield "power W, mean (max)", [mean_max(report["energy"]["watts"]) for report in reports]
    for kind, what in (("temperature", "°C"), ("clock_mhz", "clock MHz"), ("load", "load %")):
        for name in sorted({name for report in reports for name in report[kind]}):
            yield f"{name} {what}, mean (max)", [mean_max(report[kind].get(name)) for report in reports]
    yield "throttled", ["; ".join(report["throttled"]) or "no" for report in reports]
    headings = dict.fromkeys(heading for report in reports for heading in report["environment"])
    for heading in headings:
        yield heading, [report["environment"].get(heading, "–") for report in reports]


def _absent(reports: Sequence[Summary]) -> Iterator[str]:
    """A line for each sensor that was not there, with the reason; named by run where runs differ."""
    every = [report["sensors"]["absent"] for report in reports]
    for report, absent in zip(reports, every, strict=True):
        of = f"{report['run']}: " if any(other != absent for other in every) else ""
        yield from (f"{of}{name}: {reason}" for name, reason in absent.items())
        if not of:
            return


def _ahead(report: Summary) -> str:
    """How many rounds needed no work when the target asked, and which share."""
    ahead, rounds = report["rounds_ahead"], report["rounds"]
    return f"{ahead} ({_percent(ahead / rounds)})" if ahead else "none"


def made_by(report: Summary) -> str:
    """The runtime of a draft model; strategies without a model have none."""
    return str(report["runtime"] if report["strategy"] == "draft_model" else report["strategy"])


def spread(times: dict[str, float]) -> str:
    """p50, p90 and p99."""
    return " / ".join(number(times[key]) for key in ("p50", "p90", "p99"))


def energy(found: Summary) -> str:
    """Millijoules a drafted and an accepted token."""
    drafted, accepted = found["joules_a_drafted_token"], found["joules_an_accepted_token"]
    if drafted is None or accepted is None:
        return "power not known"
    return f"{number(1e3 * drafted)} / {number(1e3 * accepted)}"


def mean_max(found: dict[str, float] | None) -> str:
    """What a range comes to."""
    return "–" if found is None else f"{number(found['mean'])} ({number(found['max'])})"


def number(value: float) -> str:
    """Three figures, without an exponent."""
    if abs(value) < 0.0005:
        return "0"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}" if abs(value) >= 0.01 else f"{value:.3f}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def page_tables(reports: Sequence[Summary]) -> Iterator[tuple[str, str, list[str], list[Row]]]:
    """(heading, note, column headings, rows) of each table of the page."""
    runs = ["", *(report["run"] for report in reports)] if len(reports) > 1 else []
    yield "Figures", "", runs, list(_overview(reports))
    yield "Stages of a round at the drafter", "Mean ms, and each one's 99th percentile.", runs, list(_stages(reports))
    why = "; ".join(report["prediction"]["why"] for report in reports if report["prediction"]["why"])
    note = f"No prediction: {why}." if why else "The planner, given the run's step times and acceptance."
    rows = list(_prediction(reports)) if any(report["prediction"]["rows"] for report in reports) else []
    yield "Planned → measured", note, runs, rows
    power = " + ".join(name.removeprefix("power.") for name in reports[0]["sensors"]["power"])
    yield "Device", f"Power is {power}, of the whole machine." if power else "", runs, list(_device(reports))

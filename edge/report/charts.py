"""The curves of a report, as SVG elements in the page's own colours."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.edge.report.analysis import Analysis
from paceline.edge.report.recording import AHEAD, DRAFT, READ

INK = "#0a0b0c"  # stands for "the page's own text colour"
COLOURS = tuple(f"#a1b2c{digit}" for digit in range(8))  # stand for the page's colours, light or dark
BINS = 60  # of a curve over time, and of a histogram
LEAST = 5  # values in a bin, for it to be drawn
LIFTED = ("°C", "MHz")  # scales that need not begin at zero
WIDE = 10.0  # a tail that is so many times the median asks for a logarithmic scale
Draw = Callable[[Any, Analysis], bool]


class Chart(NamedTuple):
    """One kind of curve. draw: onto matplotlib's axes; False when there is nothing to draw."""

    title: str
    note: str
    x_label: str
    y_label: str
    draw: Draw


def charts() -> tuple[Chart, ...]:
    """All of them, in the order of the page."""
    return (
        Chart("Round at the drafter", "percentiles over time", "seconds", "ms", _over_time),
        Chart("Round at the drafter", "how often; the outer bars hold what is beyond", "ms", "% of rounds", _histogram),
        Chart("Token step by batch", "median, and from the 10th to the 90th percentile", "sessions", "ms", _by_batch),
        Chart("Token step by context", "what a round's session held", "tokens", "ms", _by_context),
        Chart("Busy", "share of the time in forwards; ahead is beside the rest", "seconds", "%", _busy),
        Chart("Accepted tokens", "of the proposals of a round", "tokens", "% of rounds", _accepted),
        Chart("Power", "of the whole, and rail by rail", "seconds", "W", _power),
        Chart("Temperature", "by thermal zone", "seconds", "°C", _temperature),
        Chart("Load", "of the GPU, the CPU and this process", "seconds", "%", _load),
        Chart("Clocks", "while it was recorded", "seconds", "MHz", _clocks),
    )


def pictures(chart: Chart, analyses: Sequence[Analysis]) -> Iterator[str]:
    """One SVG a run, with the same vertical scale; empty where a run has nothing to draw."""
    import matplotlib
    from matplotlib.figure import Figure

    settings: Any = {
        "svg.fonttype": "none",
        "text.parse_math": False,  # names come from recordings
        "svg.hashsalt": chart.title + chart.y_label,
        "font.family": "sans-serif",
        "font.size": 9,
        **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
    }
    with matplotlib.rc_context(settings):
        drawn = []
        for analysis in analyses:
            figure = Figure(figsize=(4.4, 2.6), layout="constrained")
            axes = figure.add_subplot()
            drawn.append((figure, axes, chart.draw(axes, analysis)))
        shown = [axes for _, axes, has in drawn if has]
        wide = any(axes.get_yscale() == "log" for axes in shown)
        for axes in shown if wide else ():
            axes.set_yscale("log")
        bottom = min((axes.get_ylim()[0] for axes in shown), default=0.0) if wide or chart.y_label in LIFTED else 0.0
        top = max((axes.get_ylim()[1] for axes in shown), default=1.0)
        for analysis, (_, axes, has) in zip(analyses, drawn, strict=True):
            if has and chart.x_label == "seconds":
                axes.set_xlim(0.0, analysis.seconds or 1.0)  # the same for every curve over a run's time
        for figure, axes, has in drawn:
            yield _svg(figure, axes, chart, (bottom, top)) if has else ""


def _svg(figure: Any, axes: Any, chart: Chart, limits: tuple[float, float]) -> str:
    axes.set_ylim(*limits)
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color=INK, alpha=0.12, linewidth=0.6)
    axes.set_axisbelow(True)
    handles, _ = axes.get_legend_handles_labels()
    if len(handles) > 1:
        axes.legend(frameon=False, fontsize=8, loc="upper left", ncols=3, bbox_to_anchor=(0, 1.18), columnspacing=1)
    for patch in (figure.patch, axes.patch):
        patch.set_alpha(0.0)
    buffer = io.StringIO()
    unsaid = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(buffer, format="svg", metadata=unsaid, transparent=True)
    text = buffer.getvalue()
    text = text[text.index("<svg") :].replace("<svg", f'<svg role="img" aria-label="{chart.title}: {chart.note}"', 1)
    for index, colour in enumerate(COLOURS):
        text = text.replace(colour, f"var(--c{index})")
    return text.replace(INK, "currentColor")


# --- what is drawn


def _over_time(axes: Any, analysis: Analysis) -> bool:
    """p50, p90 and p99 of each bin."""
    times, values = analysis.answered - analysis.span[0], 1e3 * analysis.latency
    bins = list(_binned(times, values, _edges(times)))
    for place, (percent, style) in enumerate(((99, ":"), (90, "--"), (50, "-"))):
        points = [(middle, np.percentile(inside, percent, method="inverted_cdf")) for middle, inside in bins]
        if points:
            axes.plot(*zip(*points, strict=True), style, color=COLOURS[2 - place], label=f"p{percent}")
    if len(values) and np.percentile(values, 99) > WIDE * np.median(values):
        axes.set_yscale("log")
    return bool(bins)


def _histogram(axes: Any, analysis: Analysis) -> bool:
    values = 1e3 * analysis.latency
    if len(values) < LEAST:
        return False
    shortest, usual, longest = np.percentile(values, [0.5, 50, 99.5])
    values = np.clip(values, shortest, longest)
    bins: Any = min(BINS, max(8, len(values) // 20))
    if longest > WIDE * usual and shortest > 0:
        axes.set_xscale("log")
        bins = np.geomspace(shortest, longest, bins + 1)
    axes.hist(values, bins=bins, weights=np.full(len(values), 100 / len(values)), color=COLOURS[0])
    return True


def _by_batch(axes: Any, analysis: Analysis) -> bool:
    steps = analysis.draft_steps
    sizes, counts = np.unique(steps["batch"], return_counts=True)
    groups = [(int(size), 1e3 * steps["total"][steps["batch"] == size]) for size in sizes[counts >= LEAST]]
    return _ranges(axes, groups)


def _by_context(axes: Any, analysis: Analysis) -> bool:
    """A round's work over its steps, by what its session held."""
    some = analysis.step_of_round > 0  # others were answered with what was drafted before
    context, times = analysis.rounds["context"][some].astype(np.float64), 1e3 * analysis.step_of_round[some]
    if not len(context):
        return False
    return _ranges(axes, list(_binned(context, times, np.linspace(context.min(), context.max() + 1, 25))))


def _ranges(axes: Any, groups: Sequence[tuple[float, NDArray[Any]]]) -> bool:
    """Medians, and what lies between the 10th and the 90th percentile."""
    if not groups:
        return False
    places = [place for place, _ in groups]
    low, middle, high = np.array([np.percentile(values, [10, 50, 90], method="inverted_cdf") for _, values in groups]).T
    if len(groups) < 3:
        axes.errorbar(places, middle, (middle - low, high - middle), fmt="o", color=COLOURS[0], capsize=4)
        axes.set_xlim(0, max(places) + 1)
        axes.xaxis.get_major_locator().set_params(integer=True)
    else:
        axes.fill_between(places, low, high, color=COLOURS[0], alpha=0.25, linewidth=0)
        axes.plot(places, middle, "o-", markersize=3, color=COLOURS[0])
    return True


def _busy(axes: Any, analysis: Analysis) -> bool:
    steps = analysis.recording.steps
    if len(steps) < LEAST:
        return False
    times = steps["start"] - analysis.span[0]
    edges = _edges(times)
    middles, width, below = (edges[1:] + edges[:-1]) / 2, edges[1] - edges[0], np.zeros(len(edges) - 1)
    for place, (kind, name) in enumerate(((DRAFT, "drafting"), (READ, "reading"), (AHEAD, "ahead"))):
        some = steps["kind"] == kind
        if not np.any(some):
            continue
        share = 100 * np.histogram(times[some], edges, weights=steps["total"][some].astype(np.float64))[0] / width
        axes.fill_between(middles, below, below + share, color=COLOURS[place], alpha=0.8, linewidth=0, label=name)
        below = below + share
    return True


def _accepted(axes: Any, analysis: Analysis) -> bool:
    known = analysis.accepted[analysis.accepted >= 0]
    if not len(known):
        return False
    counts = np.bincount(known)
    axes.bar(range(len(counts)), 100 * counts / len(known), color=COLOURS[2], width=0.7)
    axes.set_xticks(range(len(counts)))
    return True


def _power(axes: Any, analysis: Analysis) -> bool:
    rails = [
        name for name in analysis.device.names("power.") if name not in analysis.recording.info["sensors"]["power"]
    ]
    return _channels(axes, analysis, ["power", *rails], lambda name: name.partition(".")[2] or "the whole")


def _temperature(axes: Any, analysis: Analysis) -> bool:
    """The hottest zones, where there are many."""
    device = analysis.device
    names = sorted(device.names("temp."), key=lambda name: -float(np.max(device.channel(name)[1])))
    return _channels(axes, analysis, names, lambda name: name.removeprefix("temp.").removesuffix("-thermal"))


def _load(axes: Any, analysis: Analysis) -> bool:
    return _channels(axes, analysis, analysis.device.names("load."), lambda name: name.removeprefix("load."))


def _clocks(axes: Any, analysis: Analysis) -> bool:
    return _channels(axes, analysis, analysis.device.names("clock."), lambda name: name.removeprefix("clock."))


def _channels(axes: Any, analysis: Analysis, names: Sequence[str], label: Callable[[str], str]) -> bool:
    """Figures of the sensors over time; at most as many as there are colours."""
    any_drawn = False
    for place, name in enumerate(names[: len(COLOURS)]):
        times, values = analysis.device.channel(name)
        inside = (times >= analysis.span[0]) & (times <= analysis.span[1] + 1.0)
        if np.sum(inside) > 1:
            times, values = times[inside] - analysis.span[0], values[inside]
            thin = slice(None, None, max(1, len(times) // 300))
            axes.plot(times[thin], values[thin], color=COLOURS[place], label=label(name))
            any_drawn = True
    return any_drawn


def _edges(times: NDArray[Any]) -> NDArray[Any]:
    """Bins of equal width over the whole time; fewer where there is little to put into them."""
    if not len(times):
        return np.array([0.0, 1.0])
    count = int(np.clip(len(times) // (4 * LEAST), 1, BINS))
    return np.linspace(float(np.min(times)), float(np.max(times)) + 1e-9, count + 1)


def _binned(places: NDArray[Any], values: NDArray[Any], edges: NDArray[Any]) -> Iterator[tuple[float, NDArray[Any]]]:
    """(middle, values) of each bin with enough of them."""
    which = np.digitize(places, edges) - 1
    for index in range(len(edges) - 1):
        inside = values[which == index]
        if len(inside) >= LEAST:
            yield float((edges[index] + edges[index + 1]) / 2), inside

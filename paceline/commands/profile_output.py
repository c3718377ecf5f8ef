"""What `paceline profile` says beside its figures: how they were measured, their spread, and when to doubt them."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.profiling import Measurement, spread

WIDE = 1.5  # the 90th percentile over the 10th, from which on a machine was busy
RAISED = 1.1  # a median raised by more was replaced by another pass's, for more than the clock's sake


def head(found: Measurement, model: str, how: str, repeats: int) -> str:
    """Comments above the profile. how: device, type, threads and context."""
    lines = [
        f"{model}, {how}; measured here, medians of {repeats} passes.",
        "step_ms: one token of each of so many sequences. verify_ms: so many tokens in one pass.",
    ]
    for kind in ("step", "verify"):
        if sizes := found.spread(kind):
            ranges = ", ".join(f"{size}: {low:.3g}–{high:.3g}" for size, (low, high) in sizes.items())
            lines.append(f"{kind}_ms, p10–p90: {ranges}")
    if found.raised:
        medians = ", ".join(f"{kind}_ms {size}: {ms:.3g}" for (kind, size), ms in found.raised.items())
        lines.append(f"a larger pass is never quicker, so these were raised to a smaller one's; medians: {medians}")
    lines += [
        "agreement is not measured here: `paceline report` shows it of a recorded run. Of `paceline bench` at a fixed",
        "draft length k it is the a that solves A = (1 - a^(k+1))/(1 - a), A being the tokens of a drafted round.",
    ]
    return "".join(f"# {line}\n" for line in lines)


def doubts(found: Measurement) -> Iterator[str]:
    """A sentence each on what makes the figures doubtful."""
    ranges = {key: spread(times) for key, times in found.times.items()}
    ratios = {key: high / low for key, (low, high) in ranges.items() if low > 0}
    if ratios and max(ratios.values()) > WIDE:
        kind, size = max(ratios, key=lambda key: ratios[key])
        low, high = ranges[kind, size]
        yield (
            f"the same pass took from {low:.3g} to {high:.3g} ms ({kind}_ms of {size}, p10 and p90): this machine was "
            "busy; measure again when it is not, or with more --repeats"
        )
    curves = {kind: found.profile[f"{kind}_ms"] for kind, _ in found.raised}
    for (kind, size), median in found.raised.items():
        curve = curves[kind]
        assert isinstance(curve, dict)
        if curve[size] > RAISED * median:
            yield (
                f"{kind}_ms of {size} is the {curve[size]:.3g} ms of a smaller pass, and no median, which was "
                f"{median:.3g} ms: measure again"
            )
            return

"""The device beside the drafter: power, temperature, clocks, throttling and load, by whatever this machine has.

Sources are looked for once. One that is missing costs its figures and nothing else; the reason is recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from paceline.core.clock import Clock, RealClock
from paceline.edge import sensors_sysfs as sysfs
from paceline.edge.sensors_devices import Absent, Jtop, Nvml, Process, Rapl

ROOT = Path("/")
POWER = "power"  # the channel that holds the whole


class Source(Protocol):
    """Figures by channel name; see sensors_sysfs.Channel for names and units."""

    name: str

    def read(self) -> dict[str, float]:
        """What it says now; without what cannot be read at the moment."""


class Sensors:
    """All sources of this machine. absent: why others are missing. total: the channels that make up `power`."""

    def __init__(self, root: Path = ROOT, clock: Clock | None = None) -> None:
        self.absent: dict[str, str] = {}
        self.sources: list[Source] = []
        for name, look, reason in FILES:
            source = sysfs.Sysfs(name, look(root))
            if source.channels:
                self.sources.append(source)
            else:
                self.absent[name] = reason
        for kind in (Nvml, Rapl, Jtop, Process):
            try:
                self.sources.append(kind(root, clock or RealClock()))
            except Absent as reason_why:
                self.absent[kind.name] = str(reason_why)
        self.total: tuple[str, ...] = ()

    def sample(self) -> dict[str, float]:
        """Every figure there is now, and in `power` the whole; of two sources for one figure the first counts."""
        found: dict[str, float] = {}
        for source in self.sources:
            for name, value in source.read().items():
                found.setdefault(name, value)
        if not self.total:
            self.total = _total(list(found))
        if self.total and all(name in found for name in self.total):
            found[POWER] = sum(found[name] for name in self.total)
        return found

    @property
    def about(self) -> dict[str, object]:
        """For the recording: who answered, who did not and why, and what `power` is."""
        return {"sources": [source.name for source in self.sources], "absent": self.absent, "power": list(self.total)}


def _total(names: list[str]) -> tuple[str, ...]:
    """jtop's sum counts where it is the only one to see the rails."""
    if "power.jtop-total" in names and not any(whole in names for whole in sysfs.WHOLE_BOARD):
        return ("power.jtop-total",)
    return sysfs.total_of([name for name in names if name != "power.jtop-total"])


FILES: tuple[tuple[str, Callable[[Path], list[sysfs.Channel]], str], ...] = (
    ("hwmon", sysfs.rails, "no INA3221 or INA238 under /sys/class/hwmon"),
    ("thermal", sysfs.temperatures, "no /sys/class/thermal/thermal_zone*"),
    ("throttling", sysfs.throttling, "no alerts of cooling devices and no event counters"),
    ("clocks", sysfs.clocks, "no cpufreq and no devfreq of a GPU"),
    ("gpu load", sysfs.gpu_load, "no load file of a devfreq GPU"),
)

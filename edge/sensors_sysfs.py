"""What the kernel shows of a board in files: power rails, temperatures, clocks, throttling, GPU load.

Every function takes the root of a file system, so that a tree of small text files stands in for a board.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

TOO_COLD = -100.0  # °C; what a sensor of a part that is switched off says
# Rails of the AGX Orin that are fed by another rail with a sensor of its own.
FED_BY_OTHERS = frozenset({"power.VDDQ_VDD2_1V8AO"})
WHOLE_BOARD = ("power.VIN", "power.VDD_IN")  # rails that everything runs through, best first


class Channel(NamedTuple):
    """One figure: the product of the whole numbers in `files`, times `scale`.

    Names say the unit: power.* W, temp.* °C, clock.* MHz, load.* %, throttle.* a state or a count, memory.* bytes.
    """

    name: str
    files: tuple[Path, ...]
    scale: float

    def read(self) -> float | None:
        """None where it cannot be read just now: a part that is switched off answers with an error."""
        value = self.scale
        for file in self.files:
            number = read_number(file)
            if number is None:
                return None
            value *= number
        return None if self.name.startswith("temp.") and value < TOO_COLD else value


class Sysfs:
    """A source of figures out of files."""

    def __init__(self, name: str, channels: list[Channel]) -> None:
        self.name = name
        self.channels = [channel for channel in channels if any(file.exists() for file in channel.files)]

    def read(self) -> dict[str, float]:
        values = ((channel.name, channel.read()) for channel in self.channels)
        return {name: value for name, value in values if value is not None}


def read_text(file: Path) -> str:
    """Without the line's end and the zero byte of device trees; empty where there is no such file."""
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip("\0\n ")
    except OSError:
        return ""


def read_number(file: Path) -> int | None:
    text = read_text(file)
    try:
        return int(text)
    except ValueError:
        return None


def rails(root: Path) -> list[Channel]:
    """Power of each rail: INA3221 has volts and amperes of three rails, INA238 the power of one."""
    found = []
    for folder in _hwmons(root):
        chip = read_text(folder / "name")
        if chip.startswith("ina3221"):
            for label in sorted(folder.glob("in*_label")):
                number = label.name.removeprefix("in").removesuffix("_label")
                rail, current = read_text(label), folder / f"curr{number}_input"
                if rail and rail != "NC" and current.exists():  # the sum of shunt voltages has no current
                    found.append(Channel(f"power.{rail}", (folder / f"in{number}_input", current), 1e-6))
        elif chip.startswith("ina238"):
            rail = read_text(folder / "in1_label") or "VIN"
            found.append(Channel(f"power.{rail}", (folder / "power1_input",), 1e-6))
    return found


def total_of(names: list[str]) -> tuple[str, ...]:
    """Which of these power channels add up to the whole; empty where there is none."""
    for whole in WHOLE_BOARD:
        if whole in names:
            return (whole,)
    return tuple(name for name in names if name.startswith("power.") and name not in FED_BY_OTHERS)


def temperatures(root: Path) -> list[Channel]:
    """Of each thermal zone, by its type."""
    zones = sorted((root / "sys/class/thermal").glob("thermal_zone*"))
    return [Channel(f"temp.{read_text(zone / 'type')}", (zone / "temp",), 1e-3) for zone in zones]


def throttling(root: Path) -> list[Channel]:
    """Alerts of cooling devices (0: off), and over-current events since the board started."""
    found = []
    for device in sorted((root / "sys/class/thermal").glob("cooling_device*")):
        kind = read_text(device / "type")
        if kind.endswith("-alert"):
            found.append(Channel(f"throttle.{kind}", (device / "cur_state",), 1.0))
    for folder in _hwmons(root):
        for file in sorted(folder.glob("oc*_event_cnt")):
            found.append(Channel(f"throttle.{file.name.removesuffix('_event_cnt')}-events", (file,), 1.0))
    for file in sorted((root / "sys/devices/system/cpu").glob("cpu*/thermal_throttle/package_throttle_count"))[:1]:
        found.append(Channel("throttle.cpu-package-events", (file,), 1.0))
    return found


def clocks(root: Path) -> list[Channel]:
    """Of each CPU cluster, of the GPU, and of the memory where root may look."""
    found = []
    for policy in sorted((root / "sys/devices/system/cpu/cpufreq").glob("policy*")):
        found.append(Channel(f"clock.cpu{policy.name[6:]}", (policy / "scaling_cur_freq",), 1e-3))
    for device in _gpus(root):
        found.append(Channel("clock.gpu", (device / "cur_freq",), 1e-6))
    found.append(Channel("clock.memory", (root / "sys/kernel/debug/bpmp/debug/clk/emc/rate",), 1e-6))
    return found


def gpu_load(root: Path) -> list[Channel]:
    """In percent; only Orin and its elders have the file, later boards tell NVML."""
    return [Channel("load.gpu", (device / "device/load",), 0.1) for device in _gpus(root)]


def _gpus(root: Path) -> list[Path]:
    """The devfreq folder of the GPU, or of its graphics clusters; one at the most."""
    devices = sorted((root / "sys/class/devfreq").glob("*"))
    return [d for d in devices if d.name.endswith((".gpu", ".ga10b", ".gv11b")) or d.name == "gpu-gpc-0"][:1]


def _hwmons(root: Path) -> Iterator[Path]:
    """Each chip once, by whichever way the kernel shows it."""
    seen = set()
    for pattern in ("sys/class/hwmon/hwmon*", "sys/bus/i2c/devices/*/hwmon/hwmon*"):
        for folder in sorted(root.glob(pattern)):
            real = folder.resolve()
            if real not in seen:
                seen.add(real)
                yield folder

"""Sources of figures beyond plain files: counters of energy, NVIDIA's library, jtop, and the process itself.

Each constructor raises Absent with the reason where its source is not to be had.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from paceline.core.clock import Clock
from paceline.edge.sensors_sysfs import read_number, read_text

JTOP_SOCKET = "run/jtop.sock"
# Of NVML's reasons for a lower clock: power cap, heat, and brakes by hardware.
NVML_THROTTLED = 0x4 | 0x8 | 0x20 | 0x40 | 0x80


class Absent(Exception):
    """A source is not to be had; the message says why."""


class Rapl:
    """Intel's and AMD's counters of energy, as watts since the last reading."""

    name = "rapl"

    def __init__(self, root: Path, clock: Clock) -> None:
        zones = sorted((root / "sys/class/powercap").glob("intel-rapl:*"))
        self._zones = {zone: read_text(zone / "name") for zone in zones}
        if not zones:
            raise Absent("no /sys/class/powercap/intel-rapl: not on this processor, or hidden by a virtual machine")
        if all(read_number(zone / "energy_uj") is None for zone in zones):
            raise Absent("/sys/class/powercap/intel-rapl:*/energy_uj is for root alone")
        self._clock = clock
        self._last: dict[Path, tuple[float, int]] = {}
        self.read()

    def read(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for zone, name in self._zones.items():
            energy, now = read_number(zone / "energy_uj"), self._clock.now()
            if energy is None or not (name.startswith("package") or name == "dram"):
                continue  # cores and uncore are parts of a package
            before = self._last.get(zone)
            self._last[zone] = now, energy
            if before is not None and now > before[0]:
                turns = read_number(zone / "max_energy_range_uj") or 0
                joules = 1e-6 * (energy - before[1] + (turns if energy < before[1] else 0))
                found[f"power.{name}"] = found.get(f"power.{name}", 0.0) + joules / (now - before[0])
        return found


class Nvml:
    """NVIDIA's management library: desktop cards, and Thor."""

    name = "nvml"

    def __init__(self, root: Path, clock: Clock) -> None:
        try:
            self._nvml: Any = import_module("pynvml")
        except ImportError:
            raise Absent("the package nvidia-ml-py is not installed") from None
        try:
            self._nvml.nvmlInit()
            self._device = self._nvml.nvmlDeviceGetHandleByIndex(0)
        except self._nvml.NVMLError as error:
            raise Absent(f"NVML: {error}") from None
        self.device_name = str(self._nvml.nvmlDeviceGetName(self._device))

    def read(self) -> dict[str, float]:
        nvml, device = self._nvml, self._device
        asks: dict[str, Callable[[], Any]] = {
            "power.gpu": lambda: nvml.nvmlDeviceGetPowerUsage(device) / 1e3,
            "temp.gpu": lambda: nvml.nvmlDeviceGetTemperature(device, nvml.NVML_TEMPERATURE_GPU),
            "clock.gpu": lambda: nvml.nvmlDeviceGetClockInfo(device, nvml.NVML_CLOCK_GRAPHICS),
            "clock.memory": lambda: nvml.nvmlDeviceGetClockInfo(device, nvml.NVML_CLOCK_MEM),
            "load.gpu": lambda: nvml.nvmlDeviceGetUtilizationRates(device).gpu,
            "memory.gpu": lambda: nvml.nvmlDeviceGetMemoryInfo(device).used,
            "throttle.gpu": lambda: bool(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(device) & NVML_THROTTLED),
        }
        found = {}
        for name, ask in asks.items():
            try:
                found[name] = float(ask())
            except nvml.NVMLError:  # Orin and Thor answer only some of them
                continue
        return found


class Jtop:
    """jetson-stats, where its root service runs: it may read what others may not."""

    name = "jtop"

    def __init__(self, root: Path, clock: Clock) -> None:
        if not (root / JTOP_SOCKET).exists():
            raise Absent("its service does not run (no /run/jtop.sock)")
        try:
            module: Any = import_module("jtop")
        except ImportError:
            raise Absent("the package jetson-stats is not installed") from None
        self._failure = module.JtopException
        self._jtop = module.jtop(interval=0.5)
        try:
            self._jtop.start()
        except (OSError, self._failure) as error:
            raise Absent(f"jtop: {error}") from None

    def read(self) -> dict[str, float]:
        try:
            return self._read() if self._jtop.ok() else {}
        except (OSError, KeyError, TypeError, self._failure):  # its service has just gone, or a board it does not know
            return {}

    def _read(self) -> dict[str, float]:
        jtop = self._jtop
        found = {f"power.{name}": rail["power"] / 1e3 for name, rail in jtop.power.get("rail", {}).items()}
        if "tot" in jtop.power:
            found["power.jtop-total"] = jtop.power["tot"]["power"] / 1e3
        for gpu in jtop.gpu.values():
            found["load.gpu"] = float(gpu["status"]["load"])
            found["clock.gpu"] = gpu["freq"]["cur"] / 1e3
        if "EMC" in jtop.memory:
            found["clock.memory"] = jtop.memory["EMC"]["cur"] / 1e3
        return found


class Process:
    """This process and the machine: load of the CPU, and memory."""

    name = "psutil"

    def __init__(self, root: Path, clock: Clock) -> None:
        try:
            self._psutil: Any = import_module("psutil")
        except ImportError:
            raise Absent("the package psutil is not installed") from None
        self._process = self._psutil.Process(os.getpid())
        self.read()  # the first answer is zero: it is measured from one reading to the next

    def read(self) -> dict[str, float]:
        return {
            "load.cpu": self._psutil.cpu_percent(),
            "load.process": self._process.cpu_percent(),
            "memory.process": float(self._process.memory_info().rss),
            "memory.used": float(self._psutil.virtual_memory().used),
        }

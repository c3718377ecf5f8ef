"""What boards say of themselves, out of trees of small files; and what is said where nothing is to be had."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.core.clock import ManualClock
from paceline.edge.sensors import Sensors
from paceline.edge.sensors_devices import Absent, Jtop, Nvml, Process, Rapl
from paceline.edge.sensors_environment import environment

BOARDS = Path(__file__).parent / "boards"


def board(name: str, root: Path) -> Path:
    """Makes the file system of boards/NAME.txt in `root`."""
    for line in (BOARDS / f"{name}.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        path, _, content = line.partition(" =")
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content.strip().replace("\\n", "\n").replace("\\0", "\0"))
    return root


def figures(name: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Sensors, dict[str, float]]:
    """A board's sensors and one sample, without what this machine itself would add."""
    for package in ("pynvml", "psutil", "jtop"):
        monkeypatch.setitem(sys.modules, package, None)
    sensors = Sensors(board(name, root), ManualClock())
    return sensors, sensors.sample()


def test_an_orin_nano_is_read_out_of_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rails, zones, clocks, alerts and load; the sum of shunt voltages and a zone that is off are left out."""
    sensors, sample = figures("orin-nano", tmp_path, monkeypatch)
    assert sample == pytest.approx(
        {
            "power.VDD_IN": 9.250304,
            "power.VDD_CPU_GPU_CV": 3.18464,
            "power.VDD_SOC": 1.79136,
            "power": 9.250304,
            "temp.cpu-thermal": 51.687,
            "temp.gpu-thermal": 53.062,
            "temp.tj-thermal": 53.062,
            "throttle.cpu-throttle-alert": 0.0,
            "throttle.gpu-throttle-alert": 1.0,
            "throttle.oc1-events": 0.0,
            "throttle.oc2-events": 1.0,
            "throttle.oc3-events": 27390.0,
            "clock.cpu0": 1728.0,
            "clock.cpu4": 1190.4,
            "clock.gpu": 1020.0,
            "load.gpu": 87.4,
        }
    )
    assert sensors.about["sources"] == ["hwmon", "thermal", "throttling", "clocks", "gpu load"]
    assert sensors.absent == {
        "nvml": "the package nvidia-ml-py is not installed",
        "rapl": "no /sys/class/powercap/intel-rapl: not on this processor, or hidden by a virtual machine",
        "jtop": "its service does not run (no /run/jtop.sock)",
        "psutil": "the package psutil is not installed",
    }


def test_an_agx_orins_power_is_the_sum_of_the_rails_that_are_not_fed_by_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """12 + 3 + 4 W; the 0.5 W of the memory's rail are among the 4."""
    sensors, sample = figures("agx-orin", tmp_path, monkeypatch)
    assert sample == pytest.approx(
        {
            "power.VDD_GPU_SOC": 12.0,
            "power.VDD_CPU_CV": 3.0,
            "power.VIN_SYS_5V0": 4.0,
            "power.VDDQ_VDD2_1V8AO": 0.5,
            "power": 19.0,
        }
    )
    assert sensors.about["power"] == ["power.VDD_GPU_SOC", "power.VDD_CPU_CV", "power.VIN_SYS_5V0"]


def test_a_thors_power_is_what_comes_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The INA238 before everything else; a sleeping GPU's temperature is missing, its load left to NVML."""
    sensors, sample = figures("thor", tmp_path, monkeypatch)
    assert sample == pytest.approx(
        {
            "power.VIN": 62.5,
            "power.VDD_GPU": 29.7,
            "power.VDD_CPU_SOC_MSS": 9.9,
            "power.VIN_SYS_5V0": 6.5,
            "power": 62.5,
            "temp.cpu-thermal": 53.7,
            "temp.tj-thermal": 55.1,
            "throttle.oc3-events": 179.0,
            "clock.gpu": 1575.0,
        }
    )
    assert sensors.absent["gpu load"] == "no load file of a devfreq GPU"


def test_the_environment_of_a_board(tmp_path: Path) -> None:
    """JetPack from its package, the power mode by name, one clock figure where it is pinned."""
    orin = environment(board("orin-nano", tmp_path / "orin"))
    assert orin["board"] == "NVIDIA Jetson Orin Nano Engineering Reference Developer Kit Super"
    assert (orin["JetPack"], orin["L4T"], orin["power mode"]) == ("6.2+b77", "36.4.3", "MAXN_SUPER")
    assert (orin["CPU clock"], orin["GPU clock"]) == ("1728 MHz, schedutil", "306–1020 MHz, nvhost_podgov")
    assert orin["memory"] == "7.6 GiB"
    thor = environment(board("thor", tmp_path / "thor"))
    assert (thor["L4T"], thor["power mode"], "JetPack" in thor) == ("39.2.0", "120W", False)


def test_counters_of_energy_become_watts(tmp_path: Path) -> None:
    """Two packages and their memory; parts of a package are not counted twice, and a counter may wrap."""
    zones = {
        "intel-rapl:0": ("package-0", 1_000_000),
        "intel-rapl:0:0": ("core", 0),
        "intel-rapl:0:1": ("dram", 0),
        "intel-rapl:1": ("package-1", 9_000_000),
    }
    for zone, (name, energy) in zones.items():
        folder = tmp_path / "sys/class/powercap" / zone
        folder.mkdir(parents=True)
        (folder / "name").write_text(name)
        (folder / "energy_uj").write_text(str(energy))
        (folder / "max_energy_range_uj").write_text("10000000")
    clock = ManualClock()
    rapl = Rapl(tmp_path, clock)
    clock.advance(0.5)
    for zone, energy in {"intel-rapl:0": 7_000_000, "intel-rapl:0:1": 500_000, "intel-rapl:1": 1_000_000}.items():
        (tmp_path / "sys/class/powercap" / zone / "energy_uj").write_text(str(energy))
    assert rapl.read() == pytest.approx({"power.package-0": 12.0, "power.dram": 1.0, "power.package-1": 4.0})


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_counters_of_energy_that_only_root_may_read_say_so(tmp_path: Path) -> None:
    folder = tmp_path / "sys/class/powercap/intel-rapl:0"
    folder.mkdir(parents=True)
    (folder / "energy_uj").write_text("1")
    (folder / "energy_uj").chmod(0)
    with pytest.raises(Absent, match="for root alone"):
        Rapl(tmp_path, ManualClock())


class FakeNvmlError(Exception):
    """Stands for pynvml.NVMLError."""


def fake_nvml(**answers: Any) -> SimpleNamespace:
    """Named a fake: NVML with these answers; what is not given is not supported."""

    def unsupported(*_: object) -> None:
        raise FakeNvmlError("Not Supported")

    names = [
        "nvmlDeviceGetPowerUsage",
        "nvmlDeviceGetTemperature",
        "nvmlDeviceGetClockInfo",
        "nvmlDeviceGetUtilizationRates",
        "nvmlDeviceGetMemoryInfo",
        "nvmlDeviceGetCurrentClocksThrottleReasons",
    ]
    module = SimpleNamespace(
        NVMLError=FakeNvmlError,
        NVML_TEMPERATURE_GPU=0,
        NVML_CLOCK_GRAPHICS=0,
        NVML_CLOCK_MEM=2,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda index: f"gpu {index}",
        nvmlDeviceGetName=lambda device: "NVIDIA Thor",
    )
    for name in names:
        answer = answers.get(name)
        setattr(module, name, unsupported if answer is None else lambda *_, answer=answer: answer)
    return module


def test_nvml_gives_what_the_board_supports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thor answers its load and nothing of its power; a power cap (0x4) is throttling, idleness (0x1) is not."""
    answers = {
        "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=63, memory=12),
        "nvmlDeviceGetCurrentClocksThrottleReasons": 0x5,
        "nvmlDeviceGetTemperature": 51,
    }
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(**answers))
    source = Nvml(tmp_path, ManualClock())
    assert source.read() == {"temp.gpu": 51.0, "load.gpu": 63.0, "throttle.gpu": 1.0}
    assert source.device_name == "NVIDIA Thor"


def test_nvml_without_a_driver_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = fake_nvml()

    def missing() -> None:
        raise FakeNvmlError("NVML Shared Library Not Found")

    module.nvmlInit = missing
    monkeypatch.setitem(sys.modules, "pynvml", module)
    with pytest.raises(Absent, match=r"^NVML: NVML Shared Library Not Found$"):
        Nvml(tmp_path, ManualClock())


class FakeJtop:
    """Named a fake: what the client of jetson-stats offers of an Orin, in its units (mW, kHz)."""

    def __init__(self, interval: float) -> None:
        self.power = {"rail": {"VDD_SOC": {"power": 1800}}, "tot": {"power": 9200, "name": "VDD_IN"}}
        self.gpu = {"gpu": {"status": {"load": 87.4}, "freq": {"cur": 1_020_000}}}
        self.memory = {"RAM": {"used": 1}, "EMC": {"cur": 3_199_000, "val": 30}}

    def start(self) -> None:
        """Connects to the service."""

    def ok(self) -> bool:
        return True


def test_jtop_is_asked_where_its_service_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sum is the power of a board whose rails we may not read."""
    monkeypatch.setitem(sys.modules, "jtop", SimpleNamespace(jtop=FakeJtop, JtopException=RuntimeError))
    for package in ("pynvml", "psutil"):
        monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/jtop.sock").touch()
    assert Jtop(tmp_path, ManualClock()).name == "jtop"
    sample = Sensors(tmp_path, ManualClock()).sample()
    assert sample == pytest.approx(
        {
            "power.VDD_SOC": 1.8,
            "power.jtop-total": 9.2,
            "power": 9.2,
            "load.gpu": 87.4,
            "clock.gpu": 1020.0,
            "clock.memory": 3199.0,
        }
    )


def test_the_process_and_its_machine_are_looked_at(tmp_path: Path) -> None:
    """With the real psutil."""
    pytest.importorskip("psutil")
    found = Process(tmp_path, ManualClock()).read()
    assert 1 << 20 < found["memory.process"] < found["memory.used"] * 4
    assert 0.0 <= found["load.cpu"] <= 100.0

"""What a measurement was made on: board, JetPack, power mode, clocks, processor, versions. Read once, from files."""

from __future__ import annotations

import os
import platform
import re
from importlib import metadata
from pathlib import Path

from paceline.edge.sensors_sysfs import read_number, read_text

PACKAGES = ("paceline", "numpy", "tensorrt", "onnxruntime", "onnxruntime-gpu", "torch", "tokenizers")
_RELEASE = re.compile(r"R(\d+) \(release\), REVISION: ([\d.]+)")
_MODE = re.compile(r"<\s*POWER_MODEL\s+ID=(\d+)\s+NAME=(\S+)\s*>")


def environment(root: Path = Path("/")) -> dict[str, str]:
    """Heading → value, in the order to show; what this machine does not have is left out."""
    found = {
        "board": read_text(root / "proc/device-tree/model"),
        "JetPack": _jetpack(root),
        "L4T": _l4t(root),
        "power mode": _power_mode(root),
        "processor": _processor(root),
        "memory": _memory(root),
        "CPU clock": _cpu_clock(root),
        "GPU clock": _gpu_clock(root),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        **{name: version for name in PACKAGES if (version := _version(name))},
    }
    return {heading: value for heading, value in found.items() if value}


def _l4t(root: Path) -> str:
    """Out of a line like `# R36 (release), REVISION: 4.3, GCID: …`."""
    match = _RELEASE.search(read_text(root / "etc/nv_tegra_release"))
    return f"{match[1]}.{match[2]}" if match else ""


def _jetpack(root: Path) -> str:
    """The version of the package nvidia-jetpack; a board may run without it."""
    for paragraph in read_text(root / "var/lib/dpkg/status").split("\n\n"):
        if paragraph.startswith("Package: nvidia-jetpack\n"):
            match = re.search(r"^Version: (\S+)", paragraph, re.MULTILINE)
            return match[1] if match else ""
    return ""


def _power_mode(root: Path) -> str:
    """By name, as nvpmodel calls it: its ids differ from board to board."""
    names = dict(_MODE.findall(read_text(root / "etc/nvpmodel.conf")))
    match = re.search(r"(\d+)", read_text(root / "var/lib/nvpmodel/status"))
    if match is None:
        return ""
    number = str(int(match[1]))
    return str(names.get(number, f"mode {number}"))


def _processor(root: Path) -> str:
    text = read_text(root / "proc/cpuinfo")
    match = re.search(r"^(?:model name|Model)\s*:\s*(.+)$", text, re.MULTILINE)
    return f"{os.cpu_count()} × {match[1] if match else platform.machine()}"


def _memory(root: Path) -> str:
    match = re.search(r"^MemTotal:\s+(\d+) kB", read_text(root / "proc/meminfo"), re.MULTILINE)
    return f"{int(match[1]) / 2**20:.1f} GiB" if match else ""


def _cpu_clock(root: Path) -> str:
    """The range that the governor may use; one figure after jetson_clocks."""
    policy = root / "sys/devices/system/cpu/cpufreq/policy0"
    governor = read_text(policy / "scaling_governor")
    return _range(policy / "scaling_min_freq", policy / "scaling_max_freq", 1e-3, governor)


def _gpu_clock(root: Path) -> str:
    for device in sorted((root / "sys/class/devfreq").glob("*")):
        if device.name.endswith(".gpu") or device.name == "gpu-gpc-0":
            return _range(device / "min_freq", device / "max_freq", 1e-6, read_text(device / "governor"))
    return ""


def _range(low_file: Path, high_file: Path, scale: float, governor: str) -> str:
    low, high = read_number(low_file), read_number(high_file)
    if low is None or high is None:
        return ""
    span = f"{high * scale:.0f}" if low == high else f"{low * scale:.0f}–{high * scale:.0f}"
    return f"{span} MHz" + (f", {governor}" if governor else "")


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""

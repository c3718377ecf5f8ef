"""What `doctor` asks of the machine itself. Each probe is a generator of lines; none raises."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from importlib import metadata, util
from pathlib import Path
from typing import Any, Literal

from paceline.core.extras import install

Status = Literal["ok", "warn", "fail"]

CORE_PACKAGES = ("numpy", "pydantic", "msgspec", "tokenizers", "anyio", "paho-mqtt", "httpx")
CLOUD_PACKAGES = ("torch", "transformers", "safetensors", "fastapi", "uvicorn", "prometheus-client")
# Instructions that decide how fast a CPU multiplies matrices.
FLAGS = ("avx2", "fma", "avx512f", "avx_vnni", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")
FLAGS_ARM = ("asimd", "asimddp", "i8mm", "bf16", "sve", "sve2")


@dataclass(frozen=True)
class Probe:
    """One line: what was looked at, how it is, and what to do when it is not well. numbers: for machines."""

    name: str
    status: Status
    detail: str
    advice: str = ""
    numbers: dict[str, Any] = field(default_factory=dict)

    def report(self) -> dict[str, Any]:
        """As `--json` prints it."""
        return {"name": self.name, "status": self.status, "detail": self.detail, "advice": self.advice, **self.numbers}


def version_of(package: str) -> str | None:
    """Its version, without importing it; None when it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def versions(needs: Set[str]) -> Iterator[Probe]:
    """Python and packages. needs: what the topology asks of this machine, such as torch."""
    status: Status = "ok" if sys.version_info >= (3, 10) else "fail"
    yield Probe("python", status, f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    for package in ("paceline", *CORE_PACKAGES):
        version = version_of(package)
        if version:
            yield Probe(package, "ok", version)
        else:
            yield Probe(package, "fail", "not installed", install())
    for package in CLOUD_PACKAGES:
        version = version_of(package)
        if version:
            yield Probe(package, "ok", version)
        elif package in needs:
            yield Probe(package, "fail", "not installed, but the topology needs it", install("cloud"))
        else:
            yield Probe(package, "warn", "not installed; targets need it", install("cloud"))
    uvloop = version_of("uvloop")
    if uvloop:
        yield Probe("uvloop", "ok", uvloop)
    else:
        yield Probe("uvloop", "warn", "not installed; links are about four times slower", "pip install uvloop")


def machine(threads: int) -> Iterator[Probe]:
    """Cores and memory. threads: how many the topology's nodes use on this machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    model, flags = _cpu()
    known = [flag for flag in (*FLAGS, *FLAGS_ARM) if flag in flags]
    detail = f"{cores} cores, {model}" + (f", {' '.join(known)}" if known else "")
    if flags and platform.machine() == "x86_64" and "avx2" not in flags:
        yield Probe("cpu", "warn", f"{detail}; no AVX2", "expect models to be several times slower")
    else:
        yield Probe("cpu", "ok", detail)
    if threads > cores:
        detail = f"the topology's nodes use {threads} threads on {cores} cores"
        yield Probe("threads", "warn", detail, "lower threads, or expect nodes to slow one another")
    elif threads:
        yield Probe("threads", "ok", f"{threads} of {cores} cores")
    available = _meminfo("MemAvailable")
    if available is not None:
        low = available < 1 << 30
        detail = f"{available / 2**30:.1f} GiB available"
        yield Probe("memory", "warn" if low else "ok", detail, "models may not fit" if low else "")


def clocks() -> Iterator[Probe]:
    """Deadlines and latencies are read from the monotonic clock: it must be fine and cheap."""
    resolution = time.get_clock_info("monotonic").resolution
    start, rounds = time.perf_counter(), 10_000
    for _ in range(rounds):
        time.monotonic()
    cost = (time.perf_counter() - start) / rounds
    source = _read("/sys/devices/system/clocksource/clocksource0/current_clocksource") or "unknown"
    detail = f"{source}, resolution {resolution * 1e9:.0f} ns, {cost * 1e9:.0f} ns to read"
    if resolution > 1e-4 or cost > 2e-6:
        yield Probe("clock", "warn", detail, "measured latencies will be coarse; prefer the clock source tsc")
    else:
        yield Probe("clock", "ok", detail)
    governor = _read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
    if governor == "powersave":
        yield Probe("cpu governor", "warn", governor, "for steady latencies: cpupower frequency-set -g performance")
    elif governor:
        yield Probe("cpu governor", "ok", governor)


def gpu(needs: Set[str]) -> Iterator[Probe]:
    """CUDA as torch sees it."""
    wanted: Status = "fail" if "cuda" in needs else "ok"
    if util.find_spec("torch") is None:
        yield Probe("gpu", wanted, "unknown: torch is not installed")
        return
    try:
        import torch

        if not torch.cuda.is_available():
            built = f"torch is built for CUDA {torch.version.cuda}" if torch.version.cuda else "torch is a CPU build"
            advice = "set device: cpu, or install a driver and a CUDA build of torch" if wanted == "fail" else ""
            yield Probe("gpu", wanted, f"none usable; {built}", advice)
            return
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            capability = f"sm_{properties.major}{properties.minor}"
            detail = f"{properties.name}, {capability}, {properties.total_memory / 2**30:.0f} GiB, "
            yield Probe(f"cuda:{index}", "ok", detail + f"CUDA {torch.version.cuda}")
    except Exception as error:  # a broken driver raises anything; that is what doctor is asked about
        yield Probe("gpu", "fail" if wanted == "fail" else "warn", f"torch does not work: {error}", "reinstall torch")


def providers(needs: Set[str]) -> Iterator[Probe]:
    """Graph runtimes; not installed is fine unless the topology names one."""
    # TensorRT for RTX cards serves as well.
    tensorrt = "tensorrt_rtx" if util.find_spec("tensorrt") is None and util.find_spec("tensorrt_rtx") else "tensorrt"
    for name, module, distribution in (
        ("onnxruntime", "onnxruntime", "onnxruntime"),
        ("tensorrt", tensorrt, tensorrt),
    ):
        if util.find_spec(module) is None:
            status: Status = "fail" if name in needs else "ok"
            yield Probe(name, status, "not installed" + ("" if name in needs else "; nothing here needs it"))
            continue
        try:
            loaded = __import__(module)
            detail = version_of(distribution) or str(getattr(loaded, "__version__", "installed"))
            if module != name:
                detail = f"{module} {detail}"
            if name == "onnxruntime":
                detail += ", built with " + ", ".join(loaded.get_available_providers())
            yield Probe(name, "ok", detail)
        except Exception as error:  # missing driver libraries raise ImportError, OSError and others
            yield Probe(name, "fail" if name in needs else "warn", f"does not load: {error}")


def _cpu() -> tuple[str, frozenset[str]]:
    """Model name and instruction flags; of an unknown system only what platform says."""
    fields: dict[str, str] = {}
    for line in (_read("/proc/cpuinfo") or "").splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip().lower(), value.strip())
    model = fields.get("model name") or fields.get("hardware") or platform.processor() or platform.machine()
    return model, frozenset((fields.get("flags") or fields.get("features") or "").split())


def _meminfo(key: str) -> int | None:
    """Bytes out of /proc/meminfo."""
    for line in (_read("/proc/meminfo") or "").splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    return None


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None

"""Is there room to build an engine? Said before the build, which would end in a killed process otherwise."""

from __future__ import annotations

import shutil
from pathlib import Path

from paceline.core.errors import UserError
from paceline.edge.runtimes.tensorrt_library import Library

# × the weights: TensorRT's copies, the kernels that it makes or tries, the plan.
# tensorrt takes 3 to 4 as a rule; tensorrt_rtx took 6.1 for 134 million parameters in float16.
MEMORY_FACTOR: dict[Library, int] = {"tensorrt": 4, "tensorrt_rtx": 6}
MEMORY_BASE = 1 << 30  # CUDA's and TensorRT's own
DISK_FACTOR = 2  # × the weights: the plan, and the one that it replaces
MEMINFO = Path("/proc/meminfo")
GIB = float(1 << 30)


def check_room(folder: Path, weights: int, library: Library, meminfo: Path = MEMINFO) -> None:
    """Bytes of the graph with its weights against this machine's memory and disk. UserError with the arithmetic."""
    factor = MEMORY_FACTOR[library]
    needed = factor * weights + MEMORY_BASE
    available = available_memory(meminfo)
    if available is not None and available < needed:
        raise UserError(
            f"building needs about {needed / GIB:.1f} GiB of memory ({factor} × {weights / GIB:.2f} GiB of"
            f" weights + {MEMORY_BASE / GIB:.0f} GiB), and {available / GIB:.1f} GiB are available: stop other programs"
            " (a desktop takes 1 GiB: sudo systemctl isolate multi-user.target), or add swap; --ignore-memory tries"
            " anyway"
        )
    room, free = DISK_FACTOR * weights, shutil.disk_usage(folder).free
    if free < room:
        raise UserError(
            f"{folder} needs {room / GIB:.1f} GiB free for the engine ({DISK_FACTOR} × the weights), and has"
            f" {free / GIB:.1f} GiB: make room, or move the bundle to a larger disk"
        )


def available_memory(meminfo: Path = MEMINFO) -> int | None:
    """Bytes that programs can still get, swap included; None where the system does not say."""
    try:
        lines = meminfo.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    fields = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines) if rest}
    if "MemAvailable" not in fields:
        return None
    return fields["MemAvailable"] + fields.get("SwapFree", 0)

"""As many threads as there are idle cores: one busy core makes every parallel region of a training step wait for it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

TICKS = os.sysconf("SC_CLK_TCK")


def busy_seconds() -> float:
    """CPU seconds that all processes of this machine have used (Linux)."""
    user, nice, system = (int(field) for field in Path("/proc/stat").read_text().split()[1:4])
    return (user + nice + system) / TICKS


class Threads:
    """Adjusts torch's thread count every few seconds to what other processes leave over."""

    def __init__(self, most: int, every: float = 3.0) -> None:
        self.most, self.every = most, every
        self.cores = len(os.sched_getaffinity(0))
        self.last = (time.monotonic(), busy_seconds(), time.process_time())
        torch.set_num_threads(most)

    def adjust(self) -> None:
        now = (time.monotonic(), busy_seconds(), time.process_time())
        wall, busy, own = (new - old for new, old in zip(now, self.last, strict=True))
        if wall >= self.every:
            others = max(busy - own, 0.0) / wall
            torch.set_num_threads(max(1, min(self.most, round(self.cores - others))))
            self.last = now

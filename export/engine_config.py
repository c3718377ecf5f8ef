"""How an engine is built: the shapes it is for, its memory, what TensorRT remembers of earlier builds, progress."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.core.errors import UserError
from paceline.core.manifest import Manifest
from paceline.edge.runtimes.tensorrt_steps import Profile
from paceline.export.engine_room import available_memory

Progress = Callable[[str, float], None]  # the phase, and the share of it that is done

MOST_WORKSPACE = 1 << 30  # drafters are small; on a Jetson it is taken from everybody's memory


@dataclass(frozen=True)
class EngineShapes:
    """rows: most sessions in a batched step. tokens: most new tokens of each. chunk: most of a prompt in one step."""

    rows: int | None = None  # 8, or as many as the bundle has sessions
    tokens: int = 32  # what a drafter catches up with in a batch
    chunk: int = 256

    def profiles(self, manifest: Manifest) -> tuple[Profile, Profile]:
        """One for batched steps, one for prompts."""
        rows, longest = self.rows or min(8, manifest.max_sessions), manifest.max_context
        return Profile(rows, min(self.tokens, longest)), Profile(1, min(self.chunk, longest))


def configure(
    trt: Any, builder: Any, network: Any, profiles: Sequence[Profile], timing_cache: Path | None = None
) -> Any:
    """A builder's configuration. No precision flags: the network is strongly typed."""
    config = builder.create_builder_config()
    available = available_memory()
    workspace = min(MOST_WORKSPACE, available // 4) if available else MOST_WORKSPACE
    config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, workspace)
    for most in profiles:
        profile = builder.create_optimization_profile()
        for index in range(network.num_inputs):
            tensor = network.get_input(index)
            shape = tuple(tensor.shape)
            profile.set_shape(
                tensor.name,
                _filled(shape, Profile(1, 1)),
                _filled(shape, Profile((most.rows + 1) // 2, 1 if most.rows > 1 else most.tokens)),
                _filled(shape, most),
            )
        if config.add_optimization_profile(profile) < 0:
            raise UserError(f"TensorRT refused shapes of up to {most.rows} rows × {most.tokens} tokens")
    if timing_cache is not None:
        use_timings(config, timing_cache)
    return config


def use_timings(config: Any, timing_cache: Path) -> None:
    """Timings of earlier builds; where they are broken or of another device, none."""
    cache = config.create_timing_cache(timing_cache.read_bytes() if timing_cache.is_file() else b"")
    if cache is None or not config.set_timing_cache(cache, False):
        config.set_timing_cache(config.create_timing_cache(b""), False)


def keep_timings(config: Any, timing_cache: Path) -> None:
    """Writes what the build learnt, whole or not at all, for the next one."""
    cache = config.get_timing_cache()
    if cache is None:
        return
    timing_cache.parent.mkdir(parents=True, exist_ok=True)
    temporary = timing_cache.with_name(f".{timing_cache.name}.{os.getpid()}")
    temporary.write_bytes(cache.serialize())
    os.replace(temporary, timing_cache)


def monitor_of(trt: Any, progress: Progress) -> Any:
    """Tells `progress` of the outermost phases. What it raises, Ctrl-C too, ends the build at the next step and is kept
    in `error`: an exception must not travel through TensorRT."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]  # has no type
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.error: BaseException | None = None
            self._steps: dict[str, int] = {}

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            if parent_phase is None:
                self._steps[phase_name] = num_steps
                self._tell(phase_name, 0.0)

        def phase_finish(self, phase_name: str) -> None:
            if self._steps.pop(phase_name, None):
                self._tell(phase_name, 1.0)

        def step_complete(self, phase_name: str, step: int) -> bool:
            if phase_name in self._steps:
                self._tell(phase_name, (step + 1) / self._steps[phase_name])
            return self.error is None

        def _tell(self, phase: str, share: float) -> None:
            try:
                progress(phase, share)
            except (Exception, KeyboardInterrupt) as error:
                self.error = error

    return Monitor()


def _filled(shape: tuple[int, ...], size: Profile) -> tuple[int, ...]:
    """A shape with its open sizes filled in: the first is the rows, a later one the tokens."""
    return tuple(known if known >= 0 else size.rows if axis == 0 else size.tokens for axis, known in enumerate(shape))

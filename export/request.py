"""What an export is asked for, with the defaults that a user would expect; what does not go together is refused."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from paceline.core.errors import UserError
from paceline.core.lm.loading import check_family
from paceline.core.manifest import Dtype, Profile, Quantization, Role, RuntimeName
from paceline.export import graph_family
from paceline.export.source import Source

GRAPH_CONTEXT = 2048  # a topology's default; a graph's rows take memory for all of it
MAX_SESSIONS = 16  # a topology's default
# Per runtime: the profiles whose graphs it can run, the default first.
PROFILES: dict[RuntimeName, tuple[Profile, ...]] = {
    "onnxruntime": ("gqa", "concat", "static-compat"),
    "tensorrt": ("static-compat", "static-native"),
    "torch": (),
}
# Per profile: the types of weights and KV, the default first.
DTYPES: dict[Profile, tuple[Dtype, ...]] = {
    "gqa": ("float32", "float16"),
    "concat": ("float32", "float16"),
    "static-compat": ("float32", "float16"),
    "static-native": ("float16", "bfloat16"),
}


@dataclass(frozen=True)
class Request:
    """An export. None: the default of the role, the runtime and the model; `resolved` fills it in."""

    model: str
    out: Path
    role: Role = "drafter"
    runtime: RuntimeName | None = None
    profile: Profile | None = None
    dtype: Dtype | None = None
    quantize: Quantization | None = None
    max_context: int | None = None
    max_sessions: int = MAX_SESSIONS
    texts: Path | None = None
    force: bool = False


@dataclass(frozen=True)
class Resolved:
    """A request without anything open. profile is None for torch."""

    request: Request
    runtime: RuntimeName
    profile: Profile | None
    dtype: Dtype
    max_context: int


def resolve(request: Request, source: Source) -> Resolved:
    """Raises UserError, one sentence, for options that contradict each other or the model; UnsupportedModel for a
    family that cannot be had."""
    runtime = request.runtime or ("torch" if request.role == "target" else "onnxruntime")
    if request.role == "target" and runtime != "torch":
        raise UserError(
            f"--role target --runtime {runtime}: a target bundle holds weights for torch; leave --runtime out"
        )
    if runtime == "torch":
        return _torch(request, source)
    known = PROFILES[runtime]
    profile = request.profile or known[0]
    if profile not in known:
        raise UserError(f"--profile {profile}: {runtime} runs {', '.join(known)}")
    dtypes = DTYPES[profile]
    dtype = request.dtype or ("float16" if runtime == "tensorrt" else dtypes[0])
    if dtype not in dtypes:
        raise UserError(f"--dtype {dtype}: a {profile} graph has {' or '.join(dtypes)}")
    if request.quantize and (runtime != "onnxruntime" or dtype != "float32"):
        raise UserError(f"--quantize {request.quantize}: only float32 graphs for onnxruntime are quantised")
    graph_family.check(source.config)
    return Resolved(request, runtime, profile, dtype, _context(request, source, GRAPH_CONTEXT))


def _torch(request: Request, source: Source) -> Resolved:
    if request.profile or request.quantize:
        option = f"--profile {request.profile}" if request.profile else f"--quantize {request.quantize}"
        raise UserError(f"{option} is for graphs, and a bundle for torch has none: leave it out")
    own = str(source.config.dtype or "float32").removeprefix("torch.")
    dtype = next((known for known in get_args(Dtype) if known == (request.dtype or own)), None)
    if dtype is None:
        raise UserError(f"this model's weights are {own}: choose --dtype bfloat16, float16 or float32")
    return Resolved(request, "torch", None, dtype, _context(request, source, None))


def _context(request: Request, source: Source, default: int | None) -> int:
    limit = int(source.config.max_position_embeddings)
    if request.max_context is not None and request.max_context > limit:
        raise UserError(f"--max-context {request.max_context}: this model has {limit} positions; ask for fewer")
    context = request.max_context or min(default or limit, limit)
    check_family(source.config, context)
    return context

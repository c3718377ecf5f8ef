"""What an export is asked for. What contradicts itself is refused here, before torch is imported."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paceline.core import manifest as manifests
from paceline.core.errors import UserError
from paceline.core.manifest import Dtype, Profile, Quantization, Role, RuntimeName
from paceline.core.model_folder import existing_folder
from paceline.export.staging import check_place
from paceline.export.text_lines import read_lines

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
class Choice:
    """What the options come to for any model. profile: None for torch; dtype: None for the model's own."""

    runtime: RuntimeName
    profile: Profile | None
    dtype: Dtype | None


def check(request: Request) -> None:
    """Raises UserError, one sentence, for all that can be refused without looking into the model."""
    choose(request)
    check_place(request.out, request.force)
    folder = existing_folder(request.model)
    if folder is not None and manifests.is_bundle(folder):
        raise UserError(f"{request.model} is a bundle already: give the model that it was made of")
    if request.texts is not None:
        read_lines(request.texts)


def choose(request: Request) -> Choice:
    """Raises UserError, one sentence, for options that contradict each other."""
    runtime = request.runtime or ("torch" if request.role == "target" else "onnxruntime")
    if request.role == "target" and runtime != "torch":
        raise UserError(
            f"--role target --runtime {runtime}: a target bundle holds weights for torch; leave --runtime out"
        )
    if runtime == "torch":
        if request.profile or request.quantize:
            option = f"--profile {request.profile}" if request.profile else f"--quantize {request.quantize}"
            raise UserError(f"{option} is for graphs, and a bundle for torch has none: leave it out")
        return Choice("torch", None, request.dtype)
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
    return Choice(runtime, profile, dtype)

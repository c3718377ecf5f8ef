"""manifest.json: what a bundle holds, for whom, and the checksum of each of its files.

A bundle is a directory that `paceline export` makes. Whoever loads one reads its manifest first: `load` refuses what is
missing, changed, meant for the other role or written by a newer Paceline, in one sentence.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

import pydantic_core
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from paceline.core.errors import UserError

FILE = "manifest.json"
SCHEMA_VERSION: Literal[1] = 1
BLOCK = 1 << 20  # bytes read at once; larger ones hash no faster
# What a loader may pick up by its name alone: such a file must be listed, or it would be loaded unchecked.
LOADABLE = (".safetensors", ".json", ".jinja", ".model", ".onnx", ".data", ".plan")

Role = Literal["drafter", "target"]
RuntimeName = Literal["onnxruntime", "tensorrt", "torch"]
Profile = Literal["static-native", "static-compat", "concat", "gqa"]
Dtype = Literal["float64", "float32", "float16", "bfloat16"]
Quantization = Literal["int8", "int4"]
Progress = Callable[[int], None]  # told how many more bytes are done


def _inside(name: str) -> str:
    path = PurePosixPath(name)
    if not path.parts or path.is_absolute() or ".." in path.parts or "\\" in name:
        raise ValueError("must be a path inside the bundle")
    return name


FileName = Annotated[str, AfterValidator(_inside)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class ModelEntry(_Entry):
    """The model that the bundle was made of."""

    name: str
    """A hub id or the name of a folder."""
    family: str
    """transformers' model_type."""
    fingerprint: str
    """Hex, over its configuration and weights as they were before the export."""


class Manifest(_Entry):
    """One bundle. Shapes are the graph's: KV is [sessions, kv_heads, max_context, head_dim] a layer."""

    schema_version: Literal[1] = SCHEMA_VERSION
    role: Role
    runtime: RuntimeName
    """What executes it."""
    profile: Profile | None = None
    """How the graph keeps its KV; none for torch."""
    model: ModelEntry
    tokenizer_fingerprint: str
    vocabulary_size: int = Field(ge=1)
    """The tokenizer's ids, no padded tail."""
    layers: int = Field(ge=1)
    kv_heads: int = Field(ge=1)
    head_dim: int = Field(ge=1)
    max_context: int = Field(ge=1)
    """Tokens of the longest session."""
    max_sessions: int = Field(ge=1)
    weight_dtype: Dtype
    kv_dtype: Dtype
    quantization: Quantization | None = None
    opset: int | None = None
    top_k: int = Field(64, ge=1)
    """Tokens that a step returns; less only where the vocabulary is smaller."""
    rows: Literal["any", "contiguous"] = "any"
    multi_token_batch: bool = True
    tools: dict[str, str] = {}
    """Package → version that made it."""
    files: dict[FileName, Sha256]
    """Every file but the manifest itself → SHA-256."""
    licences: list[str] = []
    parity: dict[str, Any] = {}
    """What was measured against torch when it was made."""
    engines: dict[FileName, dict[str, str | int]] = {}
    """*.plan → what it was built for: TensorRT, GPU, JetPack, checksum of the graph. They run nowhere else."""


def is_bundle(folder: Path) -> bool:
    """Whether `folder` has a manifest, right or wrong."""
    return (folder / FILE).is_file()


def load(
    folder: Path, *, role: Role | None = None, verify: bool = True, progress: Progress = lambda count: None
) -> Manifest:
    """The manifest of the bundle in `folder`, whose files are there and unchanged.

    role: what it must be for. verify: whether checksums are compared (every byte is read). progress: told of bytes.
    Raises UserError, one sentence, for anything that is wrong.
    """
    manifest = read(folder)
    if role is not None and manifest.role != role:
        raise UserError(_other_role(folder, manifest, role))
    for name in manifest.files:
        if not (folder / name).is_file():
            raise UserError(f"{folder / name} is missing, but the bundle's manifest lists it: {_AGAIN}")
    for name in listed(folder):
        if name not in manifest.files:
            raise UserError(f"{folder / name} is not in the bundle's manifest: remove it, or {_AGAIN}")
    if verify:
        for name, expected in manifest.files.items():
            if checksum(folder / name, progress) != expected:
                raise UserError(f"{folder / name} has another checksum than the bundle's manifest says: {_AGAIN}")
    return manifest


def read(folder: Path) -> Manifest:
    """The manifest alone, without a look at the other files. Raises UserError, one sentence."""
    path = folder / FILE
    try:
        content = pydantic_core.from_json(path.read_bytes())
    except FileNotFoundError:
        raise UserError(f"{folder} is no bundle: it has no {FILE}; make one with `paceline export`") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{path} is no JSON ({error}): {_AGAIN}") from None
    version = content.get("schema_version") if isinstance(content, dict) else None
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise UserError(
            f"{path} has schema version {version}, and this Paceline reads up to {SCHEMA_VERSION}: update Paceline"
            " here, or export the model with this version"
        )
    try:
        return Manifest.model_validate(content)
    except ValidationError as error:
        raise UserError(f"{path}: {_in_words(error)}: {_AGAIN}") from None


def misfits(
    manifest: Manifest,
    folder: Path,
    *,
    role: Role | None,
    runtime: RuntimeName,
    max_context: int | None = None,
    max_sessions: int | None = None,
    device: str = "cpu",
) -> Iterator[tuple[str, str]]:
    """What of a topology's node the bundle in `folder` is not for: (its key, one sentence), by the manifest alone.

    max_context, max_sessions: what is asked of it, None for what it has; sessions count for graphs only.
    """
    if role is not None and manifest.role != role:
        yield "model", _other_role(folder, manifest, role)
    elif manifest.runtime != runtime:
        own = f"{folder} is a bundle for the runtime {manifest.runtime}, not for {runtime}"
        yield "runtime", f"{own}: write runtime: {manifest.runtime}, or export the model with --runtime {runtime}"
    for name, asked, made in (
        ("max_context", max_context, manifest.max_context),
        ("max_sessions", None if runtime == "torch" else max_sessions, manifest.max_sessions),
    ):
        if asked is not None and asked > made:
            option = name.replace("_", "-")
            yield (
                name,
                f"{name} {asked} is more than the bundle {folder} was made for, {made}: "
                f"lower it, or export the model with --{option} {asked}",
            )
    if device != "cpu" and runtime == "onnxruntime" and manifest.profile == "gqa" and manifest.kv_dtype == "float32":
        yield (
            "device",
            f"{folder} is a gqa graph in float32, whose attention has no kernel on a GPU: "
            "export the model with --dtype float16, or use device: cpu",
        )


def fit(manifest: Manifest, folder: Path, **asked: Any) -> None:
    """Raises UserError with the first of `misfits`, whose arguments these are."""
    for _, sentence in misfits(manifest, folder, **asked):
        raise UserError(sentence)


def _other_role(folder: Path, manifest: Manifest, role: Role) -> str:
    export = f"export the model with --role {role}"
    return f"{folder} is a {manifest.role} bundle, but a {role} was to be loaded: {export}"


def write(manifest: Manifest, folder: Path) -> None:
    """Puts manifest.json into `folder`, whole or not at all."""
    path, temporary = folder / FILE, folder / f".{FILE}.new"
    temporary.write_text(manifest.model_dump_json(indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def listed(folder: Path) -> list[str]:
    """Files of `folder` that a manifest must list, sorted; no loader looks into hidden ones."""
    found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    names = [path.as_posix() for path in found if not any(part.startswith(".") for part in path.parts)]
    return sorted(name for name in names if name != FILE and name.endswith(LOADABLE))


def checksums(folder: Path, names: Iterable[str], progress: Progress = lambda count: None) -> dict[str, str]:
    """name → SHA-256 of each of these files."""
    return {name: checksum(folder / name, progress) for name in names}


def checksum(path: Path, progress: Progress = lambda count: None) -> str:
    """SHA-256 of a file, hex. progress is told of every block that is read."""
    digest, block = hashlib.sha256(), bytearray(BLOCK)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            digest.update(memoryview(block)[:count])
            progress(count)
    return digest.hexdigest()


_AGAIN = "copy the bundle again, or export it anew"


def _in_words(error: ValidationError) -> str:
    """The first thing that is wrong, and how many more there are."""
    problems = error.errors()
    place = ".".join(str(part) for part in problems[0]["loc"])
    kind = problems[0]["type"]
    words = {"extra_forbidden": "is not a known key", "missing": "is missing"}.get(kind, problems[0]["msg"])
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"{place} {words}{more}" if place else f"{words}{more}"

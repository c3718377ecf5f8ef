"""manifest.json: what a bundle holds, for whom, and the checksum of each of its files.

A bundle is a directory that `paceline export` makes. Whoever loads one reads its manifest first: `load` refuses what is
missing, changed, meant for the other role or written by a newer Paceline, in one sentence.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from paceline.core import bundle_files
from paceline.core.bundle_files import AGAIN
from paceline.core.errors import UserError
from paceline.core.model_folder import set_aside
from paceline.core.printable import printable
from paceline.core.vocabulary import VocabularyIdentity

FILE = "manifest.json"
SCHEMA_VERSION: Literal[1] = 1
BLOCK = 1 << 20  # bytes read at once; larger ones hash no faster
LIMIT = 1 << 20  # bytes of a manifest
LONGEST_NAME = 255  # bytes of a file's name; file systems take no more

Role = Literal["drafter", "target"]
RuntimeName = Literal["onnxruntime", "tensorrt", "torch"]
Profile = Literal["static-native", "static-compat", "concat", "gqa"]
Dtype = Literal["float64", "float32", "float16", "bfloat16"]
Quantization = Literal["int8", "int4"]
Progress = Callable[[int], None]  # told how many more bytes are done


def _inside(name: str) -> str:
    path = PurePosixPath(name)
    if str(path) != name or not path.parts or path.is_absolute() or ".." in path.parts or "\\" in name:
        raise ValueError("must be a path inside the bundle")
    if printable(name) != name:
        raise ValueError("must hold no control characters")
    if max(len(part.encode()) for part in path.parts) > LONGEST_NAME or len(path.parts) > 8:
        raise ValueError("is longer than any file's path in a bundle")
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
    bundle_files.check(folder, FILE, manifest.files)
    if verify:
        for name, expected in manifest.files.items():
            if checksum(folder / name, progress) != expected:
                raise UserError(f"{folder / name} has another checksum than the bundle's manifest says: {AGAIN}")
    return manifest


def read(folder: Path) -> Manifest:
    """The manifest alone, without a look at the other files. Raises UserError, one sentence."""
    path = folder / FILE
    try:
        if folder.is_file():
            raise UserError(f"{folder} is a file: name the folder that it is in, {folder.parent}")
        if not path.is_file():  # a pipe of that name would be waited for
            raise UserError(
                set_aside(folder) or f"{folder} is no bundle: it has no {FILE}; make one with `paceline export`"
            )
        with path.open("rb") as file:
            data = file.read(LIMIT + 1)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    if len(data) > LIMIT:
        raise UserError(f"{path} is larger than any manifest, {LIMIT >> 20} MiB: {AGAIN}")
    try:
        content = json.loads(data, object_pairs_hook=_once, parse_constant=_no_number)
    except RecursionError:
        raise UserError(f"{path} is no JSON (it is nested too deeply): {AGAIN}") from None
    except ValueError as error:
        raise UserError(f"{path} is no JSON ({printable(str(error))}): {AGAIN}") from None
    version = content.get("schema_version", SCHEMA_VERSION) if isinstance(content, dict) else SCHEMA_VERSION
    if type(version) is not int:  # true and 1.0 are equal to 1
        raise UserError(f"{path}: schema_version must be a whole number: {AGAIN}")
    if version > SCHEMA_VERSION:
        raise UserError(
            f"{path} has schema version {version}, and this Paceline reads up to {SCHEMA_VERSION}: update Paceline"
            " here, or export the model with this version"
        )
    try:
        return Manifest.model_validate(content, strict=True)
    except ValidationError as error:
        raise UserError(f"{path}: {_in_words(error)}: {AGAIN}") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice} is there twice")
    return found


def _no_number(word: str) -> None:
    raise ValueError(f"{word} is no number")


def check_tokenizer(folder: Path, tokenizer: Path, own: VocabularyIdentity) -> None:
    """Raises UserError unless the tokenizer is the one that the manifest of the bundle in `folder` tells of.

    own: of the tokenizer in the folder `tokenizer`. Whatever is no bundle passes.
    """
    if not is_bundle(folder):
        return
    manifest = read(folder)
    if manifest.tokenizer_fingerprint != own.fingerprint:
        raise UserError(f"{tokenizer / 'tokenizer.json'} is not the tokenizer that {folder / FILE} tells of: {AGAIN}")
    size = min(own.size, _rows_of(folder, own.size))
    if manifest.vocabulary_size != size:
        said = f"{folder / FILE} says vocabulary_size {manifest.vocabulary_size}"
        raise UserError(f"{said}, but the model has {size} ids: {AGAIN}")


def _rows_of(folder: Path, default: int) -> int:
    """How many ids the model's own configuration knows: a tokenizer may have more."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
        found = config.get("text_config", config)["vocab_size"]
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return default
    return found if type(found) is int else default


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
    """Files of `folder` that a manifest must list, sorted."""
    return bundle_files.listed(folder, FILE)


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


def _in_words(error: ValidationError) -> str:
    """The first thing that is wrong, and how many more there are."""
    problems = error.errors()
    place = printable(".".join(str(part)[:60] for part in problems[0]["loc"]))
    kind = problems[0]["type"]
    words = {"extra_forbidden": "is not a known key", "missing": "is missing"}.get(kind, problems[0]["msg"])
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"{place} {words}{more}" if place else f"{words}{more}"

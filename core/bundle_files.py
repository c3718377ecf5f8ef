"""The files of a bundle: what a loader will read is a regular file in the folder, and its manifest lists it.

Torch and ONNX Runtime follow names inside the files that they are given: an index of shards, a graph's external data.
Those names are held to the manifest as well, so that no byte is loaded that no checksum covers.
"""

from __future__ import annotations

import json
import mmap
import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path

from paceline.core.errors import UserError

AGAIN = "copy the bundle again, or export it anew"
# What people keep beside a bundle, and no loader picks up by itself.
_NOTES = re.compile(r"(LICEN[CS]E|NOTICE|COPYING|README)[^/]*|.+\.(md|txt|rst|pdf|log|ya?ml)", re.IGNORECASE)
# onnx.StringStringEntryProto{key: "location", value: …} as protobuf writes it, up to the value's length.
_LOCATION = b"\n\x08location\x12"
_LONGEST_INDEX = 64 << 20


def check(folder: Path, manifest: str, names: Collection[str]) -> None:
    """Raises UserError, one sentence, unless the files in `folder` are the listed `names`, all there and all inside.

    manifest: the name of the list itself.
    """
    roots = _roots(folder)
    for name in names:
        path = folder / name
        if not path.is_file():
            raise UserError(f"{path} is missing, but the bundle's manifest lists it: {AGAIN}")
        if not any(path.resolve().is_relative_to(root) for root in roots):
            raise UserError(f"{path} is a link out of the bundle's folder: put the file itself there")
    for name in listed(folder, manifest):
        if name not in names:
            raise UserError(f"{folder / name} is not in the bundle's manifest: remove it, or {AGAIN}")
    for source, name in _followed(folder, names):
        if os.path.normpath(name) not in names:
            raise UserError(f"{source} names {name!r}, which is not in the bundle's manifest: {AGAIN}")


def listed(folder: Path, manifest: str) -> list[str]:
    """What of `folder` a manifest must list, sorted: all but itself, hidden things, and notes of the user's own."""
    found = []
    for above, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        links = [name for name in folders if os.path.islink(os.path.join(above, name))]
        place = Path(above).relative_to(folder)
        found += [(place / name).as_posix() for name in [*files, *links] if not name.startswith(".")]
    return sorted(name for name in found if name != manifest and not _NOTES.fullmatch(name.rpartition("/")[2]))


def _roots(folder: Path) -> list[Path]:
    """Where its files may be: in it, and in a hub's cache, whose snapshots are links, among that model's blobs."""
    whole = folder.resolve()
    return [whole, whole.parent.parent / "blobs"] if whole.parent.name == "snapshots" else [whole]


def _followed(folder: Path, names: Collection[str]) -> Iterator[tuple[Path, str]]:
    """(file, a name in it that its loader opens, from the bundle's folder)."""
    for name in names:
        path = folder / name
        above = os.path.dirname(name)
        if name.endswith(".safetensors.index.json"):
            inside = _shards(path)
        elif name.endswith(".onnx"):
            inside = _external_data(path)
        else:
            continue
        yield from ((path, os.path.join(above, one)) for one in inside)


def _shards(path: Path) -> set[str]:
    try:
        if path.stat().st_size > _LONGEST_INDEX:
            raise ValueError
        places = json.loads(path.read_bytes())["weight_map"].values()
        if not all(isinstance(place, str) for place in places):
            raise ValueError
        return set(places)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UserError(f"{path} is no index of weights: {AGAIN}") from None


def _external_data(path: Path) -> set[str]:
    """Each tensor's file. Found by its bytes, for a Jetson has no onnx package; a graph's weights lie elsewhere."""
    if not path.stat().st_size:
        return set()
    found = set()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        at = data.find(_LOCATION)
        while at >= 0:
            begin = at + len(_LOCATION)
            length, begin = _varint(data, begin)
            found.add(data[begin : begin + length].decode("utf-8", errors="replace"))
            at = data.find(_LOCATION, begin)
    return found


def _varint(data: mmap.mmap, at: int) -> tuple[int, int]:
    """(a protobuf length of at most two bytes, where what follows it begins); file names are no longer."""
    first = data[at] if at < len(data) else 0
    if first < 0x80 or at + 1 >= len(data):
        return first & 0x7F, at + 1
    return first & 0x7F | data[at + 1] << 7, at + 2

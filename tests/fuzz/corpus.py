"""The inputs kept in the repository: corpus/TARGET.txt, one in base64 a line, the shortest first.

python -m tests.fuzz.corpus unpack|pack TARGET FOLDER turns them into the files that libFuzzer works on, and back.
"""

from __future__ import annotations

import base64
import hashlib
import sys
from pathlib import Path

FOLDER = Path(__file__).parent / "corpus"
MOST = 300  # of one target
LONGEST = 512  # bytes


def kept(target: str) -> list[bytes]:
    """A target's inputs."""
    lines = (FOLDER / f"{target}.txt").read_text(encoding="ascii").splitlines()
    return [base64.b64decode(line, validate=True) for line in lines]


def unpack(target: str, folder: Path) -> None:
    """One file an input, named by its content as libFuzzer does."""
    folder.mkdir(parents=True, exist_ok=True)
    for data in kept(target):
        (folder / hashlib.sha1(data, usedforsecurity=False).hexdigest()).write_bytes(data)


def pack(target: str, folder: Path) -> None:
    """Keeps what a merge left over; where that is too much, some of every length."""
    inputs = {path.read_bytes() for path in folder.iterdir() if path.is_file()}
    short = sorted((data for data in inputs if len(data) <= LONGEST), key=lambda data: (len(data), data))
    some = short if len(short) <= MOST else [short[index * len(short) // MOST] for index in range(MOST)]
    lines = [base64.b64encode(data).decode() + "\n" for data in some]
    (FOLDER / f"{target}.txt").write_text("".join(lines), encoding="ascii")


if __name__ == "__main__":
    {"unpack": unpack, "pack": pack}[sys.argv[1]](sys.argv[2], Path(sys.argv[3]))

"""What is printed fits a terminal of 80 columns, with no word cut."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def shown(columns: int, *arguments: object) -> str:
    """What a command prints in a terminal so wide; it must end well."""
    command = [sys.executable, "-m", "paceline", *map(str, arguments)]
    environment = {**os.environ, "COLUMNS": str(columns)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_check_cuts_no_word_in_80_columns(tmp_path: Path) -> None:
    """Hosts, a bundle's runtime and TLS: the widest that is usual has all columns; in 40 they are whole as well."""
    text = "version: 1\nname: wide\nhosts: {orin: {address: 192.168.1.20}, server-7: {address: 192.168.1.10}}\n"
    text += "security: {key_file: key}\ndrafters:\n  - {name: drafter-1, host: orin, model: m, runtime: onnxruntime, "
    text += "listen: '0.0.0.0:7070'}\ntargets:\n  - {name: chat-a, host: server-7, model: m, "
    file = tmp_path / "wide.yaml"
    file.write_text(text + "drafters: {names: [drafter-1]}}\n")
    shown(80, "keys", "init", file)
    for columns in (80, 40):
        lines = shown(columns, "check", file).splitlines()[1:4]
        assert [" ".join(line.split()) for line in lines] == [
            "users reach target over drafter drafts by k lanes",
            "127.0.0.1:8001 chat-a on tls 192.168.1.20:7070 drafter-1 on onnxruntime, 4 1",
            "server-7 orin cpu",
        ]
        assert max(map(len, lines)) <= 80


def test_help_cuts_no_value_in_80_columns() -> None:
    """What an option may be is readable: words are whole."""
    words = shown(80, "bench", "--help").replace("│", " ").split()
    assert {"plain,", "standard,", "star,", "lanes", "auto,"} <= set(words)
    words = shown(80, "export", "--help").replace("│", " ").split()
    assert {"tensorrt", "torch.", "static-compat", "static-native.", "bfloat16,", "float64."} <= set(words)

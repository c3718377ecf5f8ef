"""Fuzzes one target with atheris (libFuzzer): python -m tests.fuzz.run TARGET [libFuzzer's options and folders]."""

from __future__ import annotations

import gc
import importlib
import logging
import shlex
import sys
import types
import warnings

import atheris

TARGETS = ("wire", "handshake", "service", "engine", "mqtt")


def instrument(*packages: str) -> None:
    """Coverage of every function of `packages` that is loaded; others would only be noise."""
    for thing in gc.get_objects():
        if isinstance(thing, types.FunctionType) and (thing.__module__ or "").startswith(packages):
            atheris.instrument_func(thing)


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] not in TARGETS:
        sys.exit(f"name a target: {', '.join(TARGETS)}")
    target = sys.argv.pop(1)
    sys.argv[0] = f"{shlex.quote(sys.executable)} -m tests.fuzz.run {target}"  # what a merge starts, through the shell
    module = importlib.import_module(f"tests.fuzz.{target}")
    warnings.simplefilter("error")  # as in the tests: an overflow in numpy is a finding
    logging.disable()
    instrument("paceline.", "tests.fuzz.")
    atheris.Setup(sys.argv, module.one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()

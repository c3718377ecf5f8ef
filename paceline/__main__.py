"""The command `paceline`, also as `python -m paceline`. Ctrl-C while it is being loaded is no traceback either."""

import sys


def run() -> int:
    """Loads the command line and runs it; returns the exit code."""
    try:
        from paceline.cli import main

        return main()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(run())

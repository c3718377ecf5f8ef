# shellcheck shell=bash
# Sourced by the other scripts: gives them .venv with Paceline in it, made when missing or out of date.
# A stamp holds the checksum of what decides its content, so a second run starts at once and needs no network.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$ROOT/.venv"
cd "$ROOT" || return

say() { printf '%s\n' "$*" >&2; }

usable_python() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1
}

# Prints a Python of 3.10 or newer; $PYTHON is asked first.
find_python() {
    local candidate
    if [[ -n "${PYTHON:-}" ]] && ! usable_python "$PYTHON"; then
        say "PYTHON=$PYTHON is no Python of 3.10 or newer."
        return 2
    fi
    for candidate in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11 python3.10; do
        if usable_python "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    say "Paceline needs Python 3.10 or newer, and there is none on the PATH."
    say "Install one (Debian and Ubuntu: apt install python3 python3-venv), or name it: PYTHON=/path/to/python3 $0"
    return 2
}

make_venv() {
    local python="$1"
    if ! "$python" -c 'import ensurepip, venv' >/dev/null 2>&1; then
        say "$python has no venv module. On Debian and Ubuntu: apt install python3-venv"
        return 2
    fi
    say "Making .venv with $("$python" --version) …"
    rm -rf "$VENV"
    "$python" -m venv "$VENV"
}

wanted_stamp() {
    cat pyproject.toml constraints.txt paceline/__init__.py | sha256sum | cut -d' ' -f1
}

ensure_env() {
    local wanted python
    wanted="$(wanted_stamp)"
    if [[ -x "$VENV/bin/paceline" && "$(cat "$VENV/place" "$VENV/stamp" 2>/dev/null)" == "$ROOT"$'\n'"$wanted" ]]; then
        return
    fi
    # A virtual environment does not survive a move: its programs name its old place.
    if [[ "$(cat "$VENV/place" 2>/dev/null)" != "$ROOT" ]] || ! usable_python "$VENV/bin/python"; then
        python="$(find_python)" || return
        make_venv "$python" || return
        printf '%s\n' "$ROOT" >"$VENV/place"
    fi
    say "Installing Paceline and what it needs into .venv (once, a few minutes on a slow line) …"
    if ! "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check -e '.[cloud,export,dev]' -c constraints.txt; then
        say "The installation failed; the lines above say why. Run the same command again when that is mended."
        return 1
    fi
    printf '%s\n' "$wanted" >"$VENV/stamp"
}

# One at a time: two scripts started together must not install into the same folder at once.
if command -v flock >/dev/null; then
    exec 9>"$ROOT/.venv.lock"
    flock 9
    ensure_env
    exec 9>&-
else
    ensure_env
fi
export PATH="$VENV/bin:$PATH"

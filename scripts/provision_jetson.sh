#!/usr/bin/env bash
# Bring a flashed Jetson into shape for Paceline over ssh: packages, power, clocks, swap, environment, service, health.
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
REPOSITORY="$(dirname "$HERE")"
source "$HERE/jetson/common.sh"
source "$HERE/jetson/config_checks.sh"

STEPS=(time packages power clocks swap user venv config engine service health)
MAKE_FOLDER="mktemp -d /tmp/paceline.XXXXXXXX" # on the board

usage() {
    cat <<'END'
Usage: scripts/provision_jetson.sh USER@HOST [options]
       scripts/provision_jetson.sh --local [options]

Brings a Jetson with JetPack 6.2 or 7.2 into shape for Paceline and ends with a table of its health. USER may use sudo
there; after flashing over USB HOST is 192.168.55.1. A second run changes nothing that is right. See docs/jetson.md.

  --config DIR          star.yaml and what it names: goes to /etc/paceline on the board, secrets/ readable by the service only
  --wheel FILE          Paceline's wheel (default: built from this repository)
  --power-mode NAME     by name, such as 25W or MAXN_SUPER; max: the one without limits; keep (default: max)
  --no-clocks           do not fix the clocks at the maximum of the power mode
  --swap GIB            size of the swap file, 0 for none (default: 8)
  --extras NAMES        extras of Paceline to install (default: jetson)
  --reboot              restart the board if its power mode needs that; then run the same command again
  --from STEP           begin with this step
  --port N, --identity FILE
                        for ssh
  --local               this machine is the Jetson
  --dry-run             print every command and change nothing; needs no board
  --jetpack 6.2|7.2     what a dry run is for (default: 7.2)
  --state-dir DIR       for the log (default: ~/.local/state/paceline/provision)
  -h, --help

Steps: time, packages, power, clocks, swap, user, venv, config, engine, service, health. Exit codes: 0 the board is well,
1 a step failed or the table says FAIL, 2 an option or the board is wrong.
END
}

parse_options() {
    BOARD_HOST="" LOCAL=false CONFIG_DIR="" WHEEL="" JETPACK=7.2
    SSH_OPTIONS=(-o ConnectTimeout=10) ON_DEVICE=()
    STATE_DIR="${XDG_STATE_HOME:-$HOME/.local/state}/paceline/provision"
    while [[ $# -gt 0 ]]; do
        case "$1" in
        --dry-run) DRY_RUN=true ;;
        --local) LOCAL=true ;;
        --no-clocks | --reboot) ON_DEVICE+=("$1") ;;
        -h | --help) usage && exit 0 ;;
        --*) take_value "$@" && shift ;;
        *) take_board "$1" ;;
        esac
        shift
    done
    if $LOCAL && [[ -n "$BOARD_HOST" ]]; then wrong "--local and $BOARD_HOST exclude each other."; fi
    if ! $LOCAL && [[ -z "$BOARD_HOST" ]]; then wrong "Name the board as USER@HOST, or say --local; see --help."; fi
}

take_board() {
    if [[ -n "$BOARD_HOST" || "$1" == -* || "$1" == *[[:cntrl:]]* ]]; then wrong "What is '$1'? See --help."; fi
    BOARD_HOST="$1"
}

take_value() {
    local value="${2-}"
    case "$1" in
    --config) CONFIG_DIR="$value" ;;
    --wheel) WHEEL="$value" ;;
    --jetpack) JETPACK="$value" ;;
    --port) SSH_OPTIONS+=(-p "$value") ;;
    --identity) SSH_OPTIONS+=(-i "$value") ;;
    --state-dir) STATE_DIR="$value" ;;
    --power-mode | --swap | --extras | --from) ON_DEVICE+=("$1" "$value") ;;
    *) wrong "There is no option $1; see --help." ;;
    esac
    needs_value "$@"
    case "$1" in
    --wheel) if [[ ! -f "$value" ]]; then wrong "There is no file $value: --wheel is one of Paceline's wheels, or left out."; fi ;;
    --port) needs_number "$1" "$value" 1 65535 ;;
    --from) if ! one_of "$value" "${STEPS[@]}"; then wrong "--from is one of: ${STEPS[*]}."; fi ;;
    --swap) needs_number "$1" "$value" 0 1024 ;;
    --jetpack) if ! one_of "$value" 6.2 7.2; then wrong "--jetpack is 6.2 or 7.2."; fi ;;
    esac
}

# --- what goes to the board -------------------------------------------------------------------------------------------

# Built from a copy, since setuptools leaves things beside what it builds. The same sources give the same bytes, so that the
# board sees whether anything is new.
build_wheel() {
    local -a sources=(pyproject.toml README.md LICENSE paceline export edge cloud topology core)
    say "Building Paceline's wheel …"
    run mkdir "$WORK/source"
    run cp -rp "${sources[@]/#/$REPOSITORY/}" "$WORK/source"
    run find "$WORK/source" -name __pycache__ -prune -exec rm -r '{}' +
    run env SOURCE_DATE_EPOCH=1577836800 python3 -m pip --disable-pip-version-check wheel --quiet --no-deps \
        --wheel-dir "$BUNDLE/payload" "$WORK/source" ||
        fail "The wheel could not be built: python3 needs pip and the package index. Or give a wheel made elsewhere with --wheel."
}

pack() {
    run mkdir -p "$BUNDLE/payload"
    run cp "$HERE"/jetson/{on_device,common,boards,device_steps,health}.sh "$BUNDLE"
    run cp "$REPOSITORY"/examples/systemd/paceline{,-clocks}.service "$BUNDLE/payload"
    # CUDA's bindings follow the board's JetPack instead.
    run sed -n "/^cuda/!w $BUNDLE/payload/constraints.txt" "$REPOSITORY/constraints.txt"
    if [[ -n "$WHEEL" ]]; then run cp "$WHEEL" "$BUNDLE/payload"; else build_wheel; fi
    if [[ -n "$CONFIG_DIR" ]]; then run cp -rL "$CONFIG_DIR" "$BUNDLE/payload/config"; fi
}

# --- on the board -----------------------------------------------------------------------------------------------------

# at_board COMMAND: over ssh, or here with --local.
at_board() {
    # shellcheck disable=SC2029 # $1 is meant to be expanded here
    if $LOCAL; then bash -c "$1"; else ssh "${SSH_OPTIONS[@]}" "$BOARD_HOST" "$1"; fi
}

send() {
    local answer
    answer="$(at_board "$MAKE_FOLDER")" || fail "Cannot reach $BOARD_HOST: is it on, and does $(quoted ssh "${SSH_OPTIONS[@]}" "$BOARD_HOST") work?"
    # What a shell says at its start comes first. The folder is removed in the end: nothing else is taken for it.
    answer="${answer##*$'\n'}"
    if [[ ! "$answer" =~ ^/tmp/paceline\.[A-Za-z0-9]{8}$ ]]; then
        fail "${BOARD_HOST:-This machine} answered $(quoted "$answer") where the name of a new folder belongs: let its shell print nothing at its start."
    fi
    BOARD_DIR="$answer"
    tar -C "$BUNDLE" -cf - . | at_board "$(quoted tar -C "$BOARD_DIR" -xf -)"
}

# sudo asks for its password on a terminal, so one is asked for where there is one here.
start_on_board() {
    local command
    command="$(quoted sudo "$BOARD_DIR/on_device.sh" "${ON_DEVICE[@]}")"
    if [[ $EUID -eq 0 ]] && $LOCAL; then command="${command#sudo }"; fi
    say "+ $command"
    if [[ -t 0 ]] && ! $LOCAL; then SSH_OPTIONS+=(-t); fi
    at_board "$command" 2>&1 | tee -a "$LOG"
}

fail_on_board() {
    say "The log is $LOG."
    exit "$1"
}

clean_up() {
    if [[ -n "${BOARD_DIR:-}" ]]; then at_board "$(quoted rm -rf "$BOARD_DIR")" || true; fi
    if ! $LOCAL; then ssh "${SSH_OPTIONS[@]}" -O exit "$BOARD_HOST" 2>/dev/null || true; fi
    rm -rf "$WORK" "$SOCKETS"
}

dry_run() {
    local -a reach=(ssh "${SSH_OPTIONS[@]}" "$BOARD_HOST") config=()
    WORK=/tmp/WORK BUNDLE=/tmp/WORK/bundle BOARD_DIR=/tmp/BOARD_DIR
    if $LOCAL; then reach=(bash -c); fi
    if [[ -d "$CONFIG_DIR" ]]; then config=(--config "$(realpath "$CONFIG_DIR")"); fi
    say "Here ($WORK and $BOARD_DIR stand for what mktemp will make):"
    pack
    run "${reach[@]}" "$MAKE_FOLDER"
    printf '%s | %s\n' "$(quoted tar -C "$BUNDLE" -cf - .)" "$(quoted "${reach[@]}" "$(quoted tar -C "$BOARD_DIR" -xf -)")"
    run "${reach[@]}" "$(quoted sudo "$BOARD_DIR/on_device.sh" "${ON_DEVICE[@]}")"
    say "That runs on the board:"
    "$HERE/jetson/on_device.sh" --dry-run --jetpack "$JETPACK" "${config[@]}" "${ON_DEVICE[@]}"
    say "And here at the end:"
    run "${reach[@]}" "$(quoted rm -rf "$BOARD_DIR")"
    end_dry_run
}

main() {
    parse_options "$@"
    if [[ -n "$CONFIG_DIR" ]]; then check_config; fi
    stop_on_problems
    if $DRY_RUN; then
        dry_run
        return
    fi
    start_log "$STATE_DIR" provision
    WORK="$(mktemp -d)"
    BUNDLE="$WORK/bundle"
    SOCKETS="$(mktemp -d /tmp/paceline.XXXXXXXX)" # ssh wants a short path without spaces
    trap clean_up EXIT
    # One connection for all, so that a password is asked for once.
    SSH_OPTIONS+=(-o ControlMaster=auto -o "ControlPath=$SOCKETS/ssh" -o ControlPersist=60)
    pack
    send
    start_on_board || fail_on_board $?
}

main "$@"

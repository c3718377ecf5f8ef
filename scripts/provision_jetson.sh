#!/usr/bin/env bash
# Bring a flashed Jetson into shape for Paceline over ssh: packages, power, clocks, swap, environment, service, health.
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
REPOSITORY="$(dirname "$HERE")"
source "$HERE/jetson/common.sh"

STEPS=(time packages power clocks swap user venv config engine service health)

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
        *) BOARD_HOST="$1" ;;
        esac
        shift
    done
    if $LOCAL && [[ -n "$BOARD_HOST" ]]; then wrong "--local and $BOARD_HOST exclude each other."; fi
    if ! $LOCAL && [[ -z "$BOARD_HOST" ]]; then wrong "Name the board as USER@HOST, or say --local; see --help."; fi
    if [[ "$BOARD_HOST" == -* ]]; then wrong "What is '$BOARD_HOST'? See --help."; fi
}

take_value() {
    needs_value "$1" $#
    case "$1" in
    --config) CONFIG_DIR="$2" ;;
    --wheel) WHEEL="$2" ;;
    --jetpack) JETPACK="$2" ;;
    --port) SSH_OPTIONS+=(-p "$2") ;;
    --identity) SSH_OPTIONS+=(-i "$2") ;;
    --state-dir) STATE_DIR="$2" ;;
    --power-mode | --swap | --extras | --from) ON_DEVICE+=("$1" "$2") ;;
    *) wrong "There is no option $1; see --help." ;;
    esac
    case "$1" in
    --from) if ! one_of "$2" "${STEPS[@]}"; then wrong "--from is one of: ${STEPS[*]}."; fi ;;
    --swap) if [[ ! "$2" =~ ^[0-9]+$ ]]; then wrong "--swap is a whole number of GiB."; fi ;;
    --jetpack) if ! one_of "$2" 6.2 7.2; then wrong "--jetpack is 6.2 or 7.2."; fi ;;
    esac
}

check_input() {
    if [[ -n "$WHEEL" && ! -f "$WHEEL" ]]; then problem "There is no $WHEEL."; fi
    if [[ -n "$CONFIG_DIR" ]]; then check_config; fi
    stop_on_problems
}

check_config() {
    local keys
    if [[ ! -f "$CONFIG_DIR/star.yaml" ]]; then
        problem "There is no star.yaml in $CONFIG_DIR: that is the name the service looks for."
    fi
    if [[ -e "$CONFIG_DIR/secrets/ca.key" ]]; then
        problem "$CONFIG_DIR/secrets/ca.key must not leave this machine: move it elsewhere."
    fi
    keys="$(find "$CONFIG_DIR/secrets" -name '*.key' ! -name deployment.key ! -name ca.key -printf '%f ' 2>/dev/null || true)"
    if [[ "$keys" == *" "*" " ]]; then
        warn "secrets/ holds keys of several nodes ($keys): keys init said which of them belong on the board."
    fi
}

# --- what goes to the board -------------------------------------------------------------------------------------------

# Built from a copy, since setuptools leaves things beside what it builds. The same sources give the same bytes, so that the
# board sees whether anything is new.
build_wheel() {
    say "Building Paceline's wheel …"
    mkdir "$WORK/source"
    tar -C "$REPOSITORY" --exclude=__pycache__ -cf - pyproject.toml README.md LICENSE paceline export edge cloud topology core |
        tar -C "$WORK/source" -xf -
    SOURCE_DATE_EPOCH=1577836800 run python3 -m pip --disable-pip-version-check wheel --quiet --no-deps \
        --wheel-dir "$BUNDLE/payload" "$WORK/source" ||
        fail "The wheel could not be built: python3 needs pip and the package index. Or give a wheel made elsewhere with --wheel."
}

pack() {
    mkdir -p "$BUNDLE/payload"
    cp "$HERE"/jetson/{on_device,common,boards,device_steps,health}.sh "$BUNDLE"
    cp "$REPOSITORY"/examples/systemd/paceline{,-clocks}.service "$BUNDLE/payload"
    # CUDA's bindings follow the board's JetPack instead.
    grep -v '^cuda' "$REPOSITORY/constraints.txt" >"$BUNDLE/payload/constraints.txt"
    if [[ -n "$WHEEL" ]]; then cp "$WHEEL" "$BUNDLE/payload"; else build_wheel; fi
    if [[ -n "$CONFIG_DIR" ]]; then cp -rL "$CONFIG_DIR" "$BUNDLE/payload/config"; fi
}

# --- on the board -----------------------------------------------------------------------------------------------------

# at_board COMMAND: over ssh, or here with --local.
at_board() {
    # shellcheck disable=SC2029 # $1 is meant to be expanded here
    if $LOCAL; then bash -c "$1"; else ssh "${SSH_OPTIONS[@]}" "$BOARD_HOST" "$1"; fi
}

send() {
    BOARD_DIR="$(at_board 'mktemp -d')" || fail "Cannot reach $BOARD_HOST: is it on, and does ssh ${SSH_OPTIONS[*]} $BOARD_HOST work?"
    tar -C "$BUNDLE" -cf - . | at_board "tar -C $BOARD_DIR -xf -"
}

# sudo asks for its password on a terminal, so one is asked for where there is one here.
start_on_board() {
    local command
    command="sudo $BOARD_DIR/on_device.sh $(quoted "${ON_DEVICE[@]}")"
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
    if [[ -n "${BOARD_DIR:-}" ]]; then at_board "rm -rf $BOARD_DIR" || true; fi
    if ! $LOCAL; then ssh "${SSH_OPTIONS[@]}" -O exit "$BOARD_HOST" 2>/dev/null || true; fi
    rm -rf "$WORK"
}

dry_run() {
    local ssh=(ssh "${SSH_OPTIONS[@]}" "$BOARD_HOST")
    if $LOCAL; then ssh=(bash -c); fi
    run "${ssh[@]}" "sudo ./on_device.sh $(quoted "${ON_DEVICE[@]}")"
    say "On the board:"
    "$HERE/jetson/on_device.sh" --dry-run --jetpack "$JETPACK" "${ON_DEVICE[@]}"
}

main() {
    parse_options "$@"
    check_input
    if $DRY_RUN; then
        dry_run
        return
    fi
    start_log "$STATE_DIR" provision
    WORK="$(mktemp -d)"
    BUNDLE="$WORK/bundle"
    trap clean_up EXIT
    # One connection for all, so that a password is asked for once.
    SSH_OPTIONS+=(-o ControlMaster=auto -o "ControlPath=$WORK/ssh" -o ControlPersist=60)
    pack
    send
    start_on_board || fail_on_board $?
}

main "$@"

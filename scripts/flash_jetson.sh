#!/usr/bin/env bash
# Flash a Jetson from an x86_64 Ubuntu host: checks first, then NVIDIA's own scripts in the order of its Quick Start.
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$HERE/jetson/common.sh"
source "$HERE/jetson/boards.sh"
source "$HERE/jetson/flash_checks.sh"

STEPS=(check prerequisites binaries user flash boot)
STEPS_DONE=0 # in this run

usage() {
    cat <<'END'
Usage: scripts/flash_jetson.sh --l4t DIR [options]

Flashes a Jetson Orin Nano, Orin NX, AGX Orin or Thor with JetPack 6.2 or 7.2. The board is connected by USB and in
recovery mode; DIR is NVIDIA's Linux_for_Tegra with the sample root file system in rootfs/. See docs/jetson.md.

What to flash
  --board BOARD         orin-nano, orin-nx, agx-orin or thor (default: the one found in recovery mode)
  --storage nvme|emmc   where the system goes (default: eMMC of the AGX Orin, else NVMe)
  --config NAME         NVIDIA's NAME.conf (default: the developer kit's)
  --erase-all, --no-erase-all
                        erase the whole disk first or not (default: as NVIDIA's documents for the release have it)
  --jetpack 6.2|7.2     only for --dry-run without DIR

The first user
  --user NAME           (default: nvidia)
  --hostname NAME       (default: jetson)
  --password-file FILE  its first line is the password (default: asked for)
  --accept-license      you have read and accept NVIDIA's licence

How
  --dry-run             print every command and change nothing; needs no board
  --from STEP           do this step again, and those after it
  --yes                 do not ask before the disk is overwritten
  --space GB            free space wanted in DIR (default: 40 for JetPack 6.2, 60 for 7.2)
  --boot-timeout S      how long the first boot may take (default: 600)
  --state-dir DIR       what is done and the log (default: ~/.local/state/paceline/flash)
  -h, --help

Steps: check, prerequisites, binaries, user, flash, boot. A step that is done is not done again: after a failure run
the same command once more. Exit codes: 0 done, 1 failed, 2 a check or an option refuses.
END
}

parse_options() {
    L4T="" BOARD="" STORAGE="" CONFIG="" ERASE="" JETPACK_GIVEN="" SPACE_GB="" FROM="" PASSWORD_FILE=""
    USER_NAME=nvidia HOST_NAME=jetson ACCEPT_LICENSE=false YES=false BOOT_TIMEOUT=600
    STATE_DIR="${XDG_STATE_HOME:-$HOME/.local/state}/paceline/flash"
    while [[ $# -gt 0 ]]; do
        case "$1" in
        --dry-run) DRY_RUN=true ;;
        --yes) YES=true ;;
        --accept-license) ACCEPT_LICENSE=true ;;
        --erase-all) ERASE=yes ;;
        --no-erase-all) ERASE=no ;;
        -h | --help) usage && exit 0 ;;
        --*) take_value "$@" && shift ;;
        *) wrong "What is '$1'? See --help." ;;
        esac
        shift
    done
}

take_value() {
    local value="${2-}"
    case "$1" in
    --l4t) L4T="$value" ;;
    --board) BOARD="$value" ;;
    --storage) STORAGE="$value" ;;
    --config) CONFIG="$value" ;;
    --jetpack) JETPACK_GIVEN="$value" ;;
    --user) USER_NAME="$value" ;;
    --hostname) HOST_NAME="$value" ;;
    --password-file) PASSWORD_FILE="$value" ;;
    --from) FROM="$value" ;;
    --space) SPACE_GB="$value" ;;
    --boot-timeout) BOOT_TIMEOUT="$value" ;;
    --state-dir) STATE_DIR="$value" ;;
    *) wrong "There is no option $1; see --help." ;;
    esac
    needs_value "$@"
    case "$1" in
    --space) needs_number "$1" "$value" 0 100000 ;;
    --boot-timeout) needs_number "$1" "$value" 0 86400 ;;
    esac
}

# What is not given follows from the folder and from the board on the USB bus.
settle() {
    if [[ -n "$L4T" && -d "$L4T" ]]; then
        L4T="$(cd "$L4T" && pwd)"
        needs_value --l4t "$L4T" # what it is called in full, too
        RELEASE="$(release_of "$L4T")"
        JETPACK="$(jetpack_of "$RELEASE")" ||
            wrong "$L4T holds Jetson Linux ${RELEASE:-of an unknown release}; this script knows 36.4.3 and later (JetPack 6.2) and 39.2 (JetPack 7.2)."
    elif $DRY_RUN && [[ -n "$JETPACK_GIVEN" ]]; then
        case "$JETPACK_GIVEN" in
        6.2) RELEASE=36.4.3 ;;
        7.2) RELEASE=39.2.0 ;;
        *) wrong "--jetpack is 6.2 or 7.2." ;;
        esac
        JETPACK="$JETPACK_GIVEN" L4T="${L4T:-Linux_for_Tegra}"
    elif [[ -n "$L4T" ]]; then
        wrong "There is no folder $L4T: unpack Jetson_Linux_R…_aarch64.tbz2 and name its Linux_for_Tegra with --l4t."
    else
        wrong "Name NVIDIA's Linux_for_Tegra with --l4t, or with --dry-run a --jetpack; see --help."
    fi
    STATE_DIR="$(realpath -m "$STATE_DIR")" PASSWORD_FILE="${PASSWORD_FILE:+$(realpath -m "$PASSWORD_FILE")}"
    if [[ -n "$JETPACK_GIVEN" && "$JETPACK_GIVEN" != "$JETPACK" ]]; then wrong "$L4T holds JetPack $JETPACK, not $JETPACK_GIVEN."; fi
    settle_board
    if [[ -n "$FROM" ]] && ! one_of "$FROM" "${STEPS[@]}"; then wrong "--from is one of: ${STEPS[*]}."; fi
    if ! one_of "$STORAGE" nvme emmc; then wrong "--storage is nvme or emmc."; fi
    flash_command
}

settle_board() {
    find_board
    # Once it is flashed it is on the bus no more: then it is the one that was begun with.
    if [[ -z "$BOARD$FOUND" && -r "$STATE_DIR/state" ]]; then read -r FOUND _ <"$STATE_DIR/state" || true; fi
    BOARD="${BOARD:-$FOUND}"
    if [[ -z "$BOARD" ]]; then wrong "${PROBLEMS[0]} Or name the board with --board."; fi
    PROBLEMS=() # the step check looks again, once it is known what is to be done
    if ! one_of "$BOARD" "${BOARDS[@]}"; then wrong "--board is one of: ${BOARDS[*]}."; fi
    STORAGE="${STORAGE:-$(default_storage "$BOARD")}"
    check_pair "$BOARD" "$JETPACK" "$STORAGE"
    CONFIG="${CONFIG:-$(config_of "$BOARD" "$USB_ID")}"
    if [[ -z "$SPACE_GB" ]]; then if [[ "$JETPACK" == 6.2 ]]; then SPACE_GB=40; else SPACE_GB=60; fi; fi
}

# --- the steps; all but the last run in $L4T --------------------------------------------------------------------------

step_check() {
    check_host
    check_services
    if [[ -d "$L4T" ]]; then check_tree; fi
    check_user
    if ! $DRY_RUN && due flash; then check_board; fi
    stop_on_problems
    say "Jetson Linux $RELEASE (JetPack $JETPACK) for $BOARD on ${STORAGE/emmc/eMMC}, as $CONFIG."
}

step_prerequisites() { as_root tools/l4t_flash_prerequisites.sh; }

# On Thor the GPU works with NVIDIA's open kernel modules only.
step_binaries() {
    if [[ "$BOARD" == thor ]]; then as_root ./apply_binaries.sh --openrm; else as_root ./apply_binaries.sh; fi
}

step_user() {
    local SECRET HIDE_AFTER=-p
    if ! $DRY_RUN && ! lacks user; then
        say "User $USER_NAME is in the root file system already and keeps the password given then."
        return
    fi
    read_password
    as_root tools/l4t_create_default_user.sh -u "$USER_NAME" -p "$SECRET" -n "$HOST_NAME" --accept-license
}

read_password() {
    if $DRY_RUN; then
        SECRET="hidden"
    elif [[ -n "$PASSWORD_FILE" ]]; then
        IFS= read -r SECRET <"$PASSWORD_FILE" || true
    else
        read -r -s -p "Password for $USER_NAME on the board: " SECRET || true
        printf '\n' >&2
    fi
    if [[ "$SECRET" == *$'\r' ]]; then
        SECRET="${SECRET%$'\r'}"
        say "${PASSWORD_FILE:-What was typed} has the line ends of Windows: the carriage return is not taken for a part of the password."
    fi
    if [[ -z "$SECRET" ]]; then wrong "The password is empty: give one, or --password-file FILE with it in the first line."; fi
}

step_flash() {
    if ! $DRY_RUN; then
        check_board
        stop_on_problems
    fi
    confirm "$BOARD" "This overwrites the boot loader and the ${STORAGE/emmc/eMMC} of the $BOARD on USB port $USB_PORT."
    as_root "${FLASH[@]}"
}

# Over the same cable the new system shows itself as another USB device and answers at 192.168.55.1.
step_boot() {
    local waited=0
    if [[ "$BOARD" == thor ]]; then say "Press reset on the Thor: after flashing it waits for that."; fi
    say "Take a recovery jumper away now, or the board comes back in recovery mode."
    if $DRY_RUN; then
        say "Then it would wait up to $BOOT_TIMEOUT s for $NVIDIA_USB:$LINUX_USB on the USB bus."
        return
    fi
    until nvidia_devices | grep -q "^$LINUX_USB "; do
        if [[ $waited -ge $BOOT_TIMEOUT ]]; then
            fail "After $BOOT_TIMEOUT s the board does not show itself as $NVIDIA_USB:$LINUX_USB. Look at its screen or serial console, then: --from boot"
        fi
        sleep 2
        waited=$((waited + 2))
    done
    say "The board runs. Next: scripts/provision_jetson.sh $USER_NAME@192.168.55.1"
}

# --- which steps are due ----------------------------------------------------------------------------------------------

# The state file holds one line for what is being flashed, then one for each step done. Another choice, or a tree that was
# unpacked again, begins anew.
open_state() {
    STATE="$STATE_DIR/state"
    local identity
    identity="$(quoted "$BOARD" "$L4T" "$RELEASE" "$STORAGE" "$CONFIG" "$USER_NAME" "$HOST_NAME") $(tree_stamp)"
    if $DRY_RUN; then
        STATE=/dev/null
    elif [[ "$(head -n 1 "$STATE" 2>/dev/null)" != "$identity" ]]; then
        (umask 077 && printf '%s\n' "$identity" >"$STATE")
    fi
}

# tree_stamp: another after Jetson Linux or its root file system was unpacked again. No step replaces these files.
tree_stamp() { stat -c '%i@%w' "$L4T"/{flash.sh,rootfs/etc,rootfs/usr/bin/sudo} 2>/dev/null | paste -sd' ' || true; }

# lacks STEP: whether the tree is without what STEP makes there, whatever the state file says.
lacks() {
    case "$1" in
    binaries) [[ ! -e "$L4T/rootfs/etc/nv_tegra_release" ]] ;;
    user) ! grep -qs "^$USER_NAME:" "$L4T/rootfs/etc/passwd" ;;
    *) return 1 ;;
    esac
}

index_of() {
    local i
    for i in "${!STEPS[@]}"; do
        if [[ "${STEPS[$i]}" == "$1" ]]; then echo "$i"; fi
    done
}

# due STEP: whether it is still to be done. From --from on everything is; what lies before it is taken as done, unless the
# tree shows that it is not. What comes after a step that was done now is to be done, too.
due() {
    if [[ "$1" == check || $STEPS_DONE -gt 0 ]]; then return 0; fi
    if [[ -d "$L4T" ]] && lacks "$1"; then return 0; fi
    if [[ -n "$FROM" ]]; then
        [[ $(index_of "$1") -ge $(index_of "$FROM") ]]
    elif grep -q "^$1 " "$STATE"; then
        return 1
    fi
}

do_step() {
    STEP="$1"
    if ! due "$1"; then
        say "$1: done; --from $1 does it again."
        return
    fi
    say "== $1"
    "step_$1"
    if [[ "$1" == check ]] || $DRY_RUN; then return; fi
    if lacks "$1"; then fail "NVIDIA's script ended well, but $L4T/rootfs is without what it should have put there."; fi
    printf '%s %s\n' "$1" "$(date -Is)" >>"$STATE"
    STEPS_DONE=$((STEPS_DONE + 1))
}

explain_exit() {
    local code=$?
    if [[ $code -ne 0 && $code -ne 2 && -n "${STEP:-}" && "$LOG" != /dev/null ]]; then
        say "Step $STEP did not end well. The log is $LOG; when that is mended, the same command goes on with $STEP."
    fi
}

main() {
    parse_options "$@"
    settle
    start_log "$STATE_DIR" "flash-$BOARD"
    open_state
    trap explain_exit EXIT
    do_step check
    if [[ -d "$L4T" ]]; then cd "$L4T"; fi
    if $DRY_RUN; then printf 'cd %s\n' "$(quoted "$L4T")"; fi
    for step in prerequisites binaries user flash boot; do
        do_step "$step"
    done
    if $DRY_RUN; then
        end_dry_run
    elif [[ $STEPS_DONE -eq 0 ]]; then
        say "Nothing to do: this $BOARD was flashed from $L4T already. --from flash flashes another board."
    else
        say "Done."
    fi
}

main "$@"

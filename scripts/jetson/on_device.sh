#!/usr/bin/env bash
# What provision_jetson.sh copies to the board and starts there as root. Every step looks first and changes only what differs,
# so a second run changes nothing. PACELINE_HOST_ROOT stands in for / in tests.
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$HERE/common.sh"
source "$HERE/boards.sh"
source "$HERE/device_steps.sh"
source "$HERE/health.sh"

STEPS=(time packages power clocks swap user venv config engine service health)
PAYLOAD=./payload
CONFIG_FROM="$PAYLOAD/config" # elsewhere in a dry run, which copies nothing
CHANGES=0
NEW_MODE=false # of power: the clocks' maximum is another then

parse_options() {
    POWER_MODE=max CLOCKS=true SWAP_GB=8 REBOOT=false FROM="" EXTRAS="jetson" JETPACK=""
    while [[ $# -gt 0 ]]; do
        case "$1" in
        --dry-run) DRY_RUN=true ;;
        --no-clocks) CLOCKS=false ;;
        --reboot) REBOOT=true ;;
        --power-mode) POWER_MODE="$2" && shift ;;
        --swap) SWAP_GB="$2" && shift ;;
        --extras) EXTRAS="$2" && shift ;;
        --from) FROM="$2" && shift ;;
        --jetpack) JETPACK="$2" && shift ;;
        --config) CONFIG_FROM="$2" && shift ;;
        *) wrong "on_device.sh: unknown option $1" ;;
        esac
        shift
    done
}

# detect: what board this is; refuses what is no Jetson or has an unknown release.
detect() {
    local file="$ROOT/etc/nv_tegra_release"
    if $DRY_RUN; then
        MODEL="a Jetson" RELEASE="JetPack $JETPACK"
        return
    fi
    if [[ $EUID -ne 0 && -z "$ROOT" ]]; then wrong "This needs root on the board."; fi
    if [[ ! -r "$file" ]]; then wrong "This is no Jetson: there is no /etc/nv_tegra_release."; fi
    RELEASE="$(sed -n '1s/^# R\([0-9]*\) (release), REVISION: \([0-9.]*\).*/\1.\2/p' "$file")"
    JETPACK="$(jetpack_of "$RELEASE")" ||
        wrong "Jetson Linux ${RELEASE:-of an unknown release} is here; wanted is 36.4.3 or later (JetPack 6.2) or 39.2 (JetPack 7.2). Flash the board first."
    MODEL="$(tr -d '\0' 2>/dev/null <"$ROOT/sys/firmware/devicetree/base/model" || echo Jetson)"
    say "$MODEL, Jetson Linux $RELEASE (JetPack $JETPACK)"
}

explain_exit() {
    local code=$?
    if [[ $code -eq 1 && -n "${STEP:-}" && "$STEP" != health ]]; then
        say "Step $STEP did not end well. When that is mended, run the same command again: what is done stays done."
    fi
}

main() {
    parse_options "$@"
    cd "$HERE"
    detect
    trap explain_exit EXIT
    local started=""
    for STEP in "${STEPS[@]}"; do
        if [[ -z "$FROM" || "$STEP" == "$FROM" ]]; then started=yes; fi
        if [[ -n "$started" ]]; then
            say "== $STEP"
            "step_$STEP"
        fi
    done
}

main "$@"

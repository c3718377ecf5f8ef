# shellcheck shell=bash disable=SC2153 # what is read here is set by on_device.sh
# Sourced by on_device.sh: the table at the end. Exit code 1 when a line says FAIL.

FAILED=0

# row STATE NAME DETAIL
row() {
    local line
    line="$(printf '%-4s  %-12s %s' "$1" "$2" "$3")"
    printf '%s\n' "$line"
    printf '%s\n' "$line" >>"$LOG"
    if [[ "$1" == FAIL ]]; then FAILED=$((FAILED + 1)); fi
}

step_health() {
    if $DRY_RUN; then
        say "Then it would print a table of health and end with 0 when nothing in it says FAIL."
        return
    fi
    row ok board "$MODEL, Jetson Linux $RELEASE (JetPack $JETPACK)"
    health_power
    health_clocks
    health_temperature
    health_memory
    health_disk
    health_time
    health_tensorrt
    health_service
    health_doctor
    if [[ $CHANGES -eq 0 ]]; then say "0 changes: nothing to do."; else say "$CHANGES changes."; fi
    if [[ $FAILED -gt 0 ]]; then exit 1; fi
}

health_power() {
    local mode
    mode="$(current_power_mode)"
    if [[ "$POWER_MODE" == keep ]]; then
        row ok power "${mode:-unknown}"
        return
    fi
    find_power_mode
    if [[ "$mode" == "$MODE_NAME" ]]; then
        row ok power "$mode"
    else
        row FAIL power "${mode:-unknown}, wanted is $MODE_NAME: give --reboot"
    fi
}

health_clocks() {
    if ! $CLOCKS; then
        row ok clocks "left to the governor"
    elif systemctl is-active --quiet paceline-clocks.service; then
        row ok clocks "at the maximum of the power mode"
    else
        row FAIL clocks "not set: journalctl -u paceline-clocks"
    fi
}

# Throttling begins near 99 °C on Orin; 85 leaves no room for a warm day.
health_temperature() {
    local zone value hottest=-1
    for zone in "$ROOT"/sys/class/thermal/thermal_zone*/temp; do
        # A zone whose part is switched off cannot be read.
        value="$(cat "$zone" 2>/dev/null)" || continue
        if [[ "$value" =~ ^[0-9]+$ && "$value" -gt $hottest ]]; then hottest="$value"; fi
    done
    if [[ $hottest -lt 0 ]]; then
        row warn temperature "no sensor could be read"
    elif [[ $hottest -gt 85000 ]]; then
        row warn temperature "$((hottest / 1000)) °C: look at the fan"
    else
        row ok temperature "$((hottest / 1000)) °C"
    fi
}

health_memory() {
    local total swap
    total="$(awk '/^MemTotal:/ { printf "%.1f", $2 / 1048576 }' "$ROOT/proc/meminfo" 2>/dev/null || true)"
    swap="without a swap file"
    if swap_is_on; then swap="and a swap file of $SWAP_GB GiB"; fi
    row ok memory "${total:-?} GiB $swap"
}

health_disk() {
    local free
    free=$(($(df -Pk "$ROOT/" | awk 'NR == 2 { print $4 }') / 1048576))
    if [[ $free -lt 5 ]]; then row warn disk "$free GiB free: an engine and its timing cache need room"; else row ok disk "$free GiB free"; fi
}

health_time() {
    if [[ "$(timedatectl show -p NTPSynchronized --value)" == yes ]]; then
        row ok time "synchronised"
    else
        row warn time "not synchronised yet: $(date -Is)"
    fi
}

health_tensorrt() {
    local found
    if found="$("$VENV/bin/python" -B -c 'import tensorrt; print(tensorrt.__version__)' 2>&1)"; then
        row ok TensorRT "$found, seen from $VENV"
    else
        row FAIL TensorRT "${found##*$'\n'}: is nvidia-jetpack installed?"
    fi
}

health_service() {
    if [[ ! -e "$ROOT$ETC/star.yaml" ]]; then
        row warn service "not started: no $ETC/star.yaml yet"
    elif systemctl is-active --quiet paceline.service; then
        row ok service "running"
    else
        row FAIL service "$(systemctl is-active paceline.service || true): journalctl -u paceline"
    fi
}

# doctor says the rest: versions, devices, models, keys, links.
health_doctor() {
    local found
    local -a topology=()
    if [[ -e "$ROOT$ETC/star.yaml" ]]; then topology=("$ETC/star.yaml"); fi
    if found="$(runuser -u paceline -- "$VENV/bin/paceline" doctor "${topology[@]}" 2>&1)"; then
        row ok doctor "nothing fails"
    else
        row FAIL doctor "$(grep '^fail' <<<"$found" | head -n 1 || true)"
        say "$found"
    fi
}

# shellcheck shell=bash disable=SC2034,SC2153 # shared with on_device.sh
# Sourced by on_device.sh: the steps that bring a board into shape.

ROOT="${PACELINE_HOST_ROOT:-}"
VENV=/opt/paceline
ETC=/etc/paceline
SWAP_FILE=/paceline.swap
RESTART=/var/lib/paceline-restart # a file: something that the service reads has changed since it was started

# have TEST…: whether it holds here. In a dry run nothing does, so that every command is printed.
have() {
    if $DRY_RUN; then return 1; fi
    "$@"
}

# change COMMAND…: run, and counted. That the service must restart is noted first, in case this run does not get so far.
change() {
    CHANGES=$((CHANGES + 1))
    if ! $DRY_RUN && one_of "$STEP" venv config engine service; then touch "$ROOT$RESTART"; fi
    run "$@"
}

# same_file SOURCE DESTINATION OWNER MODE
same_file() { cmp -s "$1" "$2" && [[ "$(stat -c '%U:%G %a' "$2")" == "$3 $4" ]]; }

# put SOURCE DESTINATION OWNER:GROUP MODE: a file that is as it should be is left alone.
put() {
    if ! have same_file "$1" "$2" "$3" "$4"; then
        change install -D -o "${3%:*}" -g "${3#*:}" -m "$4" "$1" "$2"
    fi
}

# folder PATH OWNER:GROUP MODE
folder() {
    if ! have test -d "$1" || [[ "$(stat -c '%U:%G %a' "$1")" != "$2 $3" ]]; then
        change install -d -o "${2%:*}" -g "${2#*:}" -m "$3" "$1"
    fi
}

# A board has no battery for its clock as it comes; with a wrong date neither apt nor pip accepts a certificate.
step_time() {
    if ! have ntp_is_on; then change timedatectl set-ntp true; fi
}

ntp_is_on() { [[ "$(timedatectl show -p NTP --value)" == yes ]]; }

step_packages() {
    local package
    local -a missing=()
    for package in nvidia-jetpack python3-venv; do
        if ! have is_installed "$package"; then missing+=("$package"); fi
    done
    if [[ ${#missing[@]} -eq 0 ]]; then return; fi
    # The first boot runs apt by itself: wait for its lock.
    change apt-get -o DPkg::Lock::Timeout=600 update
    change env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=600 install -y "${missing[@]}"
}

is_installed() { [[ "$(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null)" == installed ]]; }

# power_modes: "ID NAME" of each mode of this board. Ids differ between boards, names say what they mean.
power_modes() {
    sed -n 's/^ *< *POWER_MODEL  *ID=\([0-9]*\)  *NAME=\([^ >]*\).*/\1 \2/p' "$ROOT/etc/nvpmodel.conf"
}

current_power_mode() { nvpmodel -q 2>/dev/null | sed -n 's/^NV Power Mode: *//p'; }

# find_power_mode: sets MODE_ID and MODE_NAME for --power-mode; 25W also finds MODE_25W, max the mode without limits.
find_power_mode() {
    local wanted id name
    local -a names=("${POWER_MODE^^}" "MODE_${POWER_MODE^^}")
    if [[ "$POWER_MODE" == max ]]; then names=(MAXN_SUPER MAXN); fi
    for wanted in "${names[@]}"; do
        while read -r id name; do
            if [[ "${name^^}" == "$wanted" ]]; then
                MODE_ID="$id" MODE_NAME="$name"
                return
            fi
        done < <(power_modes)
    done
    wrong "This board has no power mode $POWER_MODE. It has: $(power_modes | cut -d' ' -f2 | paste -sd' ')"
}

step_power() {
    if [[ "$POWER_MODE" == keep ]]; then return; fi
    if $DRY_RUN; then
        change nvpmodel -m "ID of $POWER_MODE in /etc/nvpmodel.conf"
        return
    fi
    find_power_mode
    if [[ "$(current_power_mode)" == "$MODE_NAME" ]]; then return; fi
    CHANGES=$((CHANGES + 1)) NEW_MODE=true
    # Some changes need a restart and ask for it; without an answer nvpmodel leaves the mode as it is.
    run nvpmodel -m "$MODE_ID" </dev/null || true
    if [[ "$(current_power_mode)" == "$MODE_NAME" ]]; then return; fi
    if ! $REBOOT; then
        warn "power mode $MODE_NAME needs a restart of the board: give --reboot, or run sudo nvpmodel -m $MODE_ID there."
        return
    fi
    say "The board restarts for power mode $MODE_NAME. Run the same command again when it is back."
    printf 'YES\n' | nvpmodel -m "$MODE_ID" || true
    STEP=""
    exit 1
}

step_clocks() {
    if ! $CLOCKS; then return; fi
    install_unit paceline-clocks.service
    enable_unit paceline-clocks.service
    if ! have systemctl is-active --quiet paceline-clocks.service || $NEW_MODE; then change systemctl restart paceline-clocks.service; fi
}

install_unit() {
    local before=$CHANGES
    put "$PAYLOAD/$1" "$ROOT/etc/systemd/system/$1" root:root 644
    if [[ $CHANGES -ne $before ]]; then change systemctl daemon-reload; fi
}

enable_unit() {
    if ! have systemctl is-enabled --quiet "$1"; then change systemctl enable "$1"; fi
}

# Building an engine needs several times the memory of the weights for a while.
step_swap() {
    local path="$ROOT$SWAP_FILE"
    if [[ "$SWAP_GB" -eq 0 ]]; then return; fi
    if ! have has_size "$path" $((SWAP_GB * 1024 * 1024 * 1024)); then
        if have swap_is_on; then change swapoff "$path"; fi
        change rm -f "$path.new"
        change fallocate -l "${SWAP_GB}GiB" "$path.new"
        change chmod 600 "$path.new"
        change mkswap "$path.new"
        change mv "$path.new" "$path"
    fi
    if ! have grep -q "^${SWAP_FILE}[[:space:]]" "$ROOT/etc/fstab"; then
        change bash -c "echo '$SWAP_FILE none swap sw 0 0' >>$(quoted "$ROOT/etc/fstab")"
    fi
    if ! have swap_is_on; then change swapon "$path"; fi
}

has_size() { [[ -f "$1" && "$(stat -c %s "$1")" -eq "$2" ]]; }

swap_is_on() { swapon --show=NAME --noheadings | grep -qxF "$ROOT$SWAP_FILE"; }

# The GPU's device files belong to the groups video and render.
step_user() {
    local group
    if ! have getent passwd paceline >/dev/null; then
        change useradd --system --home-dir /nonexistent --shell /usr/sbin/nologin --user-group paceline
    fi
    for group in video render; do
        if $DRY_RUN || { getent group "$group" >/dev/null && ! id -nG paceline | tr ' ' '\n' | grep -qx "$group"; }; then
            change usermod -a -G "$group" paceline
        fi
    done
}

# TensorRT's Python package comes with JetPack: the environment sees the system's packages. CUDA's bindings must be of the
# board's own major version.
step_venv() {
    local wheel cuda="cuda-bindings>=12.6,<13" wanted pip="$VENV/bin/pip"
    local -a extra=()
    wheel="$(compgen -G "$PAYLOAD/paceline-*.whl" || true)"
    if ! $DRY_RUN && [[ ! -f "$wheel" ]]; then fail "There is no one paceline-*.whl in $PAYLOAD."; fi
    if [[ "$JETPACK" != 6.2 ]]; then cuda="cuda-bindings>=13,<14"; fi
    if [[ -n "$EXTRAS" ]]; then extra=("$cuda"); fi
    wanted="$(venv_identity "$wheel" "$PAYLOAD/constraints.txt") $EXTRAS"
    if have grep -qxs "$wanted" "$VENV/provisioned"; then return; fi
    if ! have test -x "$pip"; then change python3 -m venv --system-site-packages "$VENV"; fi
    wheel="${wheel:-$PAYLOAD/paceline.whl}"
    change "$pip" install --quiet -c "$PAYLOAD/constraints.txt" "$wheel${EXTRAS:+[$EXTRAS]}" "${extra[@]}"
    # The same version with other content would not be replaced otherwise.
    change "$pip" install --quiet --no-deps --force-reinstall "$wheel"
    if ! $DRY_RUN; then printf '%s\n' "$wanted" >"$VENV/provisioned"; fi
}

venv_identity() {
    if ! $DRY_RUN; then cat "$@" | sha256sum | cut -d' ' -f1; fi
}

# The folder given with --config: star.yaml, and what it names. Nothing is ever deleted on the board. The service owns its keys
# but no folder: it could put links there, and what root writes would go where they lead.
step_config() {
    local file name
    folder "$ROOT$ETC" root:paceline 750
    folder "$ROOT$ETC/secrets" root:paceline 750
    if ! $DRY_RUN && [[ -n "$(find "$ROOT$ETC/secrets" -type l)" ]]; then
        wrong "There are symbolic links in $ETC/secrets on the board, and root does not follow those: remove them, or put files in their place."
    fi
    while IFS= read -r -d '' file <&3; do
        name="${file#"$CONFIG_FROM/"}"
        if $DRY_RUN; then file="$PAYLOAD/config/$name"; fi
        if [[ "$name" == secrets/* ]]; then
            put "$file" "$ROOT$ETC/$name" paceline:paceline 600
        elif ! have keeps_engines "$file" "$ROOT$ETC/$name"; then
            if [[ "$name" == */* ]]; then folder "$ROOT$ETC/${name%/*}" root:paceline 750; fi
            put "$file" "$ROOT$ETC/$name" root:paceline 640
        fi
    done 3< <(find -L "$CONFIG_FROM" -type f -print0 2>/dev/null | sort -z)
}

# keeps_engines SENT THERE: whether the board's manifest is the one sent, with engines that were built there.
keeps_engines() {
    [[ "$1" == */manifest.json && -f "$2" ]] && python3 - "$1" "$2" <<'END'
import json, sys

sent, there = (json.load(open(path)) for path in sys.argv[1:])
built = there.pop("engines", {})
there["files"] = {name: value for name, value in there.get("files", {}).items() if name not in built}
sys.exit(not built or sent.pop("engines", {}) or sent != there)
END
}

# An engine runs only on the GPU, TensorRT and JetPack that it was built with, so it is built here: minutes for each bundle.
# Only in folders that are root's own: not in secrets/, nor where a link leads.
step_engine() {
    local manifest there="$ROOT$ETC" links=-P
    if $DRY_RUN; then there="$CONFIG_FROM" links=-L; fi
    while IFS= read -r -d '' manifest <&3; do
        if ! has_engine "$manifest"; then
            manifest="$ROOT$ETC${manifest#"$there"}"
            change "$VENV/bin/paceline" engine "${manifest%/manifest.json}"
        fi
    done 3< <(find "$links" "$there" -path "$there/secrets" -prune -o -type f -name manifest.json -print0 2>/dev/null | sort -z)
}

# has_engine MANIFEST: whether its bundle has one, or needs none.
has_engine() {
    python3 - "$1" <<'END'
import json, sys

manifest = json.load(open(sys.argv[1]))
sys.exit(manifest.get("runtime") == "tensorrt" and not manifest.get("engines"))
END
}

step_service() {
    install_unit paceline.service
    if ! $DRY_RUN && [[ ! -e "$ROOT$ETC/star.yaml" ]]; then
        warn "there is no $ETC/star.yaml yet, so nothing is started: put it in a folder and give that with --config."
        return
    fi
    run runuser -u paceline -- "$VENV/bin/paceline" check "$ETC/star.yaml"
    enable_unit paceline.service
    if ! have systemctl is-active --quiet paceline.service || [[ -e "$ROOT$RESTART" ]]; then
        change systemctl restart paceline.service
        if ! $DRY_RUN; then rm -f "$ROOT$RESTART"; fi
    fi
}

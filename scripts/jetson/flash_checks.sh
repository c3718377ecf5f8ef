# shellcheck shell=bash disable=SC2153 # what is read here is set by the script that sources this
# Sourced by flash_jetson.sh: what is looked at before anything is written. PACELINE_SYS_ROOT and PACELINE_HOST_ROOT stand in
# for /sys and / in tests.

SYS_ROOT="${PACELINE_SYS_ROOT:-/sys}"
HOST_ROOT="${PACELINE_HOST_ROOT:-}"

# nvidia_devices: "USB_ID PORT" of each NVIDIA device on the USB bus. A port with a dot (1-2.3) lies behind a hub.
nvidia_devices() {
    local device
    for device in "$SYS_ROOT"/bus/usb/devices/*/; do
        [[ -r "$device/idVendor" && "$(<"$device/idVendor")" == "$NVIDIA_USB" ]] || continue
        printf '%s %s\n' "$(<"$device/idProduct")" "$(basename "$device")"
    done
}

# find_board: sets USB_ID, USB_PORT, MODULE and FOUND (the board) from the one Jetson in recovery mode; notes what is wrong.
find_board() {
    local id port linux="" count=0
    USB_ID="" USB_PORT="" FOUND=""
    while read -r id port; do
        if [[ "$id" == "$LINUX_USB" ]]; then linux=yes; fi
        module_of "$id" >/dev/null || continue
        USB_ID="$id" USB_PORT="$port" count=$((count + 1))
    done < <(nvidia_devices)
    if [[ $count -eq 1 ]]; then
        FOUND="$(module_of "$USB_ID")"
        MODULE="${FOUND#* }" FOUND="${FOUND%% *}"
        return
    fi
    if [[ $count -gt 1 ]]; then
        problem "$count Jetsons are in recovery mode: leave one connected."
    elif [[ -n "$linux" ]]; then
        problem "The Jetson on the USB bus runs Linux ($NVIDIA_USB:$LINUX_USB). On it: sudo reboot --force forced-recovery"
    else
        problem "No Jetson in recovery mode on the USB bus (lsusb -d $NVIDIA_USB:). ${BOARD:+To get there: $(recovery_hint "$BOARD"). }A cable without data lines is the usual reason."
    fi
}

check_board() {
    find_board
    if [[ -n "$FOUND" ]]; then say "Found on USB port $USB_PORT: $MODULE, in recovery mode ($NVIDIA_USB:$USB_ID)."; fi
    if [[ -n "$FOUND" && "$FOUND" != "$BOARD" ]]; then
        problem "The board in recovery mode is $FOUND, not $BOARD: name it with --board, or connect the other one."
    fi
    if [[ "$USB_PORT" == *.* ]]; then
        warn "the board is behind a USB hub (port $USB_PORT), a usual reason for write time-outs: connect it directly."
    fi
}

# release_of FOLDER: the release of Jetson Linux in it, such as 36.4.3.
release_of() {
    local version="$1/nv_tegra/bsp_version" release="$1/rootfs/etc/nv_tegra_release"
    if [[ -r "$version" ]]; then
        # Read as text: this runs before anything in that folder is trusted.
        sed -n 's/^BSP_\(BRANCH\|MAJOR\|MINOR\)="\{0,1\}\([0-9]*\).*/\2/p' "$version" | paste -sd.
    elif [[ -r "$release" ]]; then
        sed -n '1s/^# R\([0-9]*\) (release), REVISION: \([0-9.]*\).*/\1.\2/p' "$release"
    fi
}

check_host() {
    local machine version="" name="" fine
    machine="$(uname -m)"
    if [[ "$machine" != x86_64 ]]; then
        problem "This machine is $machine: NVIDIA's flash tools are x86_64 programs. Use an x86_64 machine with Ubuntu."
    fi
    if [[ $EUID -ne 0 ]] && ! command -v sudo >/dev/null; then
        problem "Flashing needs root: install sudo, or run this as root."
    fi
    if [[ -r "$HOST_ROOT/etc/os-release" ]]; then
        version="$(sed -n 's/^VERSION_ID="\{0,1\}\([^"]*\)"\{0,1\}$/\1/p' "$HOST_ROOT/etc/os-release")"
        name="$(sed -n 's/^NAME="\{0,1\}\([^"]*\)"\{0,1\}$/\1/p' "$HOST_ROOT/etc/os-release")"
    fi
    if [[ "$JETPACK" == 6.2 ]]; then fine="20.04 22.04"; else fine="22.04 24.04"; fi
    # shellcheck disable=SC2086 # two words on purpose
    if [[ "${name:-Ubuntu}" != Ubuntu ]] || ! one_of "$version" $fine; then
        name="${name:-Linux} ${version:-of an unknown version}"
        warn "NVIDIA tests JetPack $JETPACK on Ubuntu ${fine/ / and }; this is $name."
    fi
    if systemd-detect-virt --quiet --vm 2>/dev/null; then
        warn "this is a virtual machine: the board changes its USB id while it is flashed, and must be passed through again each time."
    elif systemd-detect-virt --quiet --container 2>/dev/null; then
        warn "this is a container: flashing needs its host's USB bus, NFS server and loop devices."
    fi
}

# What other programs on the host do to the board while it is written.
check_services() {
    if systemctl is-active --quiet udisks2.service 2>/dev/null; then
        problem "Automount is on and would seize the board's disks. Until the next restart: sudo systemctl mask --runtime --now udisks2.service"
    fi
    if systemctl is-active --quiet ModemManager.service 2>/dev/null; then
        warn "ModemManager may seize the board's USB port. For now: sudo systemctl stop ModemManager.service"
    fi
    if grep -qs '^ENABLED=yes' "$HOST_ROOT/etc/ufw/ufw.conf"; then
        warn "the firewall is on and the board is written over NFS. If that is refused: sudo ufw allow nfs"
    fi
}

check_tree() {
    local file configs needed
    if [[ ! -f "$L4T/flash.sh" || ! -f "$L4T/apply_binaries.sh" ]]; then
        problem "$L4T is no Linux_for_Tegra: unpack Jetson_Linux_R…_aarch64.tbz2 and name the folder with --l4t."
        return
    fi
    if [[ ! -e "$L4T/rootfs/etc/passwd" ]]; then
        problem "$L4T/rootfs is empty: sudo tar xpf Tegra_Linux_Sample-Root-Filesystem_R…_aarch64.tbz2 -C $(quoted "$L4T/rootfs")"
    elif [[ -e "$L4T/rootfs/usr/bin/sudo" && ! -u "$L4T/rootfs/usr/bin/sudo" ]]; then
        problem "$L4T/rootfs was unpacked without its permissions: empty it and unpack it again with sudo tar xpf."
    fi
    if [[ ! -f "$L4T/$CONFIG.conf" ]]; then
        configs="$(find "$L4T" -maxdepth 1 -name '*.conf' -printf '%f\n' | sed 's|\.conf$||' | sort | paste -sd' ')"
        problem "There is no $CONFIG.conf in $L4T. Choose with --config; there are: ${configs:-none}"
    fi
    while read -r file; do
        if [[ -n "$file" && ! -f "$L4T/$file" ]]; then
            problem "$L4T/$file is missing: unpack Jetson Linux $RELEASE again."
        fi
    done < <(layout_of "$JETPACK" "$STORAGE" "$BOARD")
    needed=$((SPACE_GB * 1024 * 1024))
    if [[ "$(df -Pk "$L4T" | awk 'NR == 2 { print $4 }')" -lt $needed ]]; then
        problem "Less than $SPACE_GB GB are free where $L4T is, and the images are built there: make room (--space sets the limit)."
    fi
}

check_user() {
    if [[ ! "$USER_NAME" =~ ^[a-z_][a-z0-9_-]{0,31}$ ]]; then
        problem "--user must be lower case letters, digits, - and _; it is '$USER_NAME'."
    fi
    if [[ ! "$HOST_NAME" =~ ^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$ ]]; then
        problem "--hostname must be lower case letters, digits and -; it is '$HOST_NAME'."
    fi
    if [[ -n "$PASSWORD_FILE" && ! -r "$PASSWORD_FILE" ]]; then problem "$PASSWORD_FILE cannot be read."; fi
    if ! $ACCEPT_LICENSE; then
        problem "NVIDIA's licence comes with Jetson Linux: read $L4T/Tegra_Software_License_Agreement-Tegra-Linux.txt, then add --accept-license."
    fi
}

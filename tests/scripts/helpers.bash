# shellcheck shell=bash disable=SC2154 # output and status are set by bats
# Loaded by the bats files: a fake Linux_for_Tegra whose scripts record their arguments, a fake USB bus, and fake commands.

ROOT="$(cd "$BATS_TEST_DIRNAME/../.." && pwd)"

FAKED=(systemctl systemd-detect-virt df uname sudo nvpmodel timedatectl dpkg-query apt-get)

setup() {
    export HOME="$BATS_TEST_TMPDIR/home" FAKE_STATE="$BATS_TEST_TMPDIR/fake"
    export PACELINE_SYS_ROOT="$BATS_TEST_TMPDIR/sys" PACELINE_HOST_ROOT="$BATS_TEST_TMPDIR/host"
    unset XDG_STATE_HOME
    L4T="$BATS_TEST_TMPDIR/Linux_for_Tegra"
    mkdir -p "$HOME" "$FAKE_STATE" "$PACELINE_SYS_ROOT/bus/usb/devices" "$PACELINE_HOST_ROOT/etc" "$BATS_TEST_TMPDIR/bin"
    local name
    for name in "${FAKED[@]}"; do
        cp "$BATS_TEST_DIRNAME/fake_command" "$BATS_TEST_TMPDIR/bin/$name"
    done
    PATH="$BATS_TEST_TMPDIR/bin:$PATH"
    echo 100000000 >"$FAKE_STATE/free"
    echo x86_64 >"$FAKE_STATE/machine"
    echo 'VERSION_ID="22.04"' >"$PACELINE_HOST_ROOT/etc/os-release"
    echo secret-word >"$BATS_TEST_TMPDIR/password"
}

# tree BRANCH MAJOR MINOR: an unpacked Jetson Linux. Its scripts record their arguments in FAKE_STATE/calls.
tree() {
    local script
    mkdir -p "$L4T"/{nv_tegra,rootfs/etc,rootfs/usr/bin,tools/kernel_flash,bootloader/generic/cfg}
    printf 'BSP_BRANCH=%s\nBSP_MAJOR=%s\nBSP_MINOR=%s\n' "$@" >"$L4T/nv_tegra/bsp_version"
    echo root:x:0:0 >"$L4T/rootfs/etc/passwd"
    for script in flash.sh apply_binaries.sh l4t_initrd_flash.sh tools/l4t_flash_prerequisites.sh \
        tools/l4t_create_default_user.sh tools/kernel_flash/l4t_initrd_flash.sh; do
        # shellcheck disable=SC2016 # expanded in the script
        printf '#!/bin/bash\necho "%s${*:+ $*}" >>"$FAKE_STATE/calls"\necho "output of %s"\nif [[ -e "$FAKE_STATE/fails" ]]; then exit 1; fi\n' \
            "$script" "$script" >"$L4T/$script"
        chmod +x "$L4T/$script"
    done
    echo 'echo "# R36 (release)" >rootfs/etc/nv_tegra_release' >>"$L4T/apply_binaries.sh"
    # shellcheck disable=SC2016 # expanded in the script
    echo 'echo "$2:x:1000:1000" >>rootfs/etc/passwd' >>"$L4T/tools/l4t_create_default_user.sh"
    touch "$L4T"/{jetson-orin-nano-devkit,jetson-orin-nano-devkit-super,jetson-agx-orin-devkit,jetson-agx-thor-devkit}.conf
    touch "$L4T/tools/kernel_flash/flash_l4t_t234_nvme.xml" "$L4T/bootloader/generic/cfg/flash_t234_qspi.xml"
}

# usb PORT PRODUCT [VENDOR]: a device on the fake bus.
usb() {
    mkdir -p "$PACELINE_SYS_ROOT/bus/usb/devices/$1"
    echo "${3:-0955}" >"$PACELINE_SYS_ROOT/bus/usb/devices/$1/idVendor"
    echo "$2" >"$PACELINE_SYS_ROOT/bus/usb/devices/$1/idProduct"
}

unplug() { rm -rf "$PACELINE_SYS_ROOT/bus/usb/devices/$1"; }

# flash OPTION…: the script on the fake tree, as a person would run it who has read the licence.
flash() {
    run "$ROOT/scripts/flash_jetson.sh" --l4t "$L4T" --accept-license --password-file "$BATS_TEST_TMPDIR/password" \
        --boot-timeout 0 "$@"
}

calls() { cat "$FAKE_STATE/calls" 2>/dev/null || true; }

# says TEXT: what the last command printed holds it.
says() {
    if [[ "$output" != *"$1"* ]]; then
        printf 'wanted: %s\nprinted (exit %s):\n%s\n' "$1" "$status" "$output"
        return 1
    fi
}

# ended CODE: the exit code of the last command.
ended() {
    if [[ "$status" -ne "$1" ]]; then
        printf 'exit %s instead of %s:\n%s\n' "$status" "$1" "$output"
        return 1
    fi
}

# same WANTED FOUND
same() {
    if [[ "$1" != "$2" ]]; then
        diff <(printf '%s\n' "$1") <(printf '%s\n' "$2")
        return 1
    fi
}

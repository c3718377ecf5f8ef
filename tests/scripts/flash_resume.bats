#!/usr/bin/env bats
# What a second run takes as done, and what becomes of the password.

bats_require_minimum_version 1.5.0
load helpers

# A tree, a board in recovery mode that comes up once it is flashed, and a first run that does all.
flashed() {
    prepared
    flash --yes
    ended 0
    rm "$FAKE_STATE/calls"
    usb 1-2 7523
}

prepared() {
    tree 36 4 3
    # shellcheck disable=SC2016 # expanded in the script
    echo 'echo 7020 >"$PACELINE_SYS_ROOT/bus/usb/devices/1-2/idProduct"' >>"$L4T/tools/kernel_flash/l4t_initrd_flash.sh"
    usb 1-2 7523
}

programs() { calls | cut -d' ' -f1; }

@test "all is done: it says so, and how another board is flashed" {
    flashed
    flash --yes
    ended 0
    says "Nothing to do: this orin-nano was flashed from $L4T already. --from flash flashes another board."
    same "" "$(calls)"
}

@test "Jetson Linux unpacked again begins anew" {
    flashed
    mv "$L4T" "$L4T.old"
    prepared
    flash --yes
    ended 0
    same "tools/l4t_flash_prerequisites.sh
apply_binaries.sh
tools/l4t_create_default_user.sh
tools/kernel_flash/l4t_initrd_flash.sh" "$(programs)"
}

@test "a root file system unpacked again gets binaries and user again, also with --from" {
    flashed
    rm "$L4T/rootfs/etc/nv_tegra_release"
    echo root:x:0:0 >"$L4T/rootfs/etc/passwd"
    flash --yes --from flash
    ended 0
    same "apply_binaries.sh
tools/l4t_create_default_user.sh
tools/kernel_flash/l4t_initrd_flash.sh" "$(programs)"
}

@test "a root file system that lost its binaries goes to the board again once it has them" {
    flashed
    rm "$L4T/rootfs/etc/nv_tegra_release"
    flash --yes
    ended 0
    same "apply_binaries.sh
tools/kernel_flash/l4t_initrd_flash.sh" "$(programs)"
}

@test "a root file system in a new folder begins anew, even where it looks done" {
    flashed
    cp -r "$L4T/rootfs" "$L4T/new"
    mv "$L4T/rootfs" "$L4T/old"
    mv "$L4T/new" "$L4T/rootfs"
    flash --yes
    ended 0
    same "tools/l4t_flash_prerequisites.sh
apply_binaries.sh
tools/kernel_flash/l4t_initrd_flash.sh" "$(programs)"
}

@test "a step whose script ends well without its result is not done" {
    prepared
    printf '#!/bin/bash\ntrue\n' >"$L4T/apply_binaries.sh"
    flash --yes
    ended 1
    says "NVIDIA's script ended well, but $L4T/rootfs is without what it should have put there."
    run ! grep -q '^binaries ' "$HOME/.local/state/paceline/flash/state"
}

@test "a password that is a word of the command is hidden where it is the password" {
    prepared
    echo nvidia >"$BATS_TEST_TMPDIR/password"
    flash --yes
    ended 0
    says "-u nvidia -p ******** -n jetson --accept-license"
    rm -r "$L4T" "$FAKE_STATE/calls"
    prepared
    echo -p >"$BATS_TEST_TMPDIR/password"
    flash --yes
    says "-u nvidia -p ******** -n jetson --accept-license"
    same "tools/l4t_create_default_user.sh -u nvidia -p -p -n jetson --accept-license" "$(calls | grep create_default_user)"
}

@test "the carriage return of a password file from Windows is no part of the password" {
    prepared
    printf 'secret-word\r\nsecond line\r\n' >"$BATS_TEST_TMPDIR/password"
    flash --yes
    ended 0
    says "$BATS_TEST_TMPDIR/password has the line ends of Windows"
    same "tools/l4t_create_default_user.sh -u nvidia -p secret-word -n jetson --accept-license" "$(calls | grep create_default_user)"
    rm -r "$L4T"
    prepared
    printf '\r\n' >"$BATS_TEST_TMPDIR/password"
    flash --yes
    ended 2
    says "The password is empty"
}

@test "log and state are for their owner only" {
    umask 022
    flashed
    same "600" "$(stat -c %a "$HOME"/.local/state/paceline/flash/{state,flash-*.log} | sort -u)"
}

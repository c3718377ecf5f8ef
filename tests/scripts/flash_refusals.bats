#!/usr/bin/env bats
# What is refused before anything is written: exit code 2, a sentence that says what to do, and no command run.

load helpers

refused() {
    ended 2
    says "$1"
    same "" "$(calls)"
}

@test "no board in recovery mode" {
    tree 36 4 3
    usb 1-1 0002 1d6b
    flash --yes
    refused "Or name the board with --board."
    flash --yes --board orin-nano
    refused "No Jetson in recovery mode on the USB bus (lsusb -d 0955:). To get there: power off, bridge pins 9 and 10"
}

@test "the board runs Linux" {
    tree 36 4 3
    usb 1-2 7020
    flash --yes --board orin-nano
    refused "The Jetson on the USB bus runs Linux (0955:7020). On it: sudo reboot --force forced-recovery"
}

@test "another board than the one named" {
    tree 36 4 3
    usb 1-2 7023
    flash --yes --board orin-nano
    refused "The board in recovery mode is agx-orin, not orin-nano"
}

@test "two boards in recovery mode" {
    tree 36 4 3
    usb 1-2 7523
    usb 1-3 7323
    flash --yes --board orin-nano
    refused "2 Jetsons are in recovery mode: leave one connected."
}

@test "a configuration that is not there" {
    tree 36 4 3
    usb 1-2 7523
    flash --yes --config my-carrier
    refused "There is no my-carrier.conf in $L4T. Choose with --config; there are: jetson-agx-orin-devkit "
}

@test "too little space" {
    tree 36 4 3
    usb 1-2 7523
    echo 41943039 >"$FAKE_STATE/free"
    flash --yes
    refused "Less than 40 GB are free where $L4T is"
}

@test "automount" {
    tree 36 4 3
    usb 1-2 7523
    touch "$FAKE_STATE/active-udisks2.service"
    flash --yes
    refused "sudo systemctl mask --runtime --now udisks2.service"
}

@test "an empty root file system, and one unpacked without its permissions" {
    tree 36 4 3
    usb 1-2 7523
    touch "$L4T/rootfs/usr/bin/sudo"
    flash --yes
    refused "unpacked without its permissions"
    rm -r "$L4T/rootfs/etc"
    flash --yes
    refused "$L4T/rootfs is empty: sudo tar xpf"
}

@test "a host that is no x86_64" {
    tree 36 4 3
    usb 1-2 7523
    echo aarch64 >"$FAKE_STATE/machine"
    flash --yes
    refused "This machine is aarch64"
}

@test "a licence that nobody has accepted" {
    tree 36 4 3
    usb 1-2 7523
    run "$ROOT/scripts/flash_jetson.sh" --l4t "$L4T" --yes
    refused "then add --accept-license"
}

@test "all problems are told at once" {
    tree 36 4 3
    flash --yes --board orin-nano --user Root --hostname _ --config none --password-file none.txt
    refused "--user must be"
    says "--hostname must be"
    says "There is no none.conf"
    says "/none.txt cannot be read."
    says "No Jetson in recovery mode"
}

@test "releases and folders that it does not know" {
    tree 35 6 0
    flash --yes --board orin-nano
    refused "holds Jetson Linux 35.6.0; this script knows 36.4.3 and later (JetPack 6.2) and 39.2 (JetPack 7.2)."
    run "$ROOT/scripts/flash_jetson.sh" --l4t "$BATS_TEST_TMPDIR/none"
    refused "There is no folder"
    run "$ROOT/scripts/flash_jetson.sh"
    refused "Name NVIDIA's Linux_for_Tegra with --l4t"
    mkdir "$BATS_TEST_TMPDIR/other"
    run "$ROOT/scripts/flash_jetson.sh" --l4t "$BATS_TEST_TMPDIR/other"
    refused "of an unknown release"
}

@test "combinations and options that do not exist" {
    tree 36 4 3
    flash --board thor
    refused "Thor needs JetPack 7.2"
    flash --board orin-nx --storage emmc
    refused "orin-nx has no eMMC"
    flash --board orin-micro
    refused "--board is one of: orin-nano orin-nx agx-orin thor."
    flash --from nowhere --board orin-nano
    refused "--from is one of: check prerequisites binaries user flash boot."
    flash --frm flash
    refused "There is no option --frm"
    flash --frm
    refused "There is no option --frm"
    flash --board
    refused "--board needs a value"
    flash extra
    refused "What is 'extra'?"
}

@test "another option for a value, line ends in a value, and numbers that are none" {
    local option value
    for option in --l4t --board --storage --config --jetpack --user --hostname --password-file --from --space --boot-timeout --state-dir; do
        run "$ROOT/scripts/flash_jetson.sh" "$option" --dry-run
        refused "$option needs a value"
        run "$ROOT/scripts/flash_jetson.sh" --dry-run "$option" $'a\nuser done'
        refused "The value of $option must not have line ends"
    done
    for value in 08 9999999999999999 1.5 1G " 1" ""; do
        flash --space "$value"
        refused "--space is a whole number from 0 to 100000; it is '$value'."
        flash --boot-timeout "$value"
        refused "--boot-timeout is a whole number from 0 to 86400; it is '$value'."
    done
    L4T+=$'\nflash done'
    tree 36 4 3
    cd "$L4T"
    run "$ROOT/scripts/flash_jetson.sh" --l4t . --board orin-nano
    refused "The value of --l4t must not have line ends"
}

@test "--help says how, and ends well" {
    run "$ROOT/scripts/flash_jetson.sh" --help
    ended 0
    says "Usage: scripts/flash_jetson.sh --l4t DIR [options]"
    run "$ROOT/scripts/provision_jetson.sh" --help
    ended 0
    says "Usage: scripts/provision_jetson.sh USER@HOST [options]"
}

@test "a hub, a virtual machine, a firewall and an untested Ubuntu are warned of, not refused" {
    tree 36 4 3
    usb 1-2.3 7523
    printf 'NAME="Ubuntu"\nVERSION_ID="24.04"\n' >"$PACELINE_HOST_ROOT/etc/os-release"
    touch "$FAKE_STATE/virtual--vm"
    mkdir "$PACELINE_HOST_ROOT/etc/ufw"
    echo ENABLED=yes >"$PACELINE_HOST_ROOT/etc/ufw/ufw.conf"
    flash </dev/null
    ended 2
    says "warning: the board is behind a USB hub (port 1-2.3)"
    says "warning: this is a virtual machine"
    says "warning: the firewall is on"
    says "warning: NVIDIA tests JetPack 6.2 on Ubuntu 20.04 and 22.04; this is Ubuntu 24.04."
    says "Not confirmed"
}

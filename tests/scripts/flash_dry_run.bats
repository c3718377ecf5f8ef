#!/usr/bin/env bats
# The dry run needs no board and no files: every command, for four boards and two releases.

load helpers

# commands OPTION…: what a dry run prints on stdout.
commands() { "$ROOT/scripts/flash_jetson.sh" --dry-run --accept-license "$@" 2>/dev/null; }

user="sudo tools/l4t_create_default_user.sh -u nvidia -p ******** -n jetson --accept-license"
nvme="--external-device nvme0n1p1 -c tools/kernel_flash/flash_l4t_t234_nvme.xml"
qspi="-p '-c bootloader/generic/cfg/flash_t234_qspi.xml'"

# prepared LINE…: the commands that come before flashing, which is LINE.
prepared() {
    printf '%s\n' "cd Linux_for_Tegra" "sudo tools/l4t_flash_prerequisites.sh" "sudo ./apply_binaries.sh${2:+ $2}" "$user" "$1"
}

@test "Orin Nano, JetPack 6.2: boot loader and NVMe in one run" {
    same "$(prepared "sudo tools/kernel_flash/l4t_initrd_flash.sh $nvme $qspi --showlogs --network usb0 jetson-orin-nano-devkit-super internal")" \
        "$(commands --board orin-nano --jetpack 6.2)"
}

@test "Orin NX on the carrier of the Nano kit, JetPack 6.2: that kit's configuration" {
    same "$(commands --board orin-nano --jetpack 6.2)" "$(commands --board orin-nx --jetpack 6.2)"
}

@test "AGX Orin, JetPack 6.2: eMMC, or NVMe when asked for" {
    same "$(prepared "sudo ./flash.sh jetson-agx-orin-devkit internal")" "$(commands --board agx-orin --jetpack 6.2)"
    same "$(prepared "sudo tools/kernel_flash/l4t_initrd_flash.sh $nvme --showlogs --network usb0 jetson-agx-orin-devkit external")" \
        "$(commands --board agx-orin --jetpack 6.2 --storage nvme)"
}

@test "Orin Nano and Orin NX, JetPack 7.2" {
    same "$(prepared "sudo ./l4t_initrd_flash.sh --erase-all jetson-orin-nano-devkit-super internal")" \
        "$(commands --board orin-nano --jetpack 7.2)"
    same "$(prepared "sudo ./l4t_initrd_flash.sh jetson-orin-nano-devkit internal")" \
        "$(commands --board orin-nx --jetpack 7.2 --no-erase-all --config jetson-orin-nano-devkit)"
}

@test "AGX Orin, JetPack 7.2: eMMC, or NVMe when asked for" {
    same "$(prepared "sudo ./flash.sh --erase-all jetson-agx-orin-devkit internal")" "$(commands --board agx-orin --jetpack 7.2)"
    same "$(prepared "sudo ./l4t_initrd_flash.sh --erase-all $nvme jetson-agx-orin-devkit external")" \
        "$(commands --board agx-orin --jetpack 7.2 --storage nvme)"
}

@test "Thor, JetPack 7.2: open kernel modules" {
    same "$(prepared "sudo ./l4t_initrd_flash.sh jetson-agx-thor-devkit internal" --openrm)" "$(commands --board thor --jetpack 7.2)"
}

@test "--from leaves out what comes before" {
    same "$(printf '%s\n' "cd Linux_for_Tegra" "sudo ./l4t_initrd_flash.sh jetson-agx-thor-devkit internal")" \
        "$(commands --board thor --jetpack 7.2 --from flash)"
}

@test "user and host name go to NVIDIA's script, the password is never shown" {
    run commands --board orin-nano --jetpack 7.2 --user ada --hostname orin-1
    says "-u ada -p ******** -n orin-1"
}

@test "a dry run with the files says what would be refused, changes nothing and ends well" {
    tree 36 4 3
    rm "$L4T/jetson-orin-nano-devkit-super.conf"
    touch "$FAKE_STATE/active-udisks2.service"
    run "$ROOT/scripts/flash_jetson.sh" --dry-run --board orin-nano --l4t "$L4T"
    ended 0
    says "would refuse: There is no jetson-orin-nano-devkit-super.conf in $L4T. Choose with --config; there are: jetson-agx-orin-devkit jetson-agx-thor-devkit jetson-orin-nano-devkit"
    says "would refuse: Automount is on"
    says "would refuse: NVIDIA's licence"
    [[ "$output" == *"The run itself would refuse to begin, for what is said above." ]]
    [[ -z "$(calls)" && -z "$(ls -A "$HOME")" ]]
}

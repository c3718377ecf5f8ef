#!/usr/bin/env bats
# Flashing with NVIDIA's scripts replaced by ones that record their arguments.

load helpers

initrd="--external-device nvme0n1p1 -c tools/kernel_flash/flash_l4t_t234_nvme.xml -p -c bootloader/generic/cfg/flash_t234_qspi.xml --showlogs --network usb0 jetson-orin-nano-devkit-super internal"

# The board comes up as soon as NVIDIA's flash script has run.
boots() {
    # shellcheck disable=SC2016 # expanded in the script
    printf 'mkdir -p "$PACELINE_SYS_ROOT/bus/usb/devices/1-2"\necho 7020 >"$PACELINE_SYS_ROOT/bus/usb/devices/1-2/idProduct"\n' \
        >>"$L4T/tools/kernel_flash/l4t_initrd_flash.sh"
}

@test "all steps, with the board found on the bus" {
    tree 36 4 3
    boots
    usb 1-2 7523
    flash --yes
    ended 0
    says "Found on USB port 1-2: Orin Nano 8GB, in recovery mode (0955:7523)."
    says "The board runs. Next: scripts/provision_jetson.sh nvidia@192.168.55.1"
    same "tools/l4t_flash_prerequisites.sh
apply_binaries.sh
tools/l4t_create_default_user.sh -u nvidia -p secret-word -n jetson --accept-license
tools/kernel_flash/l4t_initrd_flash.sh $initrd" "$(calls)"
}

@test "what was done is logged, without the password" {
    tree 36 4 3
    boots
    usb 1-2 7523
    flash --yes
    local log
    log="$(cat "$HOME"/.local/state/paceline/flash/flash-orin-nano-*.log)"
    [[ "$log" == *"output of tools/kernel_flash/l4t_initrd_flash.sh"* ]]
    [[ "$log" == *"-u nvidia -p ******** -n jetson"* ]]
    [[ "$log" != *secret-word* && "$output" != *secret-word* ]]
}

@test "after a failure the same command goes on where it stopped" {
    tree 36 4 3
    boots
    usb 1-2 7523
    # shellcheck disable=SC2016 # expanded in the script
    echo 'touch "$FAKE_STATE/fails"' >>"$L4T/tools/l4t_create_default_user.sh"
    flash --yes
    ended 1
    says "Step flash did not end well. The log is "
    rm "$FAKE_STATE/fails" "$FAKE_STATE/calls"
    flash --yes
    ended 0
    says "binaries: done; --from binaries does it again."
    same "tools/kernel_flash/l4t_initrd_flash.sh $initrd" "$(calls)"
    rm "$FAKE_STATE/calls"
    flash --yes
    ended 0
    same "" "$(calls)"
}

@test "--from does a step again, and those after it" {
    tree 36 4 3
    boots
    usb 1-2 7523
    flash --yes
    usb 1-2 7523
    rm "$FAKE_STATE/calls"
    flash --yes --from flash
    ended 0
    same "tools/kernel_flash/l4t_initrd_flash.sh $initrd" "$(calls)"
}

@test "another configuration begins anew" {
    tree 36 4 3
    boots
    usb 1-2 7523
    flash --yes
    rm "$FAKE_STATE/calls"
    usb 1-2 7523
    flash --yes --config jetson-orin-nano-devkit
    ended 0
    same "${initrd/-super/}" "$(tail -n 1 "$FAKE_STATE/calls" | cut -d' ' -f2-)"
}

@test "a user who is in the root file system already is kept" {
    tree 36 4 3
    boots
    usb 1-2 7523
    echo nvidia:x:1000:1000 >>"$L4T/rootfs/etc/passwd"
    flash --yes
    ended 0
    says "keeps the password given then"
    [[ "$(calls)" != *create_default_user* ]]
}

@test "a T4000 is told from a T5000 by its USB id; paths may be relative" {
    tree 39 2 0
    touch "$L4T/jetson-agx-thor-t4000.conf"
    usb 1-2 7226
    cd "$BATS_TEST_TMPDIR"
    flash --yes --board thor --password-file password --state-dir state
    says "Found on USB port 1-2: Thor T4000"
    same "l4t_initrd_flash.sh jetson-agx-thor-t4000 internal" "$(tail -n 1 "$FAKE_STATE/calls")"
    [[ "$(calls)" == *"apply_binaries.sh --openrm"*"-p secret-word"* && -e state/state ]]
}

@test "the board's name must be typed" {
    tree 39 2 0
    usb 1-2 7026
    flash <<<"yes"
    ended 2
    says "This overwrites the boot loader and the nvme of the thor on USB port 1-2."
    says "Not confirmed: nothing was written."
    [[ "$(calls)" != *l4t_initrd_flash* ]]
}

@test "with the board's name typed it is written; a board that does not come up is told" {
    tree 39 2 0
    usb 1-2 7026
    flash <<<"thor"
    ended 1
    says "After 0 s the board does not show itself as 0955:7020."
    same "l4t_initrd_flash.sh jetson-agx-thor-devkit internal" "$(tail -n 1 "$FAKE_STATE/calls")"
}

@test "a board that leaves recovery mode while things are prepared is noticed before it is written" {
    tree 36 4 3
    usb 1-2 7523
    # shellcheck disable=SC2016 # expanded in the script
    echo 'rm -r "$PACELINE_SYS_ROOT/bus/usb/devices/1-2"' >>"$L4T/apply_binaries.sh"
    flash --yes
    ended 2
    says "No Jetson in recovery mode on the USB bus"
    [[ "$(calls)" != *l4t_initrd_flash* ]]
}

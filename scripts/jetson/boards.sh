# shellcheck shell=bash disable=SC2034,SC2153 # what is set and read here belongs to the scripts that source this
# What differs between boards and releases. USB ids, configurations and commands are those of NVIDIA's Quick Start for
# Jetson Linux 36.4.3 and 39.2; docs/jetson.md says which of them could not be confirmed.

BOARDS=(orin-nano orin-nx agx-orin thor)
NVIDIA_USB=0955
LINUX_USB=7020 # the USB id of a Jetson that runs Linux: up, and not in recovery mode

# module_of USB_ID: "BOARD MODULE" for the product id that a board shows in recovery mode.
module_of() {
    case "$1" in
    7023) echo "agx-orin AGX Orin 64GB, or the 32GB of the developer kit" ;;
    7223) echo "agx-orin AGX Orin 32GB" ;;
    7323) echo "orin-nx Orin NX 16GB" ;;
    7423) echo "orin-nx Orin NX 8GB" ;;
    7523) echo "orin-nano Orin Nano 8GB" ;;
    7623) echo "orin-nano Orin Nano 4GB" ;;
    7026) echo "thor Thor T5000" ;;
    7226) echo "thor Thor T4000" ;;
    *) return 1 ;;
    esac
}

# recovery_hint BOARD: how a developer kit gets into recovery mode.
recovery_hint() {
    case "$1" in
    orin-nano | orin-nx)
        echo "power off, bridge pins 9 and 10 of the button header (FC REC and GND), power on, take the bridge away"
        ;;
    agx-orin | thor) echo "hold the middle button (Force Recovery), press and release reset, let go after two seconds" ;;
    esac
}

# jetpack_of RELEASE: the JetPack that a release of Jetson Linux belongs to, of those that these scripts know.
jetpack_of() {
    case "$1" in
    36.4.[3-9] | 36.4.[1-9][0-9] | 36.[5-9]*) echo 6.2 ;;
    39.[2-9]*) echo 7.2 ;;
    *) return 1 ;;
    esac
}

# config_of BOARD USB_ID: the name of BOARD.conf. An Orin NX on the carrier of the Orin Nano kit uses that kit's.
config_of() {
    case "$1" in
    orin-nano | orin-nx) echo jetson-orin-nano-devkit-super ;;
    agx-orin) echo jetson-agx-orin-devkit ;;
    thor) if [[ "$2" == 7226 ]]; then echo jetson-agx-thor-t4000; else echo jetson-agx-thor-devkit; fi ;;
    esac
}

default_storage() {
    if [[ "$1" == agx-orin ]]; then echo emmc; else echo nvme; fi
}

# check_pair BOARD JETPACK STORAGE: refuses a combination that does not exist.
check_pair() {
    if [[ "$1" == thor && "$2" == 6.2 ]]; then
        wrong "Thor needs JetPack 7.2: unpack Jetson Linux 39.2 and name its folder with --l4t."
    fi
    if [[ "$1" != agx-orin && "$3" == emmc ]]; then
        wrong "$1 has no eMMC: use --storage nvme."
    fi
}

# layout_of JETPACK STORAGE BOARD: files below Linux_for_Tegra that the flash command names.
layout_of() {
    local nvme=tools/kernel_flash/flash_l4t_t234_nvme.xml
    case "$1 $2 $3" in
    "6.2 nvme orin-n"*) printf '%s\n' "$nvme" bootloader/generic/cfg/flash_t234_qspi.xml ;;
    *" nvme agx-orin") printf '%s\n' "$nvme" ;;
    esac
}

# flash_command: sets FLASH to the command for $BOARD, $JETPACK, $RELEASE, $STORAGE, $CONFIG and $ERASE (yes, no, or empty:
# as NVIDIA's documents for the release have it).
flash_command() {
    local nvme=tools/kernel_flash/flash_l4t_t234_nvme.xml
    local -a erase=()
    if erases; then erase=(--erase-all); fi
    case "$JETPACK $BOARD $STORAGE" in
    "6.2 orin-n"*)
        FLASH=(tools/kernel_flash/l4t_initrd_flash.sh --external-device nvme0n1p1 -c "$nvme"
            -p "-c bootloader/generic/cfg/flash_t234_qspi.xml" "${erase[@]}" --showlogs --network usb0 "$CONFIG" internal)
        ;;
    "6.2 agx-orin nvme")
        FLASH=(tools/kernel_flash/l4t_initrd_flash.sh --external-device nvme0n1p1 -c "$nvme"
            "${erase[@]}" --showlogs --network usb0 "$CONFIG" external)
        ;;
    *" agx-orin emmc") FLASH=(./flash.sh "${erase[@]}" "$CONFIG" internal) ;;
    "7.2 agx-orin nvme")
        FLASH=(./l4t_initrd_flash.sh "${erase[@]}" --external-device nvme0n1p1 -c "$nvme" "$CONFIG" external)
        ;;
    *) FLASH=(./l4t_initrd_flash.sh "${erase[@]}" "$CONFIG" internal) ;;
    esac
}

erases() {
    case "$ERASE:$BOARD:$RELEASE" in
    yes:* | :orin-n*:36.[5-9]* | :orin-n*:39.* | :agx-orin:39.*) return 0 ;;
    *) return 1 ;;
    esac
}

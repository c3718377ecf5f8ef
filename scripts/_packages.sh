# shellcheck shell=bash
# Sourced by scripts/test: on Debian and Ubuntu root gets the programs that some tests run. Elsewhere, and when that does not
# work, tests of MQTT run on amqtt, and those that need the program itself skip with the reason.

install_test_programs() {
    local program packages=()
    for program in mosquitto bats debootstrap ssh; do
        if ! PATH="$PATH:/usr/sbin" command -v "$program" >/dev/null; then
            packages+=("${program/#ssh/openssh-client}")
        fi
    done
    if ((${#packages[@]} == 0)) || [[ $EUID -ne 0 ]] || ! command -v apt-get >/dev/null; then return; fi
    say "Installing ${packages[*]} for the tests …"
    export DEBIAN_FRONTEND=noninteractive
    if ! { timeout 120 apt-get -qq update && timeout 300 apt-get -qq install -y --no-install-recommends "${packages[@]}"; } \
        </dev/null >/dev/null 2>&1; then
        say "They could not be installed: the tests that need them skip."
    fi
}

install_test_programs

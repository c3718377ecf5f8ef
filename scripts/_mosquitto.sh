# Sourced by scripts/test: on Debian and Ubuntu root gets a real mosquitto for the tests of MQTT. Elsewhere, and when
# that does not work, they run on amqtt, and those of mosquitto's own features skip.

if [[ $EUID -eq 0 ]] && ! PATH="$PATH:/usr/sbin" command -v mosquitto >/dev/null && command -v apt-get >/dev/null; then
    say "Installing mosquitto for the tests of MQTT …"
    export DEBIAN_FRONTEND=noninteractive
    if ! { timeout 120 apt-get -qq update && timeout 300 apt-get -qq install -y --no-install-recommends mosquitto; } \
        </dev/null >/dev/null 2>&1; then
        say "It could not be installed: the tests that need it skip."
    fi
fi

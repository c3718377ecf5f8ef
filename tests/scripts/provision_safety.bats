#!/usr/bin/env bats
# What provisioning must not delete, send or follow. The board is a fake `ssh` that runs the command here, where on_device.sh
# finds no Jetson and ends with 2.

load helpers

# board LINES [COMMAND]: a fake board whose shell says LINES at its start and then runs what it is asked to, or COMMAND.
board() {
    local command="${2:-\$asked}"
    printf '%s' "$1" >"$FAKE_STATE/greeting"
    cat >"$BATS_TEST_TMPDIR/bin/ssh" <<END
#!/bin/bash
if [[ "\$*" == *" -O exit "* ]]; then exit; fi
asked="\${@: -1}"
printf '%s\n' "\$asked" >>"$FAKE_STATE/asked"
cat "$FAKE_STATE/greeting"
bash -c "$command"
END
    chmod +x "$BATS_TEST_TMPDIR/bin/ssh"
}

provision() {
    touch "$BATS_TEST_TMPDIR/paceline-1.whl"
    run "$ROOT/scripts/provision_jetson.sh" "$@" --wheel "$BATS_TEST_TMPDIR/paceline-1.whl"
}

# authority NAME: a certificate authority; its key is NAME.key.
authority() {
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj "/CN=$1" -days 1 \
        -keyout "$BATS_TEST_TMPDIR/$1.key" -out "$BATS_TEST_TMPDIR/$1.pem" "${@:2}" 2>/dev/null
}

# step COMMAND…: a function of the steps, as on_device.sh calls it.
step() {
    run bash -c '
        set -euo pipefail
        source "$0/common.sh"; source "$0/device_steps.sh"
        STEP=test CHANGES=0 VENV=venv CONFIG_FROM=none
        "$@"' "$ROOT/scripts/jetson" "$@"
}

@test "what a board's shell says at its start is no folder to delete" {
    mkdir "$BATS_TEST_TMPDIR/precious"
    board "Welcome.
$BATS_TEST_TMPDIR/precious
"
    provision nvidia@board
    ended 2
    says "This is no Jetson"
    [[ -d "$BATS_TEST_TMPDIR/precious" ]]
    local folder
    folder="$(sed -n 's/^rm -rf //p' "$FAKE_STATE/asked")"
    [[ "$folder" =~ ^/tmp/paceline\.[A-Za-z0-9]{8}$ && ! -e "$folder" ]]
}

@test "an answer that is no new folder is refused, and nothing is deleted" {
    local answer
    for answer in / /tmp "/tmp/paceline.abcdefgh /home" "/tmp/paceline.\$(id)ab" /tmp/paceline.abcdefgh/.. ""; do
        board "$answer" true
        provision nvidia@board
        ended 1
        says "where the name of a new folder belongs"
    done
    same "mktemp -d /tmp/paceline.XXXXXXXX" "$(sort -u "$FAKE_STATE/asked")"
}

@test "a TMPDIR with a space: only what was made there is deleted" {
    export TMPDIR="$BATS_TEST_TMPDIR/one two"
    mkdir "$TMPDIR" "$BATS_TEST_TMPDIR/one"
    board ""
    provision --local
    ended 2
    says "This is no Jetson"
    [[ -d "$BATS_TEST_TMPDIR/one" && -z "$(ls -A "$TMPDIR")" ]]
    provision nvidia@board
    ended 2
    says "This is no Jetson"
    [[ -d "$BATS_TEST_TMPDIR/one" && -z "$(ls -A "$TMPDIR")" ]]
}

@test "another option for a value, line ends in a value, and numbers that are none" {
    local option value
    for option in --config --wheel --power-mode --swap --extras --from --port --identity --jetpack --state-dir; do
        run "$ROOT/scripts/provision_jetson.sh" a@b "$option" --dry-run
        ended 2
        says "$option needs a value"
        run "$ROOT/scripts/provision_jetson.sh" a@b --dry-run "$option" $'a\nb'
        ended 2
        says "The value of $option must not have line ends"
    done
    for value in 08 9999999999999999 0x1 ""; do
        run "$ROOT/scripts/provision_jetson.sh" a@b --dry-run --swap "$value"
        ended 2
        says "--swap is a whole number from 0 to 1024; it is '$value'."
        run "$ROOT/scripts/provision_jetson.sh" a@b --dry-run --port "$value"
        ended 2
        says "--port is a whole number from 1 to 65535; it is '$value'."
    done
}

@test "the key of a certificate authority is refused under any name, anywhere; a node's key is not" {
    local config="$BATS_TEST_TMPDIR/config"
    mkdir -p "$config/secrets" "$config/bundles/old"
    authority ca
    authority node -addext basicConstraints=critical,CA:FALSE
    cat "$BATS_TEST_TMPDIR"/{node,ca}.pem >"$config/secrets/chain.pem"
    cp "$BATS_TEST_TMPDIR/node.key" "$config/secrets/drafter.key"
    cp "$BATS_TEST_TMPDIR/ca.key" "$config/bundles/old/notes.txt"
    provision nvidia@board --config "$config"
    ended 2
    says "$config/bundles/old/notes.txt is the key of the certificate authority and must not leave this machine"
    [[ "$output" != *"drafter.key is"* ]]
    rm "$config/bundles/old/notes.txt"
    touch "$config/bundles/old/CA.key"
    provision nvidia@board --config "$config"
    ended 2
    says "$config/bundles/old/CA.key is the key of the certificate authority"
}

@test "engines are built neither in the service's own folder nor where a link leads" {
    local etc="$PACELINE_HOST_ROOT/etc/paceline"
    mkdir -p "$etc/secrets/bundle" "$etc/bundles" "$BATS_TEST_TMPDIR/elsewhere"
    echo '{"runtime": "tensorrt"}' | tee "$etc/secrets/bundle/manifest.json" >"$BATS_TEST_TMPDIR/elsewhere/manifest.json"
    ln -s "$BATS_TEST_TMPDIR/elsewhere" "$etc/bundles/linked"
    step step_engine
    ended 0
    same "" "$(calls)"
}

@test "root writes nothing through a link in secrets/" {
    local secrets="$PACELINE_HOST_ROOT/etc/paceline/secrets"
    mkdir -p "$secrets"
    ln -s /etc "$secrets/keys"
    # shellcheck disable=SC2016 # expanded in the script
    printf '#!/bin/bash\nmkdir -p "${@: -1}"\n' >"$BATS_TEST_TMPDIR/bin/install"
    chmod +x "$BATS_TEST_TMPDIR/bin/install"
    step step_config
    ended 2
    says "There are symbolic links in /etc/paceline/secrets on the board"
}

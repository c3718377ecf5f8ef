#!/usr/bin/env bats
# Provisioning without a board: the dry run, what is refused, and power modes by name. The rest runs for real in a Debian root:
# test_provision_over_ssh.py.

bats_require_minimum_version 1.5.0
load helpers

provision() { run "$ROOT/scripts/provision_jetson.sh" "$@"; }

# step COMMAND…: a function of the steps, as on_device.sh calls it.
step() {
    run bash -c '
        set -euo pipefail
        source "$0/common.sh"; source "$0/boards.sh"; source "$0/device_steps.sh"
        STEP=test CHANGES=0 VENV="$PACELINE_HOST_ROOT/venv" REBOOT="${REBOOT:-false}" POWER_MODE="$1"; shift
        "$@"
        echo "$CHANGES changes"' "$ROOT/scripts/jetson" "$@"
}

# modes NAME…: a board with these power modes, in the last of them.
modes() {
    local id=0 name
    for name in "$@"; do
        printf '< POWER_MODEL ID=%s NAME=%s >\nCPU_ONLINE CORE_0 1\n' "$id" "$name" >>"$PACELINE_HOST_ROOT/etc/nvpmodel.conf"
        id=$((id + 1))
    done
    echo "$name" >"$FAKE_STATE/mode"
    export FAKE_NVPMODEL_CONF="$PACELINE_HOST_ROOT/etc/nvpmodel.conf"
}

# manifest PATH FILES ENGINES: of a bundle for TensorRT.
manifest() {
    mkdir -p "$(dirname "$1")"
    printf '{"role": "drafter", "runtime": "tensorrt", "files": {%s}, "engines": {%s}}\n' "$2" "$3" >"$1"
}

@test "a dry run prints every command and needs no board" {
    run --separate-stderr "$ROOT/scripts/provision_jetson.sh" nvidia@192.168.55.1 --dry-run --jetpack 6.2 --power-mode 25W
    ended 0
    same "mkdir -p /tmp/WORK/bundle/payload
cp $(printf "$ROOT/scripts/jetson/%s.sh " on_device common boards device_steps health)/tmp/WORK/bundle
cp $ROOT/examples/systemd/paceline.service $ROOT/examples/systemd/paceline-clocks.service /tmp/WORK/bundle/payload
sed -n '/^cuda/!w /tmp/WORK/bundle/payload/constraints.txt' $ROOT/constraints.txt
mkdir /tmp/WORK/source
cp -rp $(printf "$ROOT/%s " pyproject.toml README.md LICENSE paceline export edge cloud topology core)/tmp/WORK/source
find /tmp/WORK/source -name __pycache__ -prune -exec rm -r '{}' +
env SOURCE_DATE_EPOCH=1577836800 python3 -m pip --disable-pip-version-check wheel --quiet --no-deps --wheel-dir /tmp/WORK/bundle/payload /tmp/WORK/source
ssh -o ConnectTimeout=10 nvidia@192.168.55.1 'mktemp -d /tmp/paceline.XXXXXXXX'
tar -C /tmp/WORK/bundle -cf - . | ssh -o ConnectTimeout=10 nvidia@192.168.55.1 'tar -C /tmp/BOARD_DIR -xf -'
ssh -o ConnectTimeout=10 nvidia@192.168.55.1 'sudo /tmp/BOARD_DIR/on_device.sh --power-mode 25W'
timedatectl set-ntp true
apt-get -o DPkg::Lock::Timeout=600 update
env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=600 install -y nvidia-jetpack python3-venv
nvpmodel -m 'ID of 25W in /etc/nvpmodel.conf'
install -D -o root -g root -m 644 ./payload/paceline-clocks.service $PACELINE_HOST_ROOT/etc/systemd/system/paceline-clocks.service
systemctl daemon-reload
systemctl enable paceline-clocks.service
systemctl restart paceline-clocks.service
rm -f $PACELINE_HOST_ROOT/paceline.swap.new
fallocate -l 8GiB $PACELINE_HOST_ROOT/paceline.swap.new
chmod 600 $PACELINE_HOST_ROOT/paceline.swap.new
mkswap $PACELINE_HOST_ROOT/paceline.swap.new
mv $PACELINE_HOST_ROOT/paceline.swap.new $PACELINE_HOST_ROOT/paceline.swap
bash -c 'echo '\\''/paceline.swap none swap sw 0 0'\\'' >>$PACELINE_HOST_ROOT/etc/fstab'
swapon $PACELINE_HOST_ROOT/paceline.swap
useradd --system --home-dir /nonexistent --shell /usr/sbin/nologin --user-group paceline
usermod -a -G video paceline
usermod -a -G render paceline
python3 -m venv --system-site-packages /opt/paceline
/opt/paceline/bin/pip install --quiet -c ./payload/constraints.txt './payload/paceline.whl[jetson]' 'cuda-bindings>=12.6,<13'
/opt/paceline/bin/pip install --quiet --no-deps --force-reinstall ./payload/paceline.whl
install -d -o root -g paceline -m 750 $PACELINE_HOST_ROOT/etc/paceline
install -d -o root -g paceline -m 750 $PACELINE_HOST_ROOT/etc/paceline/secrets
install -D -o root -g root -m 644 ./payload/paceline.service $PACELINE_HOST_ROOT/etc/systemd/system/paceline.service
systemctl daemon-reload
runuser -u paceline -- /opt/paceline/bin/paceline check /etc/paceline/star.yaml
systemctl enable paceline.service
systemctl restart paceline.service
ssh -o ConnectTimeout=10 nvidia@192.168.55.1 'rm -rf /tmp/BOARD_DIR'" "$output"
}

@test "a dry run with a topology and bundles names their files, and the engines that are to be built" {
    local config="$BATS_TEST_TMPDIR/config"
    mkdir -p "$config/secrets"
    touch "$config/star.yaml" "$config/secrets/drafter.key"
    manifest "$config/bundles/small/manifest.json" '"graph.onnx": "1"' ''
    manifest "$config/bundles/built/manifest.json" '"graph.onnx": "1"' '"x.plan": {}'
    topology_checker 0
    run --separate-stderr "$ROOT/scripts/provision_jetson.sh" nvidia@board --dry-run --config "$config" --wheel "$config/star.yaml" --from config
    ended 0
    says "cp -rL $config /tmp/WORK/bundle/payload/config"
    says "install -D -o root -g paceline -m 640 ./payload/config/star.yaml $PACELINE_HOST_ROOT/etc/paceline/star.yaml"
    says "install -D -o paceline -g paceline -m 600 ./payload/config/secrets/drafter.key $PACELINE_HOST_ROOT/etc/paceline/secrets/drafter.key"
    same "/opt/paceline/bin/paceline engine $PACELINE_HOST_ROOT/etc/paceline/bundles/small" "$(grep ' engine ' <<<"$output")"
    [[ "$stderr" == *"A dry run: nothing was changed." ]]
}

# topology_checker CODE: a fake `paceline` that says what check would, and ends with CODE.
topology_checker() {
    # shellcheck disable=SC2016 # expanded in the script
    printf '#!/bin/bash\necho "${@: -1}:1:1: is wrong"\nexit %s\n' "$1" >"$BATS_TEST_TMPDIR/bin/paceline"
    chmod +x "$BATS_TEST_TMPDIR/bin/paceline"
}

@test "a topology that check refuses is refused before anything is begun" {
    mkdir -p "$BATS_TEST_TMPDIR/config"
    touch "$BATS_TEST_TMPDIR/config/star.yaml"
    topology_checker 2
    provision nvidia@board --config "$BATS_TEST_TMPDIR/config"
    ended 2
    same "$BATS_TEST_TMPDIR/config/star.yaml:1:1: is wrong" "$output"
    provision nvidia@board --config "$BATS_TEST_TMPDIR/config" --dry-run
    ended 0
    says "would refuse: $BATS_TEST_TMPDIR/config/star.yaml:1:1: is wrong"
    [[ "$output" == *"The run itself would refuse to begin, for what is said above." ]]
}

@test "JetPack 7.2 wants CUDA 13's bindings; --from and --swap 0 leave out" {
    provision --local --dry-run --jetpack 7.2 --from swap --swap 0 --no-clocks
    ended 0
    says "'cuda-bindings>=13,<14'"
    [[ "$output" != *swapon* && "$output" != *apt-get* && "$output" != *"enable paceline-clocks"* ]]
}

@test "what is refused" {
    provision
    ended 2
    says "Name the board as USER@HOST"
    provision --local nvidia@board
    ended 2
    provision nvidia@board --from nowhere
    ended 2
    says "--from is one of: time packages power"
    provision nvidia@board --swap lots
    ended 2
    provision nvidia@board --swp 1
    ended 2
    says "There is no option --swp"
    provision nvidia@board --swp
    ended 2
    says "There is no option --swp"
    mkdir -p "$BATS_TEST_TMPDIR/config/secrets"
    touch "$BATS_TEST_TMPDIR/config/secrets/ca.key"
    provision nvidia@board --config "$BATS_TEST_TMPDIR/config"
    ended 2
    says "There is no star.yaml in"
    says "ca.key is the key of the certificate authority and must not leave this machine"
    provision nvidia@board --wheel none.whl --dry-run
    ended 2
    says "There is no file none.whl"
    provision nvidia@board other@board
    ended 2
    says "What is 'other@board'?"
}

@test "keys of other machines are warned of" {
    mkdir -p "$BATS_TEST_TMPDIR/config/secrets"
    touch "$BATS_TEST_TMPDIR/config/star.yaml" "$BATS_TEST_TMPDIR/config/secrets"/{deployment,drafter}.key
    topology_checker 0
    provision nvidia@board --dry-run --config "$BATS_TEST_TMPDIR/config"
    [[ "$output" != *warning* ]]
    touch "$BATS_TEST_TMPDIR/config/secrets/chat.key"
    provision nvidia@board --dry-run --config "$BATS_TEST_TMPDIR/config"
    says "warning: secrets/ holds keys of several nodes ("
}

@test "a machine that is no Jetson, and a Jetson with an old release" {
    run "$ROOT/scripts/jetson/on_device.sh"
    ended 2
    says "This is no Jetson"
    echo '# R35 (release), REVISION: 4.1, GCID: 1, BOARD: t186ref' >"$PACELINE_HOST_ROOT/etc/nv_tegra_release"
    run "$ROOT/scripts/jetson/on_device.sh"
    ended 2
    says "Jetson Linux 35.4.1 is here; wanted is 36.4.3 or later (JetPack 6.2) or 39.2 (JetPack 7.2)."
}

@test "power modes go by name, whatever their ids are: Orin Nano, Orin NX, AGX Orin, Thor" {
    modes 15W 25W MAXN_SUPER 7W
    step max step_power
    says "1 changes"
    step 25w step_power
    same "nvpmodel -m 2
nvpmodel -m 1" "$(calls)"
    rm "$PACELINE_HOST_ROOT/etc/nvpmodel.conf" "$FAKE_STATE/calls"
    modes MAXN_SUPER 10W 15W 25W 40W
    step max step_power
    rm "$PACELINE_HOST_ROOT/etc/nvpmodel.conf"
    modes MAXN MODE_15W MODE_30W MODE_50W
    step 30W step_power
    rm "$PACELINE_HOST_ROOT/etc/nvpmodel.conf"
    modes MAXN 120W 90W 70W
    step max step_power
    same "nvpmodel -m 0
nvpmodel -m 2
nvpmodel -m 0" "$(calls)"
}

@test "a power mode that is set already, or to be kept, is no change; one that does not exist is refused with those that do" {
    modes 15W 25W
    step 25W step_power
    says "0 changes"
    step keep step_power
    says "0 changes"
    step 60W step_power
    ended 2
    says "This board has no power mode 60W. It has: 15W 25W"
    same "" "$(calls)"
}

@test "a power mode that needs a restart is told; with --reboot the board restarts" {
    modes MAXN MODE_15W MODE_30W
    touch "$FAKE_STATE/mode-needs-restart"
    step max step_power
    ended 0
    says "power mode MAXN needs a restart of the board: give --reboot"
    same MODE_30W "$(cat "$FAKE_STATE/mode")"
    REBOOT=true step max step_power
    ended 1
    says "Run the same command again when it is back."
    same MAXN "$(cat "$FAKE_STATE/mode")"
}

@test "a bundle without an engine gets one, a bundle with one does not" {
    local bundle="$PACELINE_HOST_ROOT/etc/paceline/bundles/small"
    mkdir -p "$PACELINE_HOST_ROOT/venv/bin"
    cp "$BATS_TEST_DIRNAME/fake_command" "$PACELINE_HOST_ROOT/venv/bin/paceline"
    manifest "$bundle/manifest.json" '"graph.onnx": "1"' ''
    manifest "${bundle/small/other}/manifest.json" '"graph.onnx": "1"' '"x.plan": {}'
    step keep step_engine
    ended 0
    says "1 changes"
    same "paceline engine $bundle" "$(calls)"
}

@test "a manifest that the board has entered its engine in is kept, unless the bundle is another" {
    local sent="$BATS_TEST_TMPDIR/sent/manifest.json" there="$BATS_TEST_TMPDIR/there/manifest.json"
    manifest "$sent" '"graph.onnx": "1"' ''
    manifest "$there" '"graph.onnx": "1", "x.plan": "2"' '"x.plan": {}'
    step keep keeps_engines "$sent" "$there"
    ended 0
    manifest "$sent" '"graph.onnx": "3"' ''
    step keep keeps_engines "$sent" "$there"
    ended 1
    step keep keeps_engines "$sent" "$sent"
    ended 1
}

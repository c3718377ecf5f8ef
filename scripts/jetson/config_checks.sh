# shellcheck shell=bash disable=SC2153 # what is read here is set by the script that sources this
# Sourced by provision_jetson.sh: what is looked at in the folder of --config before it goes to the board.

check_config() {
    local keys
    if [[ ! -f "$CONFIG_DIR/star.yaml" ]]; then
        problem "There is no star.yaml in $CONFIG_DIR: that is the name the service looks for."
    else
        check_topology
    fi
    check_ca_keys
    keys="$(find "$CONFIG_DIR/secrets" -name '*.key' ! -name deployment.key ! -name ca.key -printf '%f ' 2>/dev/null || true)"
    if [[ "$keys" == *" "*" " ]]; then
        warn "secrets/ holds keys of several nodes ($keys): keys init said which of them belong on the board."
    fi
}

# The board checks it as well, but only after the long steps.
check_topology() {
    local found code=0 paceline
    paceline="$(command -v paceline || echo "$REPOSITORY/.venv/bin/paceline")"
    if [[ ! -x "$paceline" ]]; then
        say "Paceline is not installed on this machine: $CONFIG_DIR/star.yaml is checked on the board, in the step service."
        return
    fi
    found="$("$paceline" check "$CONFIG_DIR/star.yaml" 2>&1)" || code=$?
    if [[ $code -eq 2 ]]; then
        problem "$found"
    elif [[ $code -ne 0 ]]; then
        warn "$paceline check ended with $code here, so star.yaml is checked on the board: ${found##*$'\n'}"
    fi
}

# Whoever holds the key of the certificate authority can be any node: it is refused under any name, wherever it lies.
check_ca_keys() {
    local file public authorities
    if ! command -v openssl >/dev/null; then warn "without openssl here the key of the certificate authority is only known by its name, ca.key."; fi
    authorities="$(ca_public_keys)"
    while IFS= read -r -d '' file; do
        public="$(openssl pkey -in "$file" -passin pass: -pubout 2>/dev/null </dev/null || true)"
        if [[ "${file##*/}" == [Cc][Aa].[Kk][Ee][Yy] ]] || [[ -n "$public" && "$authorities" == *"$public"* ]]; then
            problem "$file is the key of the certificate authority and must not leave this machine: move it elsewhere."
        fi
    done < <(find -L "$CONFIG_DIR" -type f \( -iname ca.key -o -size -256k -exec grep -q 'PRIVATE KEY-----' '{}' ';' \) -print0 2>/dev/null)
}

# ca_public_keys: of each certificate in the folder that may sign others.
ca_public_keys() {
    local file rest certificate begin="-----BEGIN CERTIFICATE-----" end="-----END CERTIFICATE-----"
    while IFS= read -r -d '' file; do
        rest="$(tr -d '\0' <"$file")"
        while [[ "$rest" == *"$begin"*"$end"* ]]; do
            rest="${rest#*"$begin"}"
            certificate="$begin${rest%%"$end"*}$end"
            rest="${rest#*"$end"}"
            if [[ "$(openssl x509 -noout -ext basicConstraints <<<"$certificate" 2>/dev/null)" == *CA:TRUE* ]]; then
                openssl x509 -noout -pubkey <<<"$certificate"
            fi
        done
    done < <(find -L "$CONFIG_DIR" -type f -size -256k -exec grep -q -e "$begin" '{}' ';' -print0 2>/dev/null)
}

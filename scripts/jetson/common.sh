# shellcheck shell=bash disable=SC2034 # what is set here is read by the scripts that source this
# Sourced by flash_jetson.sh, provision_jetson.sh and on_device.sh: messages, the log, and commands that are run, or only
# printed in a dry run. Messages go to stderr, the commands of a dry run to stdout.

DRY_RUN=false
LOG=/dev/null
HIDE_AFTER="" # an option whose value is never shown
PROBLEMS=()
WOULD_REFUSE=false # in a dry run

say() {
    printf '%s\n' "$*" >&2
    printf '%s\n' "$*" >>"$LOG"
}

warn() { say "warning: $*"; }

# fail TEXT: something went wrong (exit 1). wrong TEXT: the user's input is wrong (exit 2).
fail() {
    say "$*"
    exit 1
}

wrong() {
    say "$*"
    exit 2
}

# problem TEXT: noted, so that all of them are told at once by stop_on_problems.
problem() { PROBLEMS+=("$*"); }

stop_on_problems() {
    local text
    [[ ${#PROBLEMS[@]} -gt 0 ]] || return 0
    for text in "${PROBLEMS[@]}"; do
        if $DRY_RUN; then say "would refuse: $text"; else say "$text"; fi
    done
    PROBLEMS=() WOULD_REFUSE=true
    if ! $DRY_RUN; then exit 2; fi
}

# The last line of a dry run, whose exit code is 0 either way.
end_dry_run() {
    if $WOULD_REFUSE; then
        say "A dry run: nothing was changed. The run itself would refuse to begin, for what is said above."
    else
        say "A dry run: nothing was changed."
    fi
}

# needs_value OPTION [VALUE…]: refuses an option that is the last word, or takes another option for its value.
needs_value() {
    if [[ $# -lt 2 || "$2" == -* ]]; then wrong "$1 needs a value; see --help."; fi
    if [[ "$2" == *[[:cntrl:]]* ]]; then wrong "The value of $1 must not have line ends or other control characters in it."; fi
}

# needs_number OPTION VALUE LEAST MOST: a whole number, without leading zeros, which bash would read as octal.
needs_number() {
    if [[ ! "$2" =~ ^(0|[1-9][0-9]{0,8})$ ]] || [[ "$2" -lt "$3" || "$2" -gt "$4" ]]; then
        wrong "$1 is a whole number from $3 to $4; it is '$2'."
    fi
}

# The command as one would type it, with the value of $HIDE_AFTER hidden: its first occurrence, whatever the value is.
quoted() {
    local word line="" hide="$HIDE_AFTER" before=""
    for word in "$@"; do
        if [[ -n "$hide" && "$before" == "$hide" ]]; then
            word="********" hide=""
        elif [[ ! "$word" =~ ^[A-Za-z0-9_./:=@%+,-]+$ ]]; then
            word="${word@Q}"
        fi
        line+="${line:+ }$word" before="$word"
    done
    printf '%s' "$line"
}

# run COMMAND…: run and logged, or printed in a dry run. A failure of any kind is 1, as 2 is for the user's input.
run() {
    if $DRY_RUN; then
        printf '%s\n' "$(quoted "$@")"
        return
    fi
    say "+ $(quoted "$@")"
    # stdin stays that of the script; what the command prints is shown and logged.
    "$@" 2>&1 | tee -a "$LOG" || return 1
}

# as_root COMMAND…: run with sudo, unless this is root already.
as_root() {
    if $DRY_RUN || [[ $EUID -ne 0 ]]; then
        run sudo "$@"
    else
        run "$@"
    fi
}

# start_log FOLDER NAME: everything said from here on is also in FOLDER/NAME-TIME.log.
start_log() {
    if $DRY_RUN; then return; fi
    mkdir -p "$1" || fail "Cannot make $1 for the log; name another folder with --state-dir."
    LOG="$1/$2-$(date +%Y%m%d-%H%M%S).log"
    (umask 077 && : >"$LOG")
}

# confirm WORD QUESTION: goes on only when WORD is typed (or with --yes).
confirm() {
    local answer=""
    if $DRY_RUN || $YES; then return; fi
    printf '%s\nType %s to go on: ' "$2" "$1" >&2
    read -r answer || true
    if [[ "$answer" != "$1" ]]; then
        wrong "Not confirmed: nothing was written. Type $1 when asked, or give --yes."
    fi
}

# one_of WORD CHOICE…: whether WORD is one of the choices.
one_of() {
    local word="$1" choice
    shift
    for choice in "$@"; do
        [[ "$choice" != "$word" ]] || return 0
    done
    return 1
}

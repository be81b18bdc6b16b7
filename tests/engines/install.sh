#!/usr/bin/env bash
# Install what the tests in tests/engines need, and print the folders whose tests can run, one a line.
#
#   tests/engines/install.sh          as root, with apt: install the packages that are missing
#   tests/engines/install.sh --check  install nothing
#
# A folder lists the commands that it runs, and their Debian packages, in its file `needs`; a folder without
# this file needs nothing. Everything for people goes to stderr. The exit code is 1 only if apt failed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

POLICY=/usr/sbin/policy-rc.d

say() { echo "engines: $*" >&2; }

# Print the packages of the commands that a folder lists and this machine lacks.
missing_for() {
    local command package
    [ -e "$1/needs" ] || return 0
    while read -r command package; do
        case $command in '' | '#'*) continue ;; esac
        PATH=$PATH:/usr/sbin:/sbin command -v "$command" >/dev/null || echo "$package"
    done <"$1/needs"
}

forbid_daemons() {
    # The tests start daemons of their own; a file that is already there is the owner's, and stays.
    [ -e "$POLICY" ] && return
    printf '#!/bin/sh\nexit 101\n' >"$POLICY"
    chmod +x "$POLICY"
    trap 'rm -f "$POLICY"' EXIT
}

install() {
    say "installing $*"
    forbid_daemons
    # Another apt may be at work: wait for it instead of failing.
    local apt=(env DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=300) log
    log=$(mktemp)
    if ! { "${apt[@]}" update && "${apt[@]}" install -y --no-install-recommends "$@"; } >"$log" 2>&1; then
        cat "$log" >&2
        rm -f "$log"
        exit 1
    fi
    rm -f "$log"
}

folders=()
for folder in tests/engines/*/; do
    compgen -G "${folder}test_*.py" >/dev/null && folders+=("${folder%/}")
done

missing=$(for folder in "${folders[@]}"; do missing_for "$folder"; done | sort -u)
if [ -n "$missing" ] && [ "${1:-}" != --check ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    # shellcheck disable=SC2086  # one word for each package
    install $missing
fi

for folder in "${folders[@]}"; do
    missing=$(missing_for "$folder" | sort -u | tr '\n' ' ')
    if [ -z "$missing" ]; then
        echo "$folder"
    else
        say "the tests in $folder do not run: missing ${missing% }"
        say "  on Debian or Ubuntu, as root: apt-get install --no-install-recommends ${missing% }"
    fi
done

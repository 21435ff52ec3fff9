#!/usr/bin/env bash
# Builds the wheel and the source distribution, and installs each into an empty environment, like users.
#
#   scripts/check_dist.sh                  with every available Python from 3.11 to 3.13
#   scripts/check_dist.sh python3.12       with this one
#
# VENV  the virtual environment with the tools "build" and "twine" (default: .venv in the repository)
#
# The extra "vllm" is not checked here, because the tests run with vLLM's CPU package.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

TOOLS=$(realpath -m "${VENV:-.venv}")/bin/python
EXTRAS=(mooncake redis s3 zstd aead cli plot)

main() {
    local python pythons=("$@")
    SCRATCH=$(mktemp -d)
    trap 'rm -rf "$SCRATCH"' EXIT
    ((${#pythons[@]})) || pythons=(python3.11 python3.12 python3.13)

    "$TOOLS" -m build --outdir "$SCRATCH/dist" . >"$SCRATCH/log" 2>&1 || fail "the build failed"
    "$TOOLS" -m twine check --strict "$SCRATCH"/dist/*
    WHEEL=$(echo "$SCRATCH"/dist/*.whl)
    contents

    local tried=0
    for python in "${pythons[@]}"; do
        if ! "$python" -c 'import venv, ensurepip' 2>/dev/null; then
            echo "dist: no $python here, not tried" >&2
            continue
        fi
        installed "$python" "$WHEEL" base
        ((tried++)) || every_way "$python"
    done
    ((tried)) || fail "no Python to try it with"
}

# every_way PYTHON: each extra alone, and the source distribution.
every_way() {
    local extra
    for extra in "${EXTRAS[@]}"; do
        installed "$1" "${WHEEL}[$extra]" "$extra"
    done
    installed "$1" "$(echo "$SCRATCH"/dist/*.tar.gz)" base
}

# contents: the package, its types and its license, and nothing of tests or benchmarks.
contents() {
    "$TOOLS" - "$WHEEL" <<'PY'
import sys
import zipfile

names = zipfile.ZipFile(sys.argv[1]).namelist()
strange = [name for name in names if not name.startswith("kvstore/") and ".dist-info/" not in name]
assert not strange, strange
assert "kvstore/py.typed" in names
assert any(name.endswith("/LICENSE") for name in names)
PY
}

# installed PYTHON WHAT EXTRA
installed() {
    local venv=$SCRATCH/venv
    rm -rf "$venv"
    "$1" -m venv --without-pip "$venv"
    "$TOOLS" -m pip --python "$venv/bin/python" install --quiet --no-compile --disable-pip-version-check --no-input "$2" >"$SCRATCH/log" 2>&1 ||
        fail "$2 can't be installed with $1"
    "$TOOLS" -m pip --python "$venv/bin/python" check >"$SCRATCH/log" || fail "$2 with $1: what was installed does not go together"
    # Run in another directory, so that the installed package is imported and not the repository.
    (cd "$SCRATCH" && PATH=$venv/bin:$PATH "$venv/bin/python" -W error - "$3") <scripts/check_installed.py ||
        fail "$2 with $1 does not work"
    echo "dist: $("$1" -V), $(basename "$2"): works"
}

fail() {
    tail -n 30 "$SCRATCH/log" >&2
    echo "dist: $1" >&2
    exit 1
}

main "$@"

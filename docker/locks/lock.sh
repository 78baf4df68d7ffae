#!/usr/bin/env bash
# Compile the locks of what only the images hold: DALI for both stacks, torch with CUDA 13, the MLflow server, matching
# alone. Needs uv and a package index that has torch's CUDA build. Run it after `make lock`; it keeps to the versions
# found there. Names after it compile these alone: docker/locks/lock.sh match
set -euo pipefail
cd "$(dirname "$0")"

only=("$@")

compile() { # name, python version, lock of the stack, further constraints
    [ ${#only[@]} -eq 0 ] || [[ " ${only[*]} " == *" $1 "* ]] || return 0
    uv pip compile --quiet --python-platform x86_64-manylinux_2_31 --generate-hashes --no-emit-index-url \
        --custom-compile-command docker/locks/lock.sh --python-version "$2" -c "../../requirements/$3.lock" \
        "${@:4}" "$1.in" -o "$1.lock"
}

compile pip 3.9.2 cu111
compile dali-cu111 3.9.2 cu111
compile dali-modern 3.11 modern
compile torch-modern 3.11 modern
compile mlflow 3.11 modern
compile match 3.11 modern -c ../../requirements/modern-dev.lock

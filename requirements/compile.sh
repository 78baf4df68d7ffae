#!/usr/bin/env bash
# Compile same.in and dev.in into the hash locks of both stacks, extras.in into one of the modern stack (`make lock`).
# Needs uv and a package index.
# Existing pins are kept; `requirements/compile.sh --upgrade` takes newer ones where the .in files allow it.
# TORCH_FIND_LINKS names a folder with the CPU file of torch 2.13.0; without it uv asks torch's own CPU index.
set -euo pipefail
cd "$(dirname "$0")/.."

common=(--python-platform x86_64-manylinux_2_31 --generate-hashes --no-emit-index-url --no-emit-find-links
    --no-emit-package torch --custom-compile-command "make lock" --quiet)
# The CPU build of torch, so that the lock does not hold the CUDA libraries, which come with torch where wanted.
if [ -n "${TORCH_FIND_LINKS:-}" ]; then
    cpu=(--find-links "$TORCH_FIND_LINKS")
else
    cpu=(--torch-backend cpu)
fi

compile() { # stack, python version, further options
    local stack=$1 version=$2
    shift 2
    uv pip compile "${common[@]}" "$@" --python-version "$version" requirements/same.in \
        -o "requirements/$stack.lock"
    uv pip compile "${common[@]}" --python-version "$version" -c "requirements/$stack.lock" requirements/dev.in \
        -o "requirements/$stack-dev.lock"
}

compile modern 3.11 "${cpu[@]}" "$@"
uv pip compile "${common[@]}" "${cpu[@]}" --python-version 3.11 -c requirements/same.in -c requirements/modern.lock \
    -c requirements/modern-dev.lock requirements/extras.in -o requirements/modern-extras.lock
# 3.9.2 and not 3.9: cryptography excludes 3.9.0 and 3.9.1, and uv reads 3.9 as 3.9.0.
compile cu111 3.9.2 "$@"

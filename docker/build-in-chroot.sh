#!/usr/bin/env bash
# Run the steps of the Dockerfile where there is no container engine and no GPU, and try the image:
#   docker/build-in-chroot.sh STACK build        STACK: cu111, modern, match or mlflow
#   docker/build-in-chroot.sh cu111|modern run WORKSPACE [COMMAND ...]     the entrypoint, as `docker run` would
#   docker/build-in-chroot.sh match run PHOTOS [ARGUMENTS]                 the same, of `superglue-match`
#   docker/build-in-chroot.sh STACK check        says why nothing can be built here; nothing, if it can
#   docker/build-in-chroot.sh STACK built        exits with 0 when the image is there
#   docker/build-in-chroot.sh STACK size         of the image above its base system, in MB
#   docker/build-in-chroot.sh STACK prune        removes what newer builds have replaced
# buildah with chroot isolation on a Debian of the same C library generation and the same Python packages stands in
# for the base image (Ubuntu 20.04 = Debian 11, glibc 2.31); torch comes from the package index (a build that runs on
# the CPU) in place of the CUDA one, or by its hash from the folder PIP_FIND_LINKS. Needs root, and: apt-get install
# buildah debootstrap crun. It cannot show --gpus, --shm-size and ports. ROOTS and STORE name folders for the base systems and the images.
set -euo pipefail
cd "$(dirname "$0")/.."

stack=$1
shift
ROOTS=${ROOTS:-/var/tmp/superglue-roots}
STORE=${STORE:-/var/tmp/superglue-images}
MIRROR=${MIRROR:-http://deb.debian.org/debian}
image=localhost/superglue-sift:$stack
export BUILDAH_ISOLATION=chroot STORAGE_DRIVER=overlay

case $stack in
    cu111) suite=bullseye base_arg=BASE_IMAGE ;;
    modern | match) suite=bookworm base_arg=MODERN_BASE_IMAGE ;;
    mlflow) suite=bookworm base_arg=BASE_IMAGE ;;
    *) echo "error: no stack $stack: cu111, modern, match or mlflow" >&2 && exit 2 ;;
esac
standin=localhost/standin:$stack # three share a suite, not the folder of wheels

bud() { buildah --root "$STORE/root" --runroot "$STORE/run" "$@"; }

# Why this machine cannot build; nothing when it can.
obstacle() {
    local tool work
    [ "$(id -u)" = 0 ] || { echo "buildah's chroot isolation needs root" && return; }
    for tool in buildah debootstrap; do
        command -v "$tool" >/dev/null || { echo "no $tool here (apt-get install buildah debootstrap crun)" && return; }
    done
    unshare --mount true 2>/dev/null || { echo "nothing can be mounted here, which chroot isolation needs" && return; }
    mkdir -p "$STORE"
    work=$(bud from scratch 2>&1) || { echo "no image can be kept in $STORE: ${work##*$'\n'}" && return; }
    bud rm "$work" >/dev/null
}

# The stand-in carries what this machine's pip needs (certificates, a folder of wheels), so that the Dockerfile itself
# stays as it is elsewhere.
own_wheel() { compgen -G "${PIP_FIND_LINKS:-/nowhere}/torch-*.whl" >/dev/null; }

make_standin() {
    local certificates=${PIP_CERT:-${SSL_CERT_FILE:-/etc/ssl/certs/ca-certificates.crt}} work
    mkdir -p "$ROOTS"
    [ -f "$ROOTS/$suite.done" ] || {
        rm -rf "${ROOTS:?}/$suite"
        debootstrap --variant=minbase "$suite" "$ROOTS/$suite" "$MIRROR" >"$ROOTS/$suite.log" || {
            tail -n 3 "$ROOTS/$suite.log"
            echo "error: no $suite from $MIRROR (MIRROR names another, once it has moved to archive.debian.org)" >&2
            return 1
        }
        touch "$ROOTS/$suite.done"
    }
    mkdir -p "$ROOTS/$suite/ci/wheels"
    cp "$certificates" "$ROOTS/$suite/ci/ca.crt"
    case $stack in modern | match) ! own_wheel || cp "$PIP_FIND_LINKS"/torch-*.whl "$ROOTS/$suite/ci/wheels/" ;; esac
    work=$(bud from scratch)
    bud add -q "$work" "$ROOTS/$suite" / >/dev/null
    bud config --env PIP_CERT=/ci/ca.crt --env PIP_FIND_LINKS=/ci/wheels --env PIP_DEFAULT_TIMEOUT=180 "$work"
    bud commit -q "$work" "$standin" >/dev/null
    bud rm "$work" >/dev/null
}

build() {
    bud inspect --type image "$standin" >/dev/null 2>&1 || make_standin
    local lock=requirements/torch.in options
    # The index's torch 2 wants the CUDA packages of the full lock, unless this machine has a build for the CPU.
    [ "$stack" != modern ] || own_wheel || lock=docker/locks/torch-modern.lock
    [ "$stack" != match ] || lock=docker/locks/torch-match.lock
    options=(--target "$stack" --build-arg "TORCH_LOCK=$lock"
        --build-arg "VCS_REF=$(git rev-parse HEAD 2>/dev/null || echo unknown)")
    [ "$stack" != mlflow ] || options=(-f docker/mlflow/Dockerfile)
    [ "$stack" != match ] || ! own_wheel || options+=(--build-arg TORCH_INDEX=)
    bud bud --pull-never --layers --quiet=false -t "$image" --build-arg "$base_arg=$standin" "${options[@]}" .
}

# A container of the image, removed at the end.
container() {
    work=$(bud from --pull-never "$image")
    trap 'bud rm "$work" >/dev/null' EXIT
}

run() {
    local folder status=0 place=/workspace command=(python /opt/superglue/docker/entrypoint.py)
    [ "$stack" != match ] || place=/photos command=(python -m superglue_sift)
    folder=$(realpath "$1")
    shift
    container
    bud run --user "${RUN_USER:-1000:1000}" --volume "$folder:$place" "$work" -- tini -s -- "${command[@]}" "$@" || status=$?
    return "$status"
}

size() {
    local name
    for name in "$image" "$standin"; do
        bud images --format '{{.Size}}' "$name"
    done | awk '{size[NR] = $1 * ($2 == "GB" ? 1000 : 1)} END {print int(size[1] - size[2] + 0.5)}'
}

what=${1:-build}
[ $# -eq 0 ] || shift
reason=$(obstacle)
[ -z "$reason" ] || { echo "SKIP: $reason" && exit 0; }
case $what in
    check) ;;
    built) bud inspect --type image "$image" >/dev/null 2>&1 ;;
    prune) bud rmi --prune >/dev/null 2>&1 || true ;;
    build) build ;;
    run) run "$@" ;;
    size) size ;;
    *) echo "error: $what: build, run, check, built, size or prune" >&2 && exit 2 ;;
esac

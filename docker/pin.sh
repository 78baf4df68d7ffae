#!/usr/bin/env bash
# The digests of the base images, in Dockerfile, docker/mlflow/Dockerfile and docker/compose.shared.yaml, against those
# that the registries give for the same tags now.
#   docker/pin.sh            one line for each image; exit code 1 when there is a newer one, or one without a digest
#   docker/pin.sh --write    the newer ones go into the files; build and try the images before they are committed
# Asks docker buildx, else skopeo, else crane; exit code 2 when none is here or a registry does not answer.
set -euo pipefail
cd "$(dirname "$0")/.."

FILES=(Dockerfile docker/mlflow/Dockerfile docker/compose.shared.yaml)
PINNED='[a-z0-9][a-z0-9./-]*:[A-Za-z0-9._-]+@sha256:[0-9a-f]{64}'

# The digest of a multi-platform image is that of its index, which is what a build on any machine asks for.
digest() { # NAME:TAG
    if docker buildx version >/dev/null 2>&1; then
        docker buildx imagetools inspect --format '{{.Manifest.Digest}}' "$1"
    elif command -v skopeo >/dev/null; then
        skopeo inspect --raw "docker://$(full "$1")" | sha256sum | sed -E 's/^([0-9a-f]+).*/sha256:\1/'
    elif command -v crane >/dev/null; then
        crane digest "$1"
    else
        echo "error: none of docker buildx, skopeo and crane is here" >&2
        return 2
    fi
}

# skopeo knows no short names: debian:12 is docker.io/library/debian:12.
full() {
    case $1 in
        *.*/*) echo "$1" ;;
        */*) echo "docker.io/$1" ;;
        *) echo "docker.io/library/$1" ;;
    esac
}

newer=0
mapfile -t images < <({ grep -ohE "$PINNED" "${FILES[@]}"; sed -nE 's/^ARG [A-Z_]*BASE_IMAGE=([^@]+)$/\1@none/p' "${FILES[@]}"; } | sort -u)
for image in "${images[@]}"; do
    tag=${image%@*} old=${image#*@}
    now=$(digest "$tag") || now=
    [[ "$now" =~ ^sha256:[0-9a-f]{64}$ ]] || { echo "error: no digest of $tag could be had" >&2 && exit 2; }
    if [ "$now" = "$old" ]; then
        echo "$tag: $old, as its tag"
        continue
    fi
    newer=1
    echo "$tag: $old; its tag is now $now"
    [ "${1:-}" != --write ] || sed -i "s|$tag@$old|$tag@$now|; s|=$tag$|=$tag@$now|" "${FILES[@]}"
done
[ "${1:-}" = --write ] || exit "$newer"

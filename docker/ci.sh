#!/usr/bin/env bash
# What CI does for the images. Without a change to them since the parent commit the tests of tests/repository/test_docker.py
# are enough; with one (or with --always) all targets are built and tried, step by step as the Dockerfile says:
#   build, `repro --preset ci` inside, a stop in the middle of training and the run that goes on from there, an empty mount;
#   for the image that matches alone a pair, a folder and its size.
set -euo pipefail
cd "$(dirname "$0")/.."
export STORE=${STORE:-/var/tmp/superglue-images}

parts=(Dockerfile .dockerignore docker requirements/cu111.lock requirements/modern.lock requirements/torch.in)
if [ "${1:-}" != --always ] && git rev-parse -q --verify HEAD~1 >/dev/null && git diff --quiet HEAD~1 -- "${parts[@]}"; then
    echo "SKIP: Dockerfile, docker/ and the locks are those of the parent commit; tests/repository/test_docker.py stands in"
    exit 0
fi
say() { printf '\n=== images: %s\n' "$*"; }

packages() {
    command -v buildah >/dev/null && command -v debootstrap >/dev/null && return
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || return 0
    # Without them the builds are skipped, with the reason.
    apt-get update -qq || true
    apt-get install -y -qq -o DPkg::Lock::Timeout=300 --no-install-recommends buildah debootstrap crun || true
}

# Four images and two base systems: about 13 GB, 20 while they are made. What is kept from the last time counts.
room() {
    local need=20 free
    ! docker/build-in-chroot.sh cu111 built || ! docker/build-in-chroot.sh modern built || need=10
    free=$(df --output=avail -B1G "$STORE" | tail -n 1)
    [ "$free" -ge "$need" ] || echo "SKIP: $STORE has $((free)) GB free, the builds need $need (STORE names another folder)"
}

# A workspace of our own, as a person would mount theirs.
workspace() {
    rm -rf "$1"
    git clone -q . "$1"
    chown -R 1000:1000 "$1"
}

# Two photographs and what the command leaves of them, with no more rights and no other user than a person gives it.
try_matching() {
    local place size code=0
    place=$(mktemp -d)
    .venv/bin/python - "$place" <<'END' || return 1
import sys, cv2, numpy
from skimage import data
photo = data.coffee()[:, :, ::-1]
turned = cv2.warpPerspective(photo, numpy.array([[0.8, -0.15, 60], [0.12, 0.85, 10], [1e-4, 0, 1]]), (600, 400))
for name, image in (("a", photo), ("b", turned), ("c", data.rocket()[:, :, ::-1])):
    assert cv2.imwrite(f"{sys.argv[1]}/{name}.jpg", image)
END
    chown -R 4321:4321 "$place"
    say "match: a pair, a folder"
    RUN_USER=4321:4321 docker/build-in-chroot.sh match run "$place" a.jpg b.jpg --out m.png --json m.json &&
        RUN_USER=4321:4321 docker/build-in-chroot.sh match run "$place" folder . --out-dir found --colmap database.db || code=$?
    [ "$code" != 0 ] || [ "$(stat -c %u "$place"/{m.png,m.json,database.db,found/a_b_matches.npz} | sort -u)" = 4321 ] || code=1
    rm -rf "$place"
    size=$(docker/build-in-chroot.sh match size)
    echo "superglue-match has $size MB above its base system, which has 80 as debian:bookworm-slim"
    [ "$size" -lt 1350 ] && return "$code"
}

try_image() { # stack
    local place code=0
    place=$(mktemp -d)
    workspace "$place/clone"
    say "$1: repro --preset ci"
    docker/build-in-chroot.sh "$1" run "$place/clone" repro --preset ci
    [ -s "$place/clone/models/superglue.safetensors" ]
    [ "$(stat -c %u "$place/clone/models/superglue.safetensors")" = 1000 ]
    say "$1: SIGTERM in the middle of training, and the next run"
    docker/stop-and-go.sh "$1" "$place/clone" || code=$?
    [ "$code" != 0 ] || empty_mount "$1" "$place/empty" || code=$?
    rm -rf "$place"
    return "$code"
}

empty_mount() { # stack, folder
    install -d -o 1000 -g 1000 "$2"
    say "$1: an empty folder, filled; and what another image left, refused"
    docker/build-in-chroot.sh "$1" run "$2" repro fetch || return 1
    [ -s "$2/README.md" ] && [ -s "$2/dvc.lock" ] && [ -s "$2/data/images/manifest.csv" ] || return 1
    echo "# older" >>"$2/pipeline/launch.py"
    ! docker/build-in-chroot.sh "$1" run "$2" repro
}

packages
say "hadolint"
.venv/bin/hadolint --ignore DL3008 Dockerfile docker/mlflow/Dockerfile
say "is there a way to build?"
skip=$(docker/build-in-chroot.sh cu111 check)
[ -n "$skip" ] || skip=$(room)
[ -z "$skip" ] || { echo "$skip" && exit 0; }
echo "yes, in $STORE"
build() { # stack
    local begin=$SECONDS
    say "$1: build"
    docker/build-in-chroot.sh "$1" build >"$STORE/build-$1.log" 2>&1 || {
        tail -n 40 "$STORE/build-$1.log"
        echo "error: the build of $1 failed: $STORE/build-$1.log" >&2
        return 1
    }
    echo "built in $((SECONDS - begin)) s"
}

build mlflow
build match
try_matching
for stack in cu111 modern; do
    build "$stack"
    try_image "$stack"
done
docker/build-in-chroot.sh cu111 prune
say "passed in $((SECONDS / 60)) min"

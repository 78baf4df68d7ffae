#!/usr/bin/env bash
# In an image built by build-in-chroot.sh: start training in a workspace, send SIGTERM to the container's first process
# as `docker stop` does, look for the checkpoint, and let the next run go on from it.
#   docker/stop-and-go.sh cu111|modern WORKSPACE
set -euo pipefail
cd "$(dirname "$0")/.."
stack=$1
place=$(realpath "$2")
log=$(mktemp)
steps=2000

fail() {
    ! kill -0 "$runner" 2>/dev/null || kill -TERM "$(entry)" || true
    tail -n 30 "$log"
    echo "error: $*" >&2
    exit 1
}

# chroot isolation shares our process ids, and the workspace's lock names the entrypoint.
entry() { sed -E 's/.*process ([0-9]+).*/\1/' "$place/.dvc/tmp/workspace.lock"; }

start() {
    docker/build-in-chroot.sh "$stack" run "$place" repro >"$log" 2>&1 &
    runner=$!
}

# Wait for something to be so, while the run goes on.
until_true() {
    local end=$((SECONDS + 600))
    until "$@"; do
        [ "$SECONDS" -lt "$end" ] && kill -0 "$runner" 2>/dev/null || return 1
        sleep 0.5
    done
}

rm -rf "$place/checkpoints" "$place/reports/train"
# Enough steps that the stop falls into the middle, and no checkpoint by itself before it.
sed -i -E "s/^(  steps:) [0-9]+/\1 $steps/; s/^(  (save|val)_every:) [0-9]+/\1 100000/" "$place/params.yaml"
start
until_true grep -q "train: .* [1-9][0-9]*/$steps " "$log" || fail "training did not begin"
before=$SECONDS
kill -TERM "$(entry)"
code=0
wait "$runner" || code=$?
echo "stopped in $((SECONDS - before)) s with exit code $code"
[ "$code" = 143 ] || fail "exit code $code, not 143"
step=$(find "$place/checkpoints" -name 'step-*.safetensors' | sed -nE 's/.*step-0*([0-9]+)\.safetensors$/\1/p' | sort -n | tail -n 1)
echo "the checkpoint is of step ${step:-none}"
[ -n "$step" ] && [ "$step" -lt "$steps" ] || fail "no checkpoint in the middle"

start
until_true grep "resuming at step" "$log" || fail "the next run did not say that it goes on"
kill -TERM "$(entry)" 2>/dev/null || true
wait "$runner" || true
rm -f "$log"

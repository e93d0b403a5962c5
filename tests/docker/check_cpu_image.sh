#!/usr/bin/env bash
# Build the CPU image without a Docker engine, check its contents, and serve a bundle in it.
# It needs root, buildah, debootstrap, curl and tar, and takes some minutes.
#
#   tests/docker/check_cpu_image.sh BUNDLE [WORK_FOLDER]
#
# MIRROR      Debian mirror for debootstrap, instead of its default
# PIP_CERT    certificate authority of the package index, as in pip's own option
set -euo pipefail
bundle=$(realpath "$1")
work=$(realpath -m "${2:-$(mktemp -d)}")
repository=$(realpath "$(dirname "$0")/../..")
port=18080
image=localhost/aftserve:check
base=localhost/debian-trixie:minbase
mkdir -p "$work"

buildah() {
  command buildah --root "$work/storage" --runroot "$work/run" --storage-driver vfs "$@"
}

say() {
  printf '\n== %s\n' "$*"
}

say "Build a base image of Debian 13, like the official slim images"
if [ ! -d "$work/trixie" ]; then
  debootstrap --variant=minbase trixie "$work/trixie.part" ${MIRROR:+"$MIRROR"} > "$work/debootstrap.log"
  rm -rf "$work"/trixie.part/{var/cache/apt,var/lib/apt/lists,usr/share/{doc,man,locale,info}}/*
  mv "$work/trixie.part" "$work/trixie"
fi
container=$(buildah from scratch)
buildah add -q "$container" "$work/trixie" / > /dev/null
buildah commit -q --rm "$container" "$base" > /dev/null

say "Build the image from its Dockerfile"
volumes=()
if [ -n "${PIP_CERT:-}" ]; then
  printf '[global]\ncert = /etc/ssl/build-ca.crt\n' > "$work/pip.conf"
  volumes=(--volume "$PIP_CERT:/etc/ssl/build-ca.crt:ro" --volume "$work/pip.conf:/etc/pip.conf:ro")
fi
buildah bud --format docker --isolation chroot --network host --build-arg BASE="$base" "${volumes[@]}" \
  -f "$repository/docker/cpu.Dockerfile" -t "$image" "$repository"

say "Check the contents of the image"
container=$(buildah from --pull-never "$image")
root=$(buildah mount "$container")
server=
stop() {
  [ -z "$server" ] || kill "$server" 2> /dev/null || true
  buildah umount "$container" > /dev/null
  buildah rm "$container" > /dev/null
}
trap stop EXIT
du -sh --apparent-size "$root" | cut -f 1
unwanted='.*/([a-z0-9_]+-)*(gcc|g\+\+|cc1|cc1plus|c\+\+|cpp|clang|nvcc|ld|cmake|ninja|pip|torch)(-?[0-9.]+)?'
found=$(find "$root/usr" "$root/opt" -regextype posix-extended -regex "$unwanted" -not -path '*/share/*')
if [ -n "$found" ]; then
  printf 'expected no compiler, torch or installer in the image, got:\n%s\n' "$found"
  exit 1
fi
echo "no compiler, no torch, no pip"
config=$(buildah inspect --type image "$image" | tr -d ' \n')
for entry in '"User":"10001"' '"Healthcheck":' '"8000/tcp"' '"org.opencontainers.image.version":"0'; do
  grep -qF "$entry" <<< "$config" || { echo "the image's configuration lacks $entry"; exit 1; }
done
find "$root/opt" "$root/usr" -xdev -perm -0002 -not -type l | { ! grep . ; } || { echo "every user may write these files"; exit 1; }

# serve NAME COMMAND...: start the server by the command, send a request and stop the server.
serve() {
  local log="$work/$1.log"
  "${@:2}" --host 127.0.0.1 --port $port /bundle > "$log" 2>&1 &
  server=$!
  for _ in $(seq 240); do
    kill -0 $server 2> /dev/null || { cat "$log"; exit 1; }
    ask /readyz > /dev/null 2>&1 && break
    sleep 0.5
  done
  grep -q 'fused kernel' "$log" || { cat "$log"; echo "the server does not use the fused kernels"; exit 1; }
  local answer
  answer=$(ask /infer --json '{"text": "a long document"}')
  echo "$answer"
  grep -q '"label":' <<< "$answer"
  run "$container" -- aftserve health --port $port
  kill -TERM "$(pgrep -f "^/opt/aftserve/bin/python.* --host 127.0.0.1 --port $port")"
  wait "$server" || { cat "$log"; echo "expected the server to exit with 0 after SIGTERM"; exit 1; }
  server=
}

ask() {
  curl --silent --show-error --fail --max-time 30 "http://127.0.0.1:$port$1" "${@:2}"
}

run() {
  buildah run --isolation chroot --network host "$@"
}

say "Serve a bundle in the image as its user"
run "$container" -- python -c 'import os; print("user", os.getuid()); assert os.getuid() == 10001'
run "$container" -- aftserve key alice 60/minute | grep -q 'rate = "60/minute"'
serve server run --volume "$bundle:/bundle:ro" "$container" -- aftserve

say "Serve a bundle with a read-only root and /tmp in memory"
mkdir -p "$root/bundle"
serve read-only unshare --mount bash -euc '
  mount --bind "$0" "$0"
  mount --bind "$1" "$0/bundle"
  for folder in proc dev; do mount --rbind /$folder "$0/$folder"; done
  mount -t tmpfs tmpfs "$0/tmp"
  mount -o remount,bind,ro "$0"
  if touch "$0/opt/written" 2> /dev/null; then echo "expected a read-only root"; exit 1; fi
  exec chroot --userspec 10001:10001 "$0" /usr/bin/env -i PATH=/opt/aftserve/bin:/usr/bin aftserve "${@:2}"
' "$root" "$bundle"

say "All checks passed"

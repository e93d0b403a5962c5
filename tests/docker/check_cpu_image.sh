#!/usr/bin/env bash
# Builds the CPU image without a docker engine, serves a bundle inside it, asks it, stops it, and looks at
# what the image holds. Needs root, buildah, debootstrap, curl and tar; takes some minutes.
#
#   tests/docker/check_cpu_image.sh BUNDLE [WORK_FOLDER]
#
# MIRROR      of Debian (default: deb.debian.org)
# PIP_CERT    a certificate authority that the package index needs, as pip itself takes it
set -euo pipefail
bundle=$(realpath "$1")
work=$(realpath -m "${2:-$(mktemp -d)}")
repository=$(realpath "$(dirname "$0")/../..")
mirror=${MIRROR:-http://deb.debian.org/debian}
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

say "A Debian 13 to build on, as the slim images are made"
if [ ! -d "$work/trixie" ]; then
  debootstrap --variant=minbase trixie "$work/trixie.part" "$mirror" > "$work/debootstrap.log"
  rm -rf "$work"/trixie.part/{var/cache/apt,var/lib/apt/lists,usr/share/{doc,man,locale,info}}/*
  mv "$work/trixie.part" "$work/trixie"
fi
container=$(buildah from scratch)
buildah add -q "$container" "$work/trixie" / > /dev/null
buildah commit -q --rm "$container" "$base" > /dev/null

say "The image, by its Dockerfile"
volumes=()
if [ -n "${PIP_CERT:-}" ]; then
  printf '[global]\ncert = /etc/ssl/build-ca.crt\n' > "$work/pip.conf"
  volumes=(--volume "$PIP_CERT:/etc/ssl/build-ca.crt:ro" --volume "$work/pip.conf:/etc/pip.conf:ro")
fi
buildah bud --format docker --isolation chroot --network host --build-arg BASE="$base" "${volumes[@]}" \
  -f "$repository/docker/cpu.Dockerfile" -t "$image" "$repository"

say "What it holds"
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
if found=$(find "$root" -xdev \( -name 'gcc*' -o -name 'g++*' -o -name 'cc1*' -o -name 'c++' -o -name 'clang*' -o -name 'nvcc*' \
    -o -name 'cmake' -o -name 'ninja' -o -name 'torch' -o -name 'pip' \) \( -type f -o -type l -o -type d \) \
    -not -path '*/share/*' -not -path '*/include/*' -print | grep -v '/usr/lib/.*libgcc'); [ -n "$found" ]; then
  printf 'a compiler, torch or an installer is in the image:\n%s\n' "$found"
  exit 1
fi
echo "no compiler, no torch, no pip"
config=$(buildah inspect --type image --format '{{json .Docker.Config}}' "$image")
for said in '"User":"10001"' '"Healthcheck":' '"8080/tcp"'; do
  grep -qF "$said" <<< "$config" || { echo "the image's configuration lacks $said: $config"; exit 1; }
done
find "$root/opt" "$root/usr" -xdev -perm -0002 -not -type l | { ! grep . ; } || { echo "all may write there"; exit 1; }

say "The server inside it, as its user"
buildah run --isolation chroot --network host --volume "$bundle:/bundle:ro" "$container" -- \
  aftserve --host 127.0.0.1 --port $port /bundle > "$work/server.log" 2>&1 &
server=$!
ask() {
  curl --silent --show-error --fail --max-time 30 "http://127.0.0.1:$port$1" "${@:2}"
}
for _ in $(seq 120); do
  kill -0 $server 2> /dev/null || { cat "$work/server.log"; exit 1; }
  ask /readyz > /dev/null 2>&1 && break
  sleep 0.5
done
grep -q 'fused kernel' "$work/server.log" || { cat "$work/server.log"; echo "the kernels are not used"; exit 1; }
answer=$(ask /infer --json '{"text": "a long document"}')
echo "$answer"
grep -q '"label":' <<< "$answer"
buildah run --isolation chroot --network host "$container" -- python -c \
  "import urllib.request as r; print(r.urlopen('http://127.0.0.1:$port/healthz', timeout=2).read().decode())"
buildah run --isolation chroot "$container" -- python -c 'import os; print("runs as user", os.getuid()); assert os.getuid() == 10001'
kill -TERM "$(pgrep -f "^/opt/aftserve/bin/python.* --port $port /bundle")"
wait "$server" || { echo "it did not stop as it should"; exit 1; }
server=
echo "stopped"

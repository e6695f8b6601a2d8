#!/bin/sh
# install_dependencies.sh [--tests]: what a bare Debian 12 lacks to build Millrace and to import a model; with --tests, what the
# tests need besides. Needs root or sudo for apt. Python packages go into build/venv, nowhere else.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
packages="ca-certificates git g++ cmake ninja-build lld ccache libgrpc++-dev libprotobuf-dev protobuf-compiler protobuf-compiler-grpc
  libabsl-dev prometheus-cpp-dev libpcre2-dev libutf8proc-dev nlohmann-json3-dev zlib1g-dev libssl-dev libc-ares-dev libre2-dev
  libgtest-dev libgmock-dev libbenchmark-dev python3 python3-venv"
[ "${1:-}" = --tests ] && packages="$packages clang-14 clang-format-14 libclang-rt-14-dev dpkg-dev"
missing=$(dpkg-query -W -f='${db:Status-Status} ${Package}\n' $packages 2>/dev/null | awk '$1=="installed"{print $2}' | sort > /tmp/millrace-have.$$;
  for p in $packages; do echo "$p"; done | sort | comm -23 - /tmp/millrace-have.$$; rm -f /tmp/millrace-have.$$)
if [ -n "$missing" ]; then
  sudo=; [ "$(id -u)" = 0 ] || sudo=sudo
  $sudo apt-get update -qq
  # shellcheck disable=SC2086
  DEBIAN_FRONTEND=noninteractive $sudo apt-get install -y -qq --no-install-recommends $missing > /dev/null
fi
venv=$root/build/venv
[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
wanted="numpy==2.2.6"
[ "${1:-}" = --tests ] && wanted="$wanted grpcio==1.85.3 grpcio-tools==1.85.1"
stamp=$venv/installed; [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] || {
  # shellcheck disable=SC2086
  "$venv/bin/pip" install -q --disable-pip-version-check $wanted
  echo "$wanted" > "$stamp"
}

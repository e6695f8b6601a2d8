#!/bin/sh
# install_dependencies.sh [--tests|--deploy]: what a bare Debian 12 lacks to build Millrace and to import a model; with --tests, what
# the tests need besides; with --deploy, also what tests/deploy needs (100 MB: Prometheus, helm, podman). Needs root or sudo for apt.
# Python packages go into build/venv, helm into build/tools, nothing elsewhere. (Under systemd, Debian's prometheus starts itself.)
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
packages="ca-certificates git g++ cmake ninja-build lld ccache libgrpc++-dev libprotobuf-dev protobuf-compiler protobuf-compiler-grpc
  libabsl-dev prometheus-cpp-dev libpcre2-dev libutf8proc-dev nlohmann-json3-dev zlib1g-dev libssl-dev libc-ares-dev libre2-dev
  libgtest-dev libgmock-dev libbenchmark-dev python3 python3-venv"
case ${1:-} in --tests | --deploy) packages="$packages clang-14 clang-format-14 libclang-rt-14-dev dpkg-dev" ;; esac
[ "${1:-}" = --deploy ] && packages="$packages prometheus buildah podman runc uidmap"
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
case ${1:-} in --tests | --deploy) wanted="$wanted grpcio==1.85.3 grpcio-tools==1.85.1 cryptography==48.0.0" ;; esac
[ "${1:-}" = --deploy ] && wanted="$wanted PyYAML==6.0.4 grpcio-health-checking==1.85.1 kubernetes-validate==1.37.0 promql-parser==0.12.0"
stamp=$venv/installed; [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] || {
  # shellcheck disable=SC2086
  "$venv/bin/pip" install -q --disable-pip-version-check $wanted
  echo "$wanted" > "$stamp"
}
[ "${1:-}" != --deploy ] || "$venv/bin/python" "$root/tests/deploy/fetch_helm.py" "$root/build/tools"

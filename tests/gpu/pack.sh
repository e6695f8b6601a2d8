#!/bin/sh
# pack.sh OUT [FILE…]: packs what run.sh needs (or of the programs only those named) from build/cuda (target gpu_tests) and build/cpu (router and command line; they serve a worker
# of any kind), the fixtures and shared/golden (where it lies beside this clone) into OUT/all.txz. None of it needs a library but the driver's and libc.
set -eu
cd "$(dirname "$0")/../.."
out=$1; shift; work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
[ $# -gt 0 ] || set -- tests/gpu_kernels_test tests/golden_test tests/batch_invariance_test tests/speculation_test bench/gpu_bench bench/gpu_kernels_bench bench/libgpu_timeline.so bin/millrace-worker bin/millrace bin/millrace-router
mkdir -p "$out" "$work/root/tests" "$work/shared/golden/tiny"
cp -r tests/fixtures "$work/root/tests/"
for model in llama-small-hd llama-tiny qwen2-tiny qwen3-tiny qwen3-tiny-untied; do
  [ ! -d "../shared/golden/tiny/$model" ] || cp -r "../shared/golden/tiny/$model" "$work/shared/golden/tiny/"
done
for file in "$@"; do
  from=build/cuda/$file
  case $file in bin/millrace|bin/millrace-router) from=build/cpu/$file ;; esac
  strip -o "$work/$(basename "$file")" "$from"
done
tar -C "$work" -cf - . | xz -T0 -3 > "$out/all.txz"
ls -l "$out/all.txz"

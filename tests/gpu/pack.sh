#!/bin/sh
# pack.sh OUT: packs what engine.sh needs from build/cuda, the fixtures and shared/golden (where it lies beside this clone) into OUT/all.tgz.
set -eu
cd "$(dirname "$0")/../.."
out=$1; work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
mkdir -p "$out" "$work/root/tests" "$work/shared/golden/tiny"
cp -r tests/fixtures "$work/root/tests/"
for model in llama-small-hd llama-tiny qwen2-tiny qwen3-tiny qwen3-tiny-untied; do
  [ ! -d "../shared/golden/tiny/$model" ] || cp -r "../shared/golden/tiny/$model" "$work/shared/golden/tiny/"
done
for file in tests/golden_test tests/batch_invariance_test bench/gpu_bench; do strip -o "$work/$(basename $file)" "build/cuda/$file"; done
tar -C "$work" -czf "$out/all.tgz" .

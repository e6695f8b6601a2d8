#!/bin/sh
# run.sh [FOLDER]: on a machine with a GPU, builds the kernels and their GPU tests with g++ and nvcc alone, runs the tests, then
# compute-sanitizer's memcheck on a reduced set, then the bench. GTEST names a folder with include/ and lib/ where the system has no GoogleTest.
set -u
cd "$(dirname "$0")/../.."
out=${1:-/tmp/millrace-gpu}; mkdir -p "$out"
nvcc=${CUDACXX:-nvcc}; gtest=${GTEST:-/usr}
cuda_flags="-std=c++20 -gencode=arch=compute_90a,code=sm_90a -Werror=all-warnings --expt-relaxed-constexpr -lineinfo -O2 -Xcompiler=-Wall -I. -DMILLRACE_CUDA"
flags="-std=c++20 -O2 -Wall -Wextra -Wshadow -ffp-contract=off -I. -I$gtest/include -DMILLRACE_CUDA"
{
  for f in kernels/cuda/*.cu tests/gpu/*.cu; do
    extra=; grep -q vocabulary.cuh "$f" && extra=-fmad=false
    echo "$nvcc $cuda_flags $extra -Xptxas=-v -c $f -o $out/$(basename "$f").o > $out/$(basename "$f").log 2>&1 || { grep -h error $out/$(basename "$f").log; exit 1; }"
  done
  for isa in portable avx2 avx512; do
    case $isa in avx2) arch="-mavx2 -mfma";; avx512) arch="-mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -Wno-maybe-uninitialized";; *) arch=;; esac
    for f in attention kernels linear rows vocabulary; do
      echo "g++ $flags -O3 -fno-math-errno $arch -DMILLRACE_ISA=$isa -c kernels/cpu/$f.cc -o $out/$isa-$f.o"
    done
  done
  for f in kernels/*.cc kernels/cpu/isa.cc kernels/cpu/ops.cc kernels/cpu/sampling.cc kernels/cpu/threads.cc; do
    echo "g++ $flags -c $f -o $out/$(echo "$f" | tr / -).o"
  done
  for f in tests/gpu/*.cc tests/test_main.cc; do echo "g++ $flags -c $f -o $out/test-$(basename "$f").o"; done
} | xargs -P "$(nproc)" -I{} sh -c '{}' || exit 1
grep -h "spill stores\|Used" "$out"/*.cu.log | grep -v " 0 bytes spill stores" | sort | uniq -c | sort -rn | head -20
objects=$(ls "$out"/*.o | grep -v -e test- -e kernels_bench)
cuda_lib=$(dirname "$(readlink -f "$(command -v "$nvcc")")")/../lib64
libraries="-L$gtest/lib -L$cuda_lib -lcudart_static -lpthread -ldl -lrt"
g++ -o "$out/kernels_test" "$out"/test-*.o $objects -L"$gtest/lib" -lgmock -lgtest $libraries || exit 1
g++ -o "$out/kernels_bench" "$out/kernels_bench.cu.o" $objects $libraries || exit 1
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
timeout 200 "$out/kernels_test" > "$out/test.log" 2>&1; result=$?
grep -E "^\[ +(OK|FAILED)|passed,|Failure" "$out/test.log" | head -60
grep -A12 Failure "$out/test.log" | head -80
[ -n "${ONLY_TESTS:-}" ] && exit $result
timeout 150 "$out/kernels_bench" | tee "$out/bench.log"
timeout 180 compute-sanitizer --tool memcheck --error-exitcode 9 "$out/kernels_test" \
  --gtest_filter="${SANITIZE:-GpuRows.*:GpuAttention.Agrees*:GpuSampling.Forbids*:GpuSampling.GivesTheCpusLog*}" 2>&1 | tail -12
exit $result

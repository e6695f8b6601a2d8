#!/bin/sh
# engine.sh FOLDER [WORKLOAD…]: on a machine with a GPU, runs the model's and the engine's tests there and then gpu_bench. FOLDER holds golden_test,
# batch_invariance_test and gpu_bench of the preset `cuda`; they need no library but the driver's and libc.
set -u
cd "$(dirname "$0")/../.."
bin=$1; shift
export MILLRACE_TEST_DEVICE=cuda
result=0
for test in golden_test batch_invariance_test; do
  timeout 60 "$bin/$test" > "/tmp/$test.log" 2>&1 || result=1
  grep -E "FAILED|passed,|SKIPPED|CUDA|trap|CHECK" "/tmp/$test.log" | head -40
  grep -A8 Failure "/tmp/$test.log" | head -60
done
[ $# -eq 0 ] || timeout 500 "$bin/gpu_bench" "$@" || result=1
exit $result

#!/bin/sh
# run.sh FOLDER PART…: proves and measures on a machine with a GPU what build/cuda and build/cpu hold. FOLDER is an unpacked all.txz of pack.sh.
#   kernels    every op against the CPU, and a row's bits alone and in company
#   memcheck, racecheck   compute-sanitizer over a reduced set of those
#   bench      shares of the measured copy bandwidth, op by op
#   engine     the model's and the engine's tests on the GPU
#   idle       how long the GPU does nothing between steps (w12, w12c)
#   served     W1 through router, worker and client as processes
#   anything else is a workload of gpu_bench
set -u
cd "$(dirname "$0")/../.."
bin=$1; shift
export MILLRACE_SOURCE_DIR="$bin/root" MILLRACE_TEST_DEVICE=cuda
result=0
report() {  # log
  grep -E "^\[ +FAILED|passed,|SKIPPED|CUDA|trap|CHECK|whole paths|Race reported|ERROR SUMMARY|RACECHECK SUMMARY" "$1" | head -60
  grep -A10 Failure "$1" | head -80
}
tested() {  # seconds, program, arguments…
  seconds=$1 log=/tmp/millrace-$(basename "$2").log; shift
  timeout "$seconds" "$@" > "$log" 2>&1; code=$?
  [ $code -eq 0 ] || { result=1; echo "$1: exit $code"; }
  report "$log"
}
sanitized() {  # tool
  tested 150 compute-sanitizer --tool "$1" --error-exitcode 9 "$bin/gpu_kernels_test" --gtest_filter="${SANITIZE:-GpuRows.*:GpuAttention.Agrees*:GpuSampling.Forbids*:GpuSampling.GivesTheCpusLog*}"
}
idle() {
  for workload in w12 w12c; do
    MILLRACE_TIMELINE=graphs CUDA_INJECTION64_PATH=$bin/libgpu_timeline.so timeout 60 "$bin/gpu_bench" $workload || result=1
  done
}
served() {
  model=$(timeout 60 "$bin/gpu_bench" serve) || { result=1; return; }
  cp tests/fixtures/tokenizer/* "$model/"
  "$bin/millrace" up --model "$model" --device cuda --port 0 --max_slots 256 --log_dir /tmp > /tmp/millrace-up.log 2>&1 & up=$!
  for _ in $(seq 600); do grep -q ^ready /tmp/millrace-up.log && break; sleep 0.1; done
  address=$(sed -n 's/^ready //p' /tmp/millrace-up.log)
  for seed in 1 2 3 4; do
    timeout 60 "$bin/millrace" bench --router "$address" --workload trace --trace "$model/w1.jsonl" --max_requests 256 --concurrency 256 --temperature 0.6 --seed $seed || result=1
  done
  kill $up; wait $up; rm -r "$model"
}
workloads=
for part in "$@"; do
  case $part in
    kernels) tested 200 "$bin/gpu_kernels_test" ;;
    memcheck|racecheck) sanitized "$part" ;;
    bench) timeout 150 "$bin/gpu_kernels_bench" || result=1 ;;
    engine) tested 60 "$bin/golden_test"; tested 60 "$bin/batch_invariance_test"; tested 240 "$bin/speculation_test" ;;
    idle|served) "$part" ;;
    *) workloads="$workloads $part" ;;
  esac
done
[ -z "$workloads" ] || timeout "${LIMIT:-500}" "$bin/gpu_bench" $workloads || result=1
exit $result

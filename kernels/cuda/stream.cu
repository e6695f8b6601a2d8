// Opening a GPU, its memory, and copies to and from it. No kernels.
#include <cstring>

#include "kernels/check.h"
#include "kernels/cuda/ops.h"
#include "kernels/cuda/state.h"

namespace millrace {

int Stream::CountCuda() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

Stream Stream::OpenCuda(int ordinal) { return Stream(std::make_unique<cuda::State>(ordinal)); }

namespace cuda {

void CheckCuda(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "CUDA: %s: %s\n", call, cudaGetErrorString(error));
  std::fflush(stderr);
  std::_Exit(kDeviceFailureExit);
}

void LaunchFailed(cudaError_t error, const void* kernel, dim3 grid, int threads, size_t shared_bytes) {
  const char* name = nullptr;
  if (cudaFuncGetName(&name, kernel) != cudaSuccess) name = "a kernel";
  std::fprintf(stderr, "CUDA: launch of %s, grid %u x %u x %u, %d threads, %zu bytes of shared memory: %s\n", name,
               grid.x, grid.y, grid.z, threads, shared_bytes, cudaGetErrorString(error));
  std::fflush(stderr);
  std::_Exit(kDeviceFailureExit);
}

State::State(int gpu) : Stream::State(Device::kCuda), ordinal(gpu) {
  CheckCuda(cudaSetDevice(ordinal), "cudaSetDevice");
  CheckCuda(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, ordinal), "cudaDeviceGetAttribute");
  CheckCuda(cudaStreamCreateWithFlags(&queue, cudaStreamNonBlocking), "cudaStreamCreate");
  for (cudaEvent_t& mark : marks) {
    CheckCuda(cudaEventCreateWithFlags(&mark, cudaEventDisableTiming), "cudaEventCreate");
  }
  counters = reinterpret_cast<int*>(Allocate(kNumCounters * sizeof(int)));
  CheckCuda(counters == nullptr ? cudaErrorMemoryAllocation : cudaSuccess, "the counters' memory");
}

State::~State() {
  CheckCuda(cudaFree(counters), "cudaFree");
  for (cudaEvent_t mark : marks) CheckCuda(cudaEventDestroy(mark), "cudaEventDestroy");
  CheckCuda(cudaStreamDestroy(queue), "cudaStreamDestroy");
}

void State::Synchronize() { CheckCuda(cudaStreamSynchronize(queue), "cudaStreamSynchronize"); }

std::byte* State::Allocate(size_t bytes) {
  CheckCuda(cudaSetDevice(ordinal), "cudaSetDevice");
  void* data = nullptr;
  if (cudaMalloc(&data, bytes) != cudaSuccess) {
    cudaGetLastError();  // an allocation that does not fit is no lasting error
    return nullptr;
  }
  CheckCuda(cudaMemsetAsync(data, 0, bytes, queue), "cudaMemset");
  Synchronize();
  return static_cast<std::byte*>(data);
}

State::Release State::release() const {
  return [](std::byte* data, size_t) { CheckCuda(cudaFree(data), "cudaFree"); };
}

void State::Copy(void* to, const void* from, size_t bytes) {
  CheckCuda(cudaSetDevice(ordinal), "cudaSetDevice");
  CheckCuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, queue), "cudaMemcpy");
  Synchronize();
}

int64_t State::FreeBytes() const {
  CheckCuda(cudaSetDevice(ordinal), "cudaSetDevice");
  size_t free = 0, total = 0;
  CheckCuda(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  return static_cast<int64_t>(free);
}

std::byte* State::AllocateShared(size_t bytes) {
  CheckCuda(cudaSetDevice(ordinal), "cudaSetDevice");
  void* data = nullptr;
  if (cudaHostAlloc(&data, bytes, cudaHostAllocMapped) != cudaSuccess) {
    cudaGetLastError();
    return nullptr;
  }
  std::memset(data, 0, bytes);
  return static_cast<std::byte*>(data);
}

State::Release State::release_shared() const {
  return [](std::byte* data, size_t) { CheckCuda(cudaFreeHost(data), "cudaFreeHost"); };
}

void* State::Record(const std::function<void()>& work) {
  CheckCuda(cudaSetDevice(ordinal), "cudaSetDevice");
  CheckCuda(cudaStreamBeginCapture(queue, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
  work();
  cudaGraph_t graph = nullptr;
  CheckCuda(cudaStreamEndCapture(queue, &graph), "cudaStreamEndCapture");
  cudaGraphExec_t executable = nullptr;
  CheckCuda(cudaGraphInstantiate(&executable, graph, 0), "cudaGraphInstantiate");
  CheckCuda(cudaGraphDestroy(graph), "cudaGraphDestroy");
  CheckCuda(cudaGraphUpload(executable, queue), "cudaGraphUpload");
  return executable;
}

void State::Replay(void* graph) {
  CheckCuda(cudaGraphLaunch(static_cast<cudaGraphExec_t>(graph), queue), "cudaGraphLaunch");
}

void State::Discard(void* graph) {
  CheckCuda(cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(graph)), "cudaGraphExecDestroy");
}

void State::Mark(int mark) { CheckCuda(cudaEventRecord(marks[mark], queue), "cudaEventRecord"); }

void State::AwaitMark(int mark) { CheckCuda(cudaEventSynchronize(marks[mark]), "a step on the GPU"); }

void PackRows(PackedWeight dst, int64_t row_begin, Mat<const bf16> src, Stream& stream) {
  stream.Copy(dst.data + row_begin * dst.in, src.data, static_cast<size_t>(src.rows * src.cols) * sizeof(bf16));
}

}  // namespace cuda
}  // namespace millrace

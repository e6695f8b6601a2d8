// Opening a GPU, its memory, and copies to and from it. No kernels.
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
  std::abort();
}

State::State(int gpu) : Stream::State(Device::kCuda), ordinal(gpu) {
  CheckCuda(cudaSetDevice(ordinal), "cudaSetDevice");
  CheckCuda(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, ordinal), "cudaDeviceGetAttribute");
  CheckCuda(cudaStreamCreateWithFlags(&queue, cudaStreamNonBlocking), "cudaStreamCreate");
}

State::~State() { CheckCuda(cudaStreamDestroy(queue), "cudaStreamDestroy"); }

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

void PackRows(PackedWeight dst, int64_t row_begin, Mat<const bf16> src, Stream& stream) {
  stream.Copy(dst.data + row_begin * dst.in, src.data, static_cast<size_t>(src.rows * src.cols) * sizeof(bf16));
}

}  // namespace cuda
}  // namespace millrace

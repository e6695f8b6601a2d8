#include "kernels/stream.h"

#include <unistd.h>

#include <utility>

#include "kernels/check.h"
#include "kernels/cpu/state.h"
#include "kernels/stream_state.h"

namespace millrace {

Stream Stream::OpenCpu(int num_threads) {
  MILLRACE_CHECK(num_threads >= 1, "a stream has at least the caller's thread", num_threads);
  return Stream(std::make_unique<cpu::State>(num_threads));
}

Stream::Stream(std::unique_ptr<State> state) : state_(std::move(state)) {}
Stream::Stream(Stream&&) noexcept = default;
Stream& Stream::operator=(Stream&&) noexcept = default;
Stream::~Stream() = default;

Device Stream::device() const { return state_->device; }
int Stream::num_threads() const { return state_->num_threads(); }
std::byte* Stream::workspace() const { return state_->workspace.data(); }
size_t Stream::workspace_bytes() const { return state_->workspace.bytes(); }
void Stream::Synchronize() { state_->Synchronize(); }
void Stream::Mark(int mark) { state_->Mark(mark); }
void Stream::AwaitMark(int mark) { state_->AwaitMark(mark); }
int64_t Stream::FreeBytes() const { return state_->FreeBytes(); }
void Stream::Copy(void* to, const void* from, size_t bytes) { state_->Copy(to, from, bytes); }

void Stream::ReserveWorkspace(size_t bytes) {
  if (bytes <= workspace_bytes()) return;
  state_->workspace = DeviceBuffer(bytes, *this);
  MILLRACE_CHECK(workspace() != nullptr, "the workspace fits in memory", static_cast<long long>(bytes));
}

void* Stream::State::Record(const std::function<void()>&) {
  MILLRACE_CHECK(false, "this device records its work");
  return nullptr;
}
void Stream::State::Replay(void*) {}
void Stream::State::Discard(void*) {}
void Stream::State::Mark(int) {}
void Stream::State::AwaitMark(int) {}
int64_t Stream::State::FreeBytes() const { return sysconf(_SC_AVPHYS_PAGES) * sysconf(_SC_PAGESIZE); }

}  // namespace millrace

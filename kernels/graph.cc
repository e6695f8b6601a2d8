#include "kernels/graph.h"

#include <unistd.h>

#include <utility>

#include "kernels/check.h"
#include "kernels/stream_state.h"

namespace millrace {

Graph::Graph(Stream& stream, const std::function<void()>& work)
    : state_(&stream.state()), graph_(state_->Record(work)) {}
Graph::Graph(Graph&& other) noexcept : state_(other.state_), graph_(std::exchange(other.graph_, nullptr)) {}
Graph::~Graph() {
  if (graph_ != nullptr) state_->Discard(graph_);
}
void Graph::Replay() const { state_->Replay(graph_); }

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

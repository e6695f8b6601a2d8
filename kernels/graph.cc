#include "kernels/graph.h"

#include <utility>

#include "kernels/stream_state.h"

namespace millrace {

Graph::Graph(Stream& stream, const std::function<void()>& work)
    : state_(&stream.state()), graph_(state_->Record(work)) {}
Graph::Graph(Graph&& other) noexcept : state_(other.state_), graph_(std::exchange(other.graph_, nullptr)) {}
Graph::~Graph() {
  if (graph_ != nullptr) state_->Discard(graph_);
}
void Graph::Replay() const { state_->Replay(graph_); }

}  // namespace millrace

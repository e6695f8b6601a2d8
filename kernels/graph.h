// Work recorded once and replayed as a whole: on a GPU one launch instead of hundreds. It is bound to the addresses and
// sizes it was recorded with. Made at start-up; used by the stream's thread, and gone before the stream is. CUDA alone.
#pragma once

#include <functional>

#include "kernels/stream.h"

namespace millrace {

class Graph {
 public:
  // Runs `work`, whose ops on `stream` are recorded and not executed.
  Graph(Stream& stream, const std::function<void()>& work);
  Graph(Graph&& other) noexcept;
  Graph& operator=(Graph&&) = delete;
  ~Graph();

  void Replay() const;

 private:
  Stream::State* state_;
  void* graph_;
};

}  // namespace millrace

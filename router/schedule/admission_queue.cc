#include "router/schedule/admission_queue.h"

#include <algorithm>

#include "kernels/check.h"
#include "router/schedule/placement.h"

namespace millrace {

void AdmissionQueue::Push(Sequence* sequence, Time now) {
  sequence->queue_rank = PrefillRank(*sequence, sequence->left, now);
  sequence->queue_index = static_cast<uint32_t>(all_.size());
  all_.push_back(sequence);
  order_.insert({sequence->queue_rank, sequence->id, sequence});
  tokens_ += sequence->length();
}

void AdmissionQueue::Remove(Sequence* sequence) {
  const uint32_t index = sequence->queue_index;
  MILLRACE_CHECK(index < all_.size() && all_[index] == sequence, "a queued sequence is where it says", index);
  all_[index] = all_.back();
  all_[index]->queue_index = index;
  all_.pop_back();
  order_.erase({sequence->queue_rank, sequence->id, sequence});
  tokens_ -= sequence->length();
}

void AdmissionQueue::Update(Sequence* sequence, Time now) {
  const int64_t rank = PrefillRank(*sequence, sequence->left, now);
  if (rank == sequence->queue_rank) return;
  order_.erase({sequence->queue_rank, sequence->id, sequence});
  sequence->queue_rank = rank;
  order_.insert({rank, sequence->id, sequence});
}

void AdmissionQueue::Refresh(Time now) {
  for (size_t n = std::min(kRefreshed, all_.size()); n > 0; --n) {
    if (++cursor_ >= all_.size()) cursor_ = 0;
    Update(all_[cursor_], now);
  }
}

void AdmissionQueue::First(size_t n, std::vector<Sequence*>* out) const {
  out->clear();
  for (const Entry& entry : order_) {
    if (out->size() == n) return;
    out->push_back(entry.sequence);
  }
}

}  // namespace millrace

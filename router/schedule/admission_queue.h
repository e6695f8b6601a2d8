// The sequences that wait for a worker, in the order of PrefillRank, which waiting changes. Ranks are brought up to
// date in turn, a few at each dispatch, so the order lags by at most size / kRefreshed dispatches. Bounded by the
// Scheduler's Submit; sequences that come back from a worker are always taken. Owned by the Scheduler. Time: O(log n)
// for each call. Memory: 32 bytes per sequence.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/container/btree_set.h"
#include "router/schedule/sequence.h"

namespace millrace {

class AdmissionQueue {
 public:
  void Push(Sequence* sequence, Time now);  // sequence->left is set
  void Remove(Sequence* sequence);
  void Update(Sequence* sequence, Time now);  // sequence->left has changed
  void Refresh(Time now);

  // The first n in order.
  void First(size_t n, std::vector<Sequence*>* out) const;
  const std::vector<Sequence*>& all() const { return all_; }  // in no order

  size_t size() const { return all_.size(); }
  int64_t tokens() const { return tokens_; }

 private:
  static constexpr size_t kRefreshed = 16;
  struct Entry {
    int64_t rank;
    SequenceId id;
    Sequence* sequence;
    bool operator<(const Entry& other) const { return rank != other.rank ? rank < other.rank : id < other.id; }
  };

  absl::btree_set<Entry> order_;
  std::vector<Sequence*> all_;  // by queue_index
  size_t cursor_ = 0;           // of Refresh
  int64_t tokens_ = 0;
};

}  // namespace millrace

// The sequences that wait for a worker. Priority goes first, then those that ran before; among the rest the tenant that
// has been served least, and within a tenant the order of PrefillRank, which waiting changes. Service is counted in
// tokens, computed prompt and weighted output; a tenant that comes back after a pause starts level with the others, so
// nobody saves up. Ranks are brought up to date in turn, a few at each dispatch, so the order lags by at most size /
// kRefreshed dispatches. Bounded by the Scheduler's Submit; sequences that come back from a worker are always taken.
// Owned by the Scheduler. Time: O(log n) for each call, but First O(k log k) and Heaviest O(n). Memory: 32 bytes per
// sequence, 200 per tenant.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "absl/container/btree_set.h"
#include "absl/container/flat_hash_map.h"
#include "router/schedule/sequence.h"
#include "router/schedule/tenant.h"

namespace millrace {

class AdmissionQueue {
 public:
  static constexpr size_t kMaxIdleTenants = 1024;  // whose service is remembered

  // A tenant is known while sequences of it live, and afterwards as long as it is ahead of the others.
  Tenant* Enter(const std::string& name);
  void Leave(Tenant* tenant);
  // Its tenant was given so many tokens; `its_turn`: by coming first in the queue.
  void Charge(const Sequence& sequence, double tokens, bool its_turn);

  void Push(Sequence* sequence, Time now);  // sequence->left is set
  void Remove(Sequence* sequence);
  void Update(Sequence* sequence, Time now);  // sequence->left has changed
  void Refresh(Time now);

  // The first n in order.
  void First(size_t n, std::vector<Sequence*>* out) const;
  const std::vector<Sequence*>& all() const { return all_; }  // in no order
  // Of the tenant that holds most of the queue, what has waited too long already or else the longest, of lowest
  // priority and never run; null: there is none.
  Sequence* Heaviest(Time now) const;
  int64_t TokensOf(const Tenant* tenant) const { return (tenant != nullptr ? tenant : &nobody_)->waiting_tokens; }
  double SecondsBefore(const Sequence& sequence) const;  // of prefill, about

  size_t size() const { return all_.size(); }
  int64_t tokens() const { return tokens_; }
  size_t num_tenants() const { return tenants_.size(); }

 private:
  static constexpr size_t kRefreshed = 16;

  void List(Tenant* tenant);
  Tenant* TenantOf(const Sequence& sequence) { return sequence.tenant != nullptr ? sequence.tenant : &nobody_; }

  absl::flat_hash_map<std::string, std::unique_ptr<Tenant>> tenants_;
  absl::btree_set<std::tuple<double, uint64_t, Tenant*>> idle_;  // by service and number
  Tenant nobody_;                                                // of sequences without one
  absl::btree_set<Tenant::Turn> turns_;                          // of tenants that wait
  double level_ = 0;                                             // the service of the tenant whose turn it was last
  uint64_t next_tenant_ = 1;

  std::vector<Sequence*> all_;  // by queue_index
  size_t cursor_ = 0;           // of Refresh
  int64_t tokens_ = 0;
};

}  // namespace millrace

#include "router/schedule/admission_queue.h"

#include <algorithm>

#include "kernels/check.h"
#include "router/schedule/placement.h"

namespace millrace {
namespace {

int64_t Grade(const Sequence& sequence) { return -2 * int64_t{sequence.priority} + (sequence.returned ? 0 : 1); }

}  // namespace

Tenant* AdmissionQueue::Enter(const std::string& name) {
  std::unique_ptr<Tenant>& tenant = tenants_[name];
  if (tenant == nullptr) {
    tenant = std::make_unique<Tenant>();
    tenant->name = name;
    tenant->number = next_tenant_++;
  }
  if (tenant->sequences++ == 0) idle_.erase({tenant->served, tenant->number, tenant.get()});
  return tenant.get();
}

void AdmissionQueue::Leave(Tenant* tenant) {
  MILLRACE_CHECK(tenant->sequences > 0, "a tenant's sequences leave once");
  if (--tenant->sequences > 0) return;
  idle_.insert({tenant->served, tenant->number, tenant});
  // Those that are not ahead would come back level with the others anyway.
  while (!idle_.empty() && (std::get<double>(*idle_.begin()) <= level_ || idle_.size() > kMaxIdleTenants)) {
    const std::string name = std::get<Tenant*>(*idle_.begin())->name;
    idle_.erase(idle_.begin());
    tenants_.erase(name);
  }
}

void AdmissionQueue::Charge(const Sequence& sequence, double tokens, bool its_turn) {
  Tenant* const tenant = TenantOf(sequence);
  if (its_turn) level_ = std::max(level_, tenant->served);
  tenant->served += tokens;
  List(tenant);
}

void AdmissionQueue::List(Tenant* tenant) {
  Tenant::Turn turn;
  if (!tenant->waiting.empty()) {
    turn = {Grade(*tenant->waiting.begin()->sequence), tenant->served, tenant->number, tenant};
  }
  Tenant::Turn& listed = tenant->turn;
  if (turn.tenant == listed.tenant && turn.grade == listed.grade && turn.served == listed.served) return;
  if (listed.tenant != nullptr) turns_.erase(listed);
  listed = turn;
  if (turn.tenant != nullptr) turns_.insert(turn);
}

void AdmissionQueue::Push(Sequence* sequence, Time now) {
  Tenant* const tenant = TenantOf(*sequence);
  if (tenant->waiting.empty()) tenant->served = std::max(tenant->served, level_);
  sequence->queue_rank = PrefillRank(*sequence, sequence->left, now);
  sequence->queue_index = static_cast<uint32_t>(all_.size());
  all_.push_back(sequence);
  tenant->waiting.insert({sequence->queue_rank, sequence->id, sequence});
  tenant->waiting_tokens += sequence->length();
  tokens_ += sequence->length();
  List(tenant);
}

void AdmissionQueue::Remove(Sequence* sequence) {
  const uint32_t index = sequence->queue_index;
  MILLRACE_CHECK(index < all_.size() && all_[index] == sequence, "a queued sequence is where it says", index);
  all_[index] = all_.back();
  all_[index]->queue_index = index;
  all_.pop_back();
  Tenant* const tenant = TenantOf(*sequence);
  tenant->waiting.erase({sequence->queue_rank, sequence->id, sequence});
  tenant->waiting_tokens -= sequence->length();
  tokens_ -= sequence->length();
  List(tenant);
}

void AdmissionQueue::Update(Sequence* sequence, Time now) {
  const int64_t rank = PrefillRank(*sequence, sequence->left, now);
  if (rank == sequence->queue_rank) return;
  Tenant* const tenant = TenantOf(*sequence);
  tenant->waiting.erase({sequence->queue_rank, sequence->id, sequence});
  sequence->queue_rank = rank;
  tenant->waiting.insert({rank, sequence->id, sequence});
  List(tenant);
}

void AdmissionQueue::Refresh(Time now) {
  for (size_t n = std::min(kRefreshed, all_.size()); n > 0; --n) {
    if (++cursor_ >= all_.size()) cursor_ = 0;
    Update(all_[cursor_], now);
  }
}

// As if each was served its prompt when its turn came.
void AdmissionQueue::First(size_t n, std::vector<Sequence*>* out) const {
  out->clear();
  struct Next {
    Tenant::Turn turn;
    absl::btree_set<Tenant::Waiting>::const_iterator waiting;
  };
  const auto later = [](const Next& a, const Next& b) { return b.turn < a.turn; };
  std::vector<Next> heap;  // the first n tenants: no other's turn can be among the first n
  for (const Tenant::Turn& turn : turns_) {
    if (heap.size() == n) break;
    heap.push_back({turn, turn.tenant->waiting.begin()});
  }
  std::reverse(heap.begin(), heap.end());
  std::make_heap(heap.begin(), heap.end(), later);
  while (out->size() < n && !heap.empty()) {
    std::pop_heap(heap.begin(), heap.end(), later);
    Next& next = heap.back();
    out->push_back(next.waiting->sequence);
    next.turn.served += next.waiting->sequence->length();
    if (++next.waiting == next.turn.tenant->waiting.end()) {
      heap.pop_back();
      continue;
    }
    next.turn.grade = Grade(*next.waiting->sequence);
    std::push_heap(heap.begin(), heap.end(), later);
  }
}

Sequence* AdmissionQueue::Heaviest(Time now) const {
  const auto holds_less = [](const Tenant::Turn& a, const Tenant::Turn& b) {
    return a.tenant->waiting_tokens < b.tenant->waiting_tokens;
  };
  const auto most = std::max_element(turns_.begin(), turns_.end(), holds_less);
  if (most == turns_.end()) return nullptr;
  const auto weight = [&](const Tenant::Waiting& it) {
    const Sequence& sequence = *it.sequence;
    return std::make_tuple(!sequence.returned, -sequence.priority, IsLate(sequence, sequence.left, now),
                           sequence.length());
  };
  const auto& waiting = most->tenant->waiting;
  const auto heaviest = std::max_element(waiting.begin(), waiting.end(),
                                         [&](const auto& a, const auto& b) { return weight(a) < weight(b); });
  return heaviest->sequence->returned ? nullptr : heaviest->sequence;
}

// Its own tenant's earlier ones, and as much for each other tenant that waits, if it has that much.
double AdmissionQueue::SecondsBefore(const Sequence& sequence) const {
  double own = 0, others = 0;
  for (const Sequence* other : all_) {
    if (Grade(*other) > Grade(sequence)) continue;
    if (other->tenant != sequence.tenant) {
      others += other->left;
    } else if (other->queue_rank < sequence.queue_rank) {
      own += other->left;
    }
  }
  return own + std::min(others, own * static_cast<double>(turns_.size()));
}

}  // namespace millrace

#include "router/text/jinja_budget.h"

#include <ctime>

namespace millrace {
namespace {

thread_local JinjaBudget* current = nullptr;
constexpr uint32_t kCallsBetweenClocks = 64;

// Processor time, not the wall clock: on a busy machine an honest template must not fail for waiting its turn.
std::chrono::nanoseconds ThreadTime() {
  std::timespec now = {};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return std::chrono::seconds(now.tv_sec) + std::chrono::nanoseconds(now.tv_nsec);
}

}  // namespace

JinjaBudget::JinjaBudget() : outer_(current), deadline_(ThreadTime() + kMaxTime) { current = this; }
JinjaBudget::~JinjaBudget() { current = outer_; }

void JinjaBudget::CheckClock() {
  if (++calls_ % kCallsBetweenClocks == 0 && ThreadTime() > deadline_) {
    throw JinjaBudgetExceeded{"took too long, limit 1 s"};
  }
}

JinjaBudget::Nesting::Nesting() : budget_(current) {
  if (budget_ == nullptr) return;
  if (budget_->depth_ >= kMaxDepth) throw JinjaBudgetExceeded{"nested too deeply, limit 256"};
  if (++budget_->steps_ > kMaxSteps) throw JinjaBudgetExceeded{"too many steps, limit 20000000"};
  budget_->CheckClock();
  ++budget_->depth_;
}

JinjaBudget::Nesting::~Nesting() {
  if (budget_ != nullptr) --budget_->depth_;
}

void JinjaBudget::Charge(size_t bytes) {
  if (current == nullptr) return;
  current->bytes_ += bytes;
  if (current->bytes_ > kMaxBytes) throw JinjaBudgetExceeded{"used too much memory, limit 256 MiB"};
  current->CheckClock();
}

}  // namespace millrace

#include "router/text/jinja_budget.h"

namespace millrace {
namespace {

thread_local JinjaBudget* current = nullptr;
constexpr int64_t kStepsBetweenClocks = 64;

}  // namespace

JinjaBudget::JinjaBudget() : outer_(current), deadline_(std::chrono::steady_clock::now() + kMaxTime) { current = this; }
JinjaBudget::~JinjaBudget() { current = outer_; }

JinjaBudget::Nesting::Nesting() : budget_(current) {
  if (budget_ == nullptr) return;
  if (budget_->depth_ >= kMaxDepth) throw JinjaBudgetExceeded{"nested too deeply, limit 256"};
  if (++budget_->steps_ > kMaxSteps) throw JinjaBudgetExceeded{"too many steps, limit 20000000"};
  if (budget_->steps_ % kStepsBetweenClocks == 0 && std::chrono::steady_clock::now() > budget_->deadline_) {
    throw JinjaBudgetExceeded{"took too long, limit 1 s"};
  }
  ++budget_->depth_;
}

JinjaBudget::Nesting::~Nesting() {
  if (budget_ != nullptr) --budget_->depth_;
}

void JinjaBudget::Charge(size_t bytes) {
  if (current == nullptr) return;
  current->bytes_ += bytes;
  if (current->bytes_ > kMaxBytes) throw JinjaBudgetExceeded{"used too much memory, limit 512 MiB"};
}

}  // namespace millrace

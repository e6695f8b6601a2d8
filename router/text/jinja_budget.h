// What one run of the template engine may use: steps, processor time, bytes allocated in all, and depth of recursion.
// The engine calls in from everywhere, so the budget in force is the innermost JinjaBudget alive on the calling thread.
// Passing a limit throws JinjaBudgetExceeded, which is no std::exception: the engine's own handlers let it through.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>

namespace millrace {

struct JinjaBudgetExceeded {
  const char* what;
};

class JinjaBudget {
 public:
  static constexpr int64_t kMaxSteps = 20'000'000;
  static constexpr size_t kMaxBytes = 256 << 20;
  static constexpr int kMaxDepth = 256;
  static constexpr std::chrono::milliseconds kMaxTime = std::chrono::milliseconds(1000);

  JinjaBudget();
  ~JinjaBudget();
  JinjaBudget(const JinjaBudget&) = delete;
  JinjaBudget& operator=(const JinjaBudget&) = delete;

  // One level of recursion and one step, for as long as it lives. All free of charge without a budget.
  class Nesting {
   public:
    Nesting();
    ~Nesting();
    Nesting(const Nesting&) = delete;
    Nesting& operator=(const Nesting&) = delete;

   private:
    JinjaBudget* const budget_;
  };
  static void Charge(size_t bytes);

 private:
  void CheckClock();

  JinjaBudget* const outer_;
  const std::chrono::nanoseconds deadline_;  // of the thread's processor time
  int64_t steps_ = 0;
  uint32_t calls_ = 0;
  size_t bytes_ = 0;
  int depth_ = 0;
};

}  // namespace millrace

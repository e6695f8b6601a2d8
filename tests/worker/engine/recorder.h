// A router's view of a worker: what the reports said, per slot. Thread-safe; waits are conditions.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "gtest/gtest.h"
#include "worker/engine/engine.h"

namespace millrace::testing {

class Recorder final : public ReportSink {
 public:
  struct SlotView {
    std::vector<int32_t> tokens;
    std::vector<worker::v1::LogProbs> logprobs, prompt_logprobs;
    uint32_t num_computed_tokens = 0;
    worker::v1::FinishReason finish = worker::v1::FINISH_REASON_UNSPECIFIED;
  };
  struct View {
    std::map<uint32_t, SlotView> slots;
    worker::v1::StepReport last;
    std::vector<worker::v1::StepReport> reports;
    absl::Status error;

    bool Finished(uint32_t slot) const {
      const auto found = slots.find(slot);
      return found != slots.end() && found->second.finish != worker::v1::FINISH_REASON_UNSPECIFIED;
    }
  };

  void OnReport(worker::v1::StepReport report) override {
    const absl::MutexLock lock(&mutex_);
    for (const auto& progress : report.prefill()) {
      SlotView& slot = view_.slots[progress.slot()];
      slot.num_computed_tokens = progress.num_computed_tokens();
      slot.prompt_logprobs.insert(slot.prompt_logprobs.end(), progress.prompt_logprobs().begin(),
                                  progress.prompt_logprobs().end());
    }
    for (const auto& row : report.rows()) {
      SlotView& slot = view_.slots[row.slot()];
      slot.tokens.insert(slot.tokens.end(), row.token_ids().begin(), row.token_ids().end());
      slot.logprobs.insert(slot.logprobs.end(), row.logprobs().begin(), row.logprobs().end());
      slot.finish = row.finish_reason();
    }
    view_.last = report;
    view_.reports.push_back(std::move(report));
  }
  void OnError(absl::Status status) override {
    const absl::MutexLock lock(&mutex_);
    view_.error = std::move(status);
  }

  // Returns a copy of the view once `condition` holds; fails the test after a long time.
  View Await(absl::FunctionRef<bool(const View&)> condition) {
    const absl::MutexLock lock(&mutex_);
    const auto holds = [&] { return condition(view_); };
    EXPECT_TRUE(mutex_.AwaitWithTimeout(absl::Condition(&holds), absl::Seconds(60))) << "waited in vain";
    return view_;
  }
  View AwaitFinished(const std::vector<uint32_t>& slots) {
    return Await([&](const View& view) {
      for (const uint32_t slot : slots) {
        if (!view.Finished(slot)) return false;
      }
      return true;
    });
  }
  View AwaitApplied(uint64_t edit) {
    return Await([&](const View& view) { return view.last.applied_edit() >= edit; });
  }
  View AwaitError() {
    return Await([&](const View& view) { return !view.error.ok(); });
  }

  // A slot is about to be used again.
  void Forget(uint32_t slot) {
    const absl::MutexLock lock(&mutex_);
    view_.slots.erase(slot);
  }

 private:
  absl::Mutex mutex_;
  View view_;
};

}  // namespace millrace::testing

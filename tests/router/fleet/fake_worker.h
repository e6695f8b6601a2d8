// A worker without a model: token = f(seed, position). It plays edits and reports steps as worker.proto says, and the
// test holds the pace: free running, or a budget of steps. One stream at a time; any thread may control it.
#pragma once

#include <algorithm>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "grpcpp/grpcpp.h"
#include "millrace/worker/v1/worker.grpc.pb.h"

namespace millrace {

using TokenFunction = std::function<int32_t(uint64_t seed, uint32_t position)>;

// Printable ASCII of the byte-level fixtures.
inline int32_t DefaultToken(uint64_t seed, uint32_t position) {
  return 10 + static_cast<int32_t>((seed * 31 + position * 7) % 60);
}

class FakeWorker final : public worker::v1::WorkerService::Service {
 public:
  static constexpr int64_t kFree = -1;

  explicit FakeWorker(std::string id, int port = 0, TokenFunction token = DefaultToken) : token_(std::move(token)) {
    ready_.set_worker_id(std::move(id));
    ready_.set_instance_id("instance");
    ready_.mutable_model()->set_name("fake");
    ready_.mutable_model()->set_vocab_size(337);
    ready_.mutable_model()->set_max_context(512);
    ready_.mutable_model()->add_eos_token_ids(2);
    ready_.mutable_model()->set_fingerprint("f");
    ready_.set_num_blocks(256);
    ready_.set_block_tokens(4);
    ready_.set_num_slots(8);
    ready_.mutable_step_cost()->set_step_us(1000);
    ready_.mutable_step_cost()->set_prefill_token_us(1);
    ready_.set_step_target_us(45'000);
    Listen(port);
  }
  ~FakeWorker() override { Stop(); }

  worker::v1::Ready& ready() { return ready_; }  // to change before a router comes
  int port() const { return port_; }
  std::string address() const { return absl::StrCat("127.0.0.1:", port_); }

  void SetSteps(int64_t steps) {
    absl::MutexLock lock(&mutex_);
    steps_ = steps;
  }
  void Break() {  // ends the stream as a crash would
    absl::MutexLock lock(&mutex_);
    if (context_ != nullptr) context_->TryCancel();
  }
  void SendJunk() {
    absl::MutexLock lock(&mutex_);
    junk_ = true;
  }
  void SayGoodbye(uint32_t budget_ms) {
    absl::MutexLock lock(&mutex_);
    goodbye_ms_ = budget_ms;
  }
  void AwaitStepsUsed() {
    absl::MutexLock lock(&mutex_);
    mutex_.Await(absl::Condition(
        +[](FakeWorker* self) ABSL_NO_THREAD_SAFETY_ANALYSIS { return self->steps_ == 0; }, this));
  }
  int num_hellos() {
    absl::MutexLock lock(&mutex_);
    return num_hellos_;
  }
  std::vector<worker::v1::Admit> admits() {
    absl::MutexLock lock(&mutex_);
    return admits_;
  }
  void Stop() {
    if (server_ == nullptr) return;
    Break();
    server_->Shutdown(std::chrono::system_clock::now());
    server_.reset();
  }
  void Listen(int port,
              const std::shared_ptr<grpc::ServerCredentials>& credentials = grpc::InsecureServerCredentials()) {
    grpc::ServerBuilder builder;
    builder.AddListeningPort(absl::StrCat("127.0.0.1:", port), credentials, &port_);
    builder.RegisterService(this);
    builder.SetMaxReceiveMessageSize(-1);
    builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 1000);
    server_ = builder.BuildAndStart();
  }

 private:
  using Stream = grpc::ServerReaderWriter<worker::v1::WorkerMessage, worker::v1::RouterMessage>;
  struct Slot {
    uint32_t length, num_prompt, max_length, min_length, capacity, draft_length;
    bool prefilled = false;
    std::vector<int32_t> stops;
    worker::v1::Sampling sampling;
  };

  grpc::Status Execute(grpc::ServerContext* context, Stream* stream) override {
    worker::v1::RouterMessage hello;
    if (!stream->Read(&hello) || !hello.has_hello()) return {grpc::StatusCode::INVALID_ARGUMENT, "expected a hello"};
    worker::v1::WorkerMessage first;
    {
      absl::MutexLock lock(&mutex_);
      if (context_ != nullptr) return {grpc::StatusCode::FAILED_PRECONDITION, "another stream is open"};
      context_ = context;
      ++num_hellos_;
      edits_.clear();
      reading_ = true;
      *first.mutable_ready() = ready_;
    }
    stream->Write(first);
    std::thread reader([&] {
      worker::v1::RouterMessage message;
      while (stream->Read(&message)) {
        absl::MutexLock lock(&mutex_);
        edits_.push_back(message.edit());
      }
      absl::MutexLock lock(&mutex_);
      reading_ = false;
    });
    Play(stream);
    context->TryCancel();
    reader.join();
    absl::MutexLock lock(&mutex_);
    context_ = nullptr;
    return grpc::Status::OK;
  }

  bool HasWork() const ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return !reading_ || junk_ || goodbye_ms_.has_value() || !edits_.empty() || (may_step_ && steps_ != 0);
  }

  void Play(Stream* stream) {
    std::map<uint32_t, Slot> slots;
    uint64_t step = 0, applied = 0;
    while (true) {
      worker::v1::WorkerMessage message;
      worker::v1::StepReport& report = *message.mutable_report();
      bool stepping;
      std::optional<uint32_t> goodbye_ms;
      {
        absl::MutexLock lock(&mutex_);
        may_step_ = AnyCanStep(slots);
        // Without work, a heartbeat.
        mutex_.AwaitWithTimeout(absl::Condition(this, &FakeWorker::HasWork), absl::Milliseconds(200));
        if (!reading_) return;
        for (const worker::v1::Edit& edit : edits_) applied = Apply(edit, slots);
        edits_.clear();
        stepping = AnyCanStep(slots) && steps_ != 0;
        if (junk_) report.add_rows()->set_slot(9999);
        junk_ = false;
        goodbye_ms = std::exchange(goodbye_ms_, std::nullopt);
        if (stepping && steps_ > 0) --steps_;
      }
      if (goodbye_ms.has_value()) {
        worker::v1::WorkerMessage goodbye;
        goodbye.mutable_goodbye()->set_budget_ms(*goodbye_ms);
        if (!stream->Write(goodbye)) return;
      }
      if (stepping) {
        Step(slots, report);
        ++step;
      }
      report.set_step(step);
      report.set_applied_edit(applied);
      if (!stream->Write(message)) return;
    }
  }

  static bool AnyCanStep(const std::map<uint32_t, Slot>& slots) {
    for (const auto& [id, slot] : slots) {
      if (slot.length <= slot.capacity) return true;
    }
    return false;
  }

  uint64_t Apply(const worker::v1::Edit& edit, std::map<uint32_t, Slot>& slots) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    for (const uint32_t slot : edit.release()) slots.erase(slot);
    for (const worker::v1::Admit& admit : edit.admit()) {
      admits_.push_back(admit);
      Slot& slot = slots[admit.slot()];
      slot.length = admit.num_cached_tokens() + static_cast<uint32_t>(admit.token_ids_size());
      slot.num_prompt = admit.num_prompt_tokens();
      slot.max_length = admit.max_length();
      slot.min_length = admit.min_length();
      slot.capacity = static_cast<uint32_t>(admit.block_table_size()) * ready_.block_tokens();
      slot.prefilled = false;
      slot.draft_length = 0;
      slot.stops.assign(admit.stop_token_ids().begin(), admit.stop_token_ids().end());
      slot.sampling = admit.sampling();
    }
    for (const worker::v1::Extend& extend : edit.extend()) {
      const auto slot = slots.find(extend.slot());
      if (slot == slots.end()) continue;  // it has just ended by itself
      slot->second.capacity += static_cast<uint32_t>(extend.block_table_size()) * ready_.block_tokens();
    }
    for (const worker::v1::Draft& draft : edit.draft()) {
      const auto slot = slots.find(draft.slot());
      if (slot != slots.end()) slot->second.draft_length = draft.length();
    }
    return edit.edit_id();
  }

  static worker::v1::LogProbs LogProbsOf(int32_t token, uint32_t top) {
    worker::v1::LogProbs logprobs;
    logprobs.set_token_id(token);
    logprobs.set_logprob(-0.25f * static_cast<float>(token));
    for (uint32_t i = 0; i < top; ++i) {
      logprobs.add_top_token_ids(static_cast<int32_t>(i));
      logprobs.add_top_logprobs(-1.0f - static_cast<float>(i));
    }
    return logprobs;
  }

  void Step(std::map<uint32_t, Slot>& slots, worker::v1::StepReport& report) {
    report.set_step_us(100);
    std::vector<uint32_t> ended;
    for (auto& [id, slot] : slots) {
      if (slot.length > slot.capacity) {
        report.add_stalled_slots(id);
        continue;
      }
      if (!slot.prefilled) {
        slot.prefilled = true;
        worker::v1::Progress& progress = *report.add_prefill();
        progress.set_slot(id);
        progress.set_num_computed_tokens(slot.length);
        for (uint32_t i = 1; slot.sampling.has_prompt_logprobs() && i < slot.num_prompt; ++i) {
          *progress.add_prompt_logprobs() = LogProbsOf(static_cast<int32_t>(i), slot.sampling.prompt_logprobs());
        }
      }
      worker::v1::Row& row = *report.add_rows();
      row.set_slot(id);
      // Of its guesses the last one is wrong.
      const uint32_t room = std::min(slot.capacity + 1, slot.max_length) - slot.length;
      row.set_num_drafted(std::min(slot.draft_length, room - 1));
      for (uint32_t i = 0; i < std::max(row.num_drafted(), 1u) && row.finish_reason() == 0; ++i) {
        const int32_t token = token_(slot.sampling.seed(), slot.length);
        row.add_token_ids(token);
        if (slot.sampling.has_logprobs()) *row.add_logprobs() = LogProbsOf(token, slot.sampling.logprobs());
        const bool may_stop = slot.length >= slot.min_length;
        ++slot.length;
        if (may_stop && std::find(slot.stops.begin(), slot.stops.end(), token) != slot.stops.end()) {
          row.set_finish_reason(worker::v1::FINISH_REASON_STOP_TOKEN);
        } else if (slot.length >= slot.max_length) {
          row.set_finish_reason(worker::v1::FINISH_REASON_LENGTH);
        }
      }
      if (row.finish_reason() != worker::v1::FINISH_REASON_UNSPECIFIED) ended.push_back(id);
    }
    for (const uint32_t id : ended) slots.erase(id);
  }

  const TokenFunction token_;
  worker::v1::Ready ready_;
  int port_ = 0;
  std::unique_ptr<grpc::Server> server_;

  absl::Mutex mutex_;
  grpc::ServerContext* context_ ABSL_GUARDED_BY(mutex_) = nullptr;  // of the open stream
  std::deque<worker::v1::Edit> edits_ ABSL_GUARDED_BY(mutex_);
  std::vector<worker::v1::Admit> admits_ ABSL_GUARDED_BY(mutex_);
  int64_t steps_ ABSL_GUARDED_BY(mutex_) = kFree;
  bool may_step_ ABSL_GUARDED_BY(mutex_) = false;
  bool reading_ ABSL_GUARDED_BY(mutex_) = false;
  bool junk_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<uint32_t> goodbye_ms_ ABSL_GUARDED_BY(mutex_);  // to be said
  int num_hellos_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace millrace

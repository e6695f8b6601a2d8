#include "cli/bench/load.h"

#include <algorithm>
#include <memory>
#include <optional>

#include "cli/completion.h"
#include "cli/completion_call.h"

namespace millrace {
namespace {

constexpr absl::Duration kProgressPeriod = absl::Milliseconds(200);

float Milliseconds(absl::Duration duration) { return static_cast<float>(absl::ToDoubleMilliseconds(duration)); }

// One request under way; its two callbacks share it.
struct Running {
  absl::Time due, last_piece;
  RequestRecord record;

  void Piece(const v1::GenerateResponse& piece) {
    const absl::Time now = absl::Now();
    if (piece.has_finish()) {
      record.prompt_tokens = piece.finish().usage().prompt_tokens();
      record.cached_tokens = piece.finish().usage().cached_tokens();
    }
    if (piece.token_ids_size() == 0) return;
    if (record.output_tokens == 0) {
      record.ttft_ms = Milliseconds(now - due);
    } else {
      record.gaps_ms.push_back(Milliseconds(now - last_piece));
    }
    last_piece = now;
    record.output_tokens += static_cast<uint32_t>(piece.token_ids_size());
    record.end_to_end_ms = Milliseconds(now - due);
  }
};

}  // namespace

Measurements Load::Run(const std::vector<PlannedRequest>& plan, double& seconds) {
  const absl::Time begin = absl::Now();
  for (const PlannedRequest& planned : plan) {
    if (options_.concurrency > 0) {
      WaitForRoom(options_.concurrency, absl::InfiniteFuture());
      Send(planned, absl::Now());
    } else {
      WaitForRoom(0, begin + planned.start);
      Send(planned, begin + planned.start);
    }
  }
  WaitForRoom(1, absl::InfiniteFuture());
  seconds = absl::ToDoubleSeconds(absl::Now() - begin);
  absl::MutexLock lock(&mutex_);
  return std::move(measurements_);
}

void Load::WaitForRoom(size_t open, absl::Time until) {
  absl::MutexLock lock(&mutex_);
  const auto has_room = [this, open]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return open_ < open; };
  do {
    const absl::Time wake = progress_ ? std::min(until, absl::Now() + kProgressPeriod) : until;
    if (mutex_.AwaitWithDeadline(absl::Condition(&has_room), wake)) return;
    if (progress_) progress_(measurements_.size());
  } while (absl::Now() < until);
}

void Load::Send(const PlannedRequest& planned, absl::Time due) {
  v1::GenerateRequest request;
  const std::vector<int32_t> prompt = PromptOf(planned, options_.vocab_size);
  request.mutable_token_ids()->mutable_ids()->Add(prompt.begin(), prompt.end());
  v1::SamplingParams& sampling = *request.mutable_sampling();
  sampling.set_max_tokens(static_cast<int32_t>(planned.output_tokens));
  sampling.set_ignore_eos(true);
  sampling.set_temperature(static_cast<float>(options_.temperature));
  {
    absl::MutexLock lock(&mutex_);
    ++open_;
  }
  auto running = std::make_shared<Running>();
  running->due = due;
  running->record.late_ms = Milliseconds(absl::Now() - due);
  CompletionCall::Start(
      stub_, std::move(request), absl::ToChronoMilliseconds(options_.timeout),
      [running](const v1::GenerateResponse& piece) { running->Piece(piece); },
      [this, running](const grpc::Status& status) {
        running->record.status = ToAbsl(status);
        if (status.ok() && running->record.output_tokens == 0)
          running->record.status = absl::InternalError("no token came");
        Finished(std::move(running->record));
      });
}

void Load::Finished(RequestRecord record) {
  absl::MutexLock lock(&mutex_);
  --open_;
  measurements_.Add(std::move(record));
}

}  // namespace millrace

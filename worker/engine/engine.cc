#include "worker/engine/engine.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/check.h"
#include "worker/engine/drafting.h"
#include "worker/engine/edit_validator.h"
#include "worker/engine/step_builder.h"

namespace millrace {

using worker::v1::Edit;
using worker::v1::StepReport;

Engine::Engine(std::unique_ptr<Model> model, const EngineOptions& options)
    : options_(options),
      model_(std::move(model)),
      table_(options.limits),
      labels_(options.limits),
      flying_(static_cast<size_t>(model_->max_steps_in_flight())) {
  MILLRACE_CHECK(options.limits.max_rows >= options.limits.num_slots, "a step has room for every decoding slot",
                 options.limits.max_rows, options.limits.num_slots);
  MILLRACE_CHECK(options.limits.max_logit_rows >= options.limits.num_slots, "every decoding slot may have its logits",
                 options.limits.max_logit_rows, options.limits.num_slots);
  thread_ = std::thread([this] { Loop(); });
}

Engine::~Engine() {
  {
    absl::MutexLock lock(&mutex_);
    stop_ = true;
  }
  thread_.join();
}

void Engine::Attach(std::shared_ptr<ReportSink> sink) {
  absl::MutexLock lock(&mutex_);
  sink_.swap(sink);
  ++stream_;
  edits_.clear();
  pending_bytes_ = 0;
}

void Engine::Detach(const ReportSink* sink) {
  std::shared_ptr<ReportSink> last;  // ends after the lock does
  absl::MutexLock lock(&mutex_);
  if (sink_.get() != sink) return;
  last = std::exchange(sink_, nullptr);
  ++stream_;
  edits_.clear();
  pending_bytes_ = 0;
}

absl::Status Engine::Post(const ReportSink* sink, Edit edit) {
  if (auto status = ValidateEdit(edit, options_.limits); !status.ok()) return status;
  const size_t bytes = edit.ByteSizeLong();
  absl::MutexLock lock(&mutex_);
  if (sink_.get() != sink) return absl::OkStatus();
  if (edits_.size() >= kMaxPendingEdits || pending_bytes_ + bytes > kMaxPendingBytes) {
    return absl::ResourceExhaustedError(absl::StrCat(edits_.size() + 1, " edits of ", pending_bytes_ + bytes,
                                                     " bytes wait for a step; the limits are ", kMaxPendingEdits,
                                                     " and ", kMaxPendingBytes));
  }
  edits_.push_back(std::move(edit));
  pending_bytes_ += bytes;
  return absl::OkStatus();
}

bool Engine::AwaitEmpty(absl::Duration patience) {
  absl::MutexLock lock(&mutex_);
  return mutex_.AwaitWithTimeout(absl::Condition(this, &Engine::IsEmpty), patience);
}

bool Engine::IsEmpty() const { return sink_ == nullptr || (empty_ && edits_.empty()); }

bool Engine::HasMail() const { return stop_ || !edits_.empty() || stream_ != taken_stream_; }

Engine::Mail Engine::TakeMail(bool idle) {
  absl::MutexLock lock(&mutex_);
  empty_ = table_.num_active() == 0;
  if (idle) mutex_.Await(absl::Condition(this, &Engine::HasMail));
  empty_ = empty_ && edits_.empty();
  taken_stream_ = stream_;
  pending_bytes_ = 0;
  return {sink_, stream_, std::exchange(edits_, {}), stop_};
}

void Engine::Loop() {
  for (bool idle = true;;) {
    const Mail mail = TakeMail(idle);
    if (mail.stop) return DropSteps();
    if (mail.stream != serving_stream_) BeginStream(mail);
    bool admitted = false;
    for (const Edit& edit : mail.edits) {
      if (absl::Status status = Apply(edit); !status.ok()) {
        Fail(status);
        break;
      }
      admitted |= edit.admit_size() > 0;
    }
    // Before its first step, so that the router knows who was here if that step ends the process.
    if (admitted && serving_ != nullptr) Report({});
    num_active_.store(table_.num_active(), std::memory_order_relaxed);
    busy_.store(table_.num_active() > 0, std::memory_order_relaxed);
    idle = serving_ == nullptr || Step();
    num_active_.store(table_.num_active(), std::memory_order_relaxed);
    busy_.store(!idle, std::memory_order_relaxed);
  }
}

void Engine::BeginStream(const Mail& mail) {
  DropSteps();
  table_.Reset();
  serving_ = mail.sink;
  serving_stream_ = mail.stream;
  steps_ = applied_edit_ = reported_edit_ = 0;
  reported_stalls_.clear();
  if (serving_ != nullptr) serving_->OnBegin(labels_.List());
}

absl::Status Engine::Apply(const Edit& edit) {
  if (edit.edit_id() != applied_edit_ + 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("edit_id is ", edit.edit_id(), "; the limit is ", applied_edit_ + 1));
  }
  for (const uint32_t slot : edit.release()) table_.Release(static_cast<int32_t>(slot));
  for (const auto& admit : edit.admit()) {
    if (auto status = table_.Admit(admit); !status.ok()) return status;
    Slot& slot = table_.at(static_cast<int32_t>(admit.slot()));
    labels_.Admitted(static_cast<int32_t>(admit.slot()), slot);
    slot.num_draft_computed_tokens = labels_.NumDraftComputed(slot);
    if (slot.has_penalties()) ResetHistory(admit);
  }
  for (const auto& extend : edit.extend()) {
    if (auto status = table_.Extend(extend); !status.ok()) return status;
    labels_.Extended(static_cast<int32_t>(extend.slot()), extend.block_table());
  }
  for (const auto& rank : edit.rank()) table_.SetRank(rank);
  for (const auto& draft : edit.draft()) table_.SetDraft(draft);
  applied_edit_ = edit.edit_id();
  return absl::OkStatus();
}

void Engine::ResetHistory(const worker::v1::Admit& admit) {
  std::vector<int32_t> known(admit.cached_token_ids().begin(), admit.cached_token_ids().end());
  known.insert(known.end(), admit.token_ids().begin(), admit.token_ids().end());
  const int64_t length = int64_t{admit.num_cached_tokens()} + admit.token_ids_size();
  const auto num_known = static_cast<int64_t>(known.size());
  const int64_t num_prompt = std::max<int64_t>(0, num_known - (length - admit.num_prompt_tokens()));
  const Vec<const int32_t> tokens(known.data(), num_known);
  model_->ResetHistory(static_cast<int>(admit.slot()), tokens.Slice(0, num_prompt),
                       tokens.Slice(num_prompt, num_known - num_prompt));
}

// A step is launched as soon as there is room for it, so that the device never waits for the host: its results are
// taken while the next one runs. But where tokens are guessed the next step begins where the guesses end, so it waits.
bool Engine::Step() {
  if (num_flying_ > 0 && (table_.num_drafting() > 0 || flying_.front().plan.num_guesses > 0)) {
    TakeResults();
    return false;
  }
  PrepareGuesses();
  StepPlan plan = PackStep(table_, options_.limits, options_.step_cost, options_.step_target_us);
  if (plan.chunks.empty() && num_flying_ == 0) {
    ReportIfNews(plan);
    return true;
  }
  if (!plan.chunks.empty()) {
    Launch(std::move(plan));
    if (num_flying_ < flying_.size()) return false;
  }
  TakeResults();
  return num_flying_ == 0 && table_.num_active() == 0;
}

void Engine::PrepareGuesses() {
  if (table_.num_drafting() == 0) return;
  for (int32_t id = 0; id < options_.limits.num_slots; ++id) {
    Slot& slot = table_.at(id);
    if (slot.max_drafts == 0 || !slot.is_decoding()) continue;
    std::vector<int32_t>& tokens = slot.all_token_ids;
    if (tokens.empty() && !labels_.AppendCachedTokens(slot, &tokens)) {  // nobody knows what is in its blocks
      tokens.clear();
      table_.StopDrafting(id);
      continue;
    }
    tokens.insert(tokens.end(), slot.token_ids.begin() + (std::ssize(tokens) - slot.num_cached_tokens),
                  slot.token_ids.end());
    if (slot.draft_method != worker::v1::DRAFT_METHOD_LOOKUP) continue;
    slot.guesses = Guess({tokens.data(), std::ssize(tokens)}, slot.most_drafts(), options_.draft_table.get());
  }
}

void Engine::ReportIfNews(const StepPlan& plan) {
  const bool news = applied_edit_ != reported_edit_ || plan.stalled != reported_stalls_;
  if (!news) return;
  reported_stalls_ = plan.stalled;
  StepReport report;
  report.mutable_stalled_slots()->Assign(plan.stalled.begin(), plan.stalled.end());
  Report(std::move(report));
}

void Engine::Launch(StepPlan plan) {
  FlyingStep& step = flying_[num_flying_++];
  step.plan = std::move(plan);
  step.report = StepReport();
  step.launched = std::chrono::steady_clock::now();
  BuildStep(table_, step.plan, step.input, step.report);
  model_->Launch(step.input);
  AdvancePast(step.plan, table_);
}

void Engine::TakeResults() {
  FlyingStep& step = flying_.front();
  model_->Await(output_);
  ApplyStep(step.input, output_, step.plan, table_, step.report);
  LabelBlocks(step.plan);
  ReleaseEnded(step.report);
  // The device works on one step at a time, so a step begins where the one before it ends.
  const auto end = std::chrono::steady_clock::now();
  const int64_t us =
      std::chrono::duration_cast<std::chrono::microseconds>(end - std::max(step.launched, last_end_)).count();
  last_end_ = end;
  step.report.set_step_us(static_cast<uint32_t>(std::clamp<int64_t>(us, 1, UINT32_MAX)));
  step.report.set_draft_us(static_cast<uint32_t>(std::clamp<double>(output_.draft_us, 0, step.report.step_us())));
  ++steps_;
  // An edit since the launch may have released some: the report acknowledges it, so it may not name them any more.
  std::erase_if(step.plan.stalled, [&](int32_t id) { return !table_.at(id).active; });
  step.report.mutable_stalled_slots()->Assign(step.plan.stalled.begin(), step.plan.stalled.end());
  reported_stalls_ = step.plan.stalled;
  Report(std::move(step.report));
  std::rotate(flying_.begin(), flying_.begin() + 1, flying_.begin() + static_cast<std::ptrdiff_t>(num_flying_));
  --num_flying_;
}

// What a step computes is there to be read once it has ended, and all tokens before that are known.
void Engine::LabelBlocks(const StepPlan& plan) {
  for (const StepPlan::Chunk& chunk : plan.chunks) {
    const Slot& slot = table_.at(chunk.slot);
    if (!slot.active || slot.order != chunk.order) continue;
    labels_.Computed(chunk.slot, slot, chunk.end);
    if (chunk.num_unread == 0 || table_.draft_shares_cache()) continue;
    const int32_t before = slot.num_draft_computed_tokens - chunk.num_unread - chunk.num_guesses;
    labels_.DraftComputed(slot, std::max(0, before), slot.num_draft_computed_tokens);
  }
}

void Engine::ReleaseEnded(const StepReport& report) {
  for (const auto& row : report.rows()) {
    if (row.finish_reason() == worker::v1::FINISH_REASON_UNSPECIFIED) continue;
    const auto id = static_cast<int32_t>(row.slot());
    if (row.finish_reason() == worker::v1::FINISH_REASON_NON_FINITE) labels_.Forget(table_.at(id));
    table_.Release(id);
  }
}

// What a stream launched means nothing to the next.
void Engine::DropSteps() {
  for (; num_flying_ > 0; --num_flying_) model_->Await(output_);
}

void Engine::Report(StepReport report) {
  report.set_step(steps_);
  report.set_applied_edit(applied_edit_);
  reported_edit_ = applied_edit_;
  serving_->OnReport(std::move(report));
}

void Engine::Fail(const absl::Status& status) {
  const std::shared_ptr<ReportSink> sink = std::exchange(serving_, nullptr);
  DropSteps();
  table_.Reset();
  Detach(sink.get());
  sink->OnError(status);
}

}  // namespace millrace

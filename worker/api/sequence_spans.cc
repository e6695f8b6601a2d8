#include "worker/api/sequence_spans.h"

#include <random>
#include <utility>
#include <vector>

#include "absl/time/clock.h"

namespace millrace {
namespace {

uint64_t DrawSpanId() {
  std::random_device random;
  return (uint64_t{random()} << 32 | random()) | 1;
}

absl::string_view EndingName(worker::v1::FinishReason reason) {
  switch (reason) {
    case worker::v1::FINISH_REASON_STOP_TOKEN:
      return "stop";
    case worker::v1::FINISH_REASON_LENGTH:
      return "length";
    default:
      return "error";
  }
}

}  // namespace

SequenceSpans::~SequenceSpans() {
  absl::MutexLock lock(&mutex_);
  while (!entries_.empty()) End(entries_.begin()->first, "lost");
}

void SequenceSpans::OnEdit(const worker::v1::Edit& edit) {
  if (exporter_ == nullptr) return;
  bool traced = num_traced_.load(std::memory_order_relaxed) > 0;
  for (const worker::v1::Admit& admit : edit.admit()) traced = traced || !admit.traceparent().empty();
  if (!traced) return;
  absl::MutexLock lock(&mutex_);
  for (const uint32_t slot : edit.release()) End(slot, "released");
  for (const worker::v1::Admit& admit : edit.admit()) {
    End(admit.slot(), "released");
    const std::optional<TraceContext> parent = ParseTraceparent(admit.traceparent());
    if (!parent.has_value() || !parent->sampled) continue;
    Entry& entry = entries_[admit.slot()];
    entry.parent = *parent;
    entry.edit_id = edit.edit_id();
    entry.admitted = absl::GetCurrentTimeNanos() / 1000;
    entry.cached = admit.num_cached_tokens();
    entry.prefilled = admit.token_ids_size();
  }
  num_traced_.store(entries_.size(), std::memory_order_relaxed);
}

void SequenceSpans::OnReport(const worker::v1::StepReport& report) {
  if (num_traced_.load(std::memory_order_relaxed) == 0) return;
  absl::MutexLock lock(&mutex_);
  for (const worker::v1::Row& row : report.rows()) {
    const auto found = entries_.find(row.slot());
    if (found == entries_.end() || report.applied_edit() < found->second.edit_id) continue;
    Entry& entry = found->second;
    entry.generated += row.token_ids_size();
    if (entry.first_token == 0 && row.token_ids_size() > 0) entry.first_token = absl::GetCurrentTimeNanos() / 1000;
    if (row.finish_reason() != worker::v1::FINISH_REASON_UNSPECIFIED) {
      End(row.slot(), EndingName(row.finish_reason()));
    }
  }
  num_traced_.store(entries_.size(), std::memory_order_relaxed);
}

void SequenceSpans::End(uint32_t slot, absl::string_view ending) {
  const auto found = entries_.find(slot);
  if (found == entries_.end()) return;
  const Entry& entry = found->second;
  otlp::Span span = MakeSpan(entry.parent, DrawSpanId(), "sequence", otlp::Span::KIND_SERVER, entry.admitted,
                             absl::GetCurrentTimeNanos() / 1000);
  auto* const attributes = span.mutable_attributes();
  AddAttribute("millrace.slot", int64_t{slot}, attributes);
  AddAttribute("millrace.ending", ending, attributes);
  AddAttribute("millrace.cached_tokens", entry.cached, attributes);
  AddAttribute("millrace.prefilled_tokens", entry.prefilled, attributes);
  AddAttribute("gen_ai.usage.output_tokens", entry.generated, attributes);
  if (entry.first_token != 0) {
    otlp::Event* const event = span.add_events();
    event->set_name("first_token");
    event->set_time_unix_nano(static_cast<uint64_t>(entry.first_token) * 1000);
  }
  entries_.erase(found);
  std::vector<otlp::Span> spans;
  spans.push_back(std::move(span));
  exporter_->Add(std::move(spans));
}

}  // namespace millrace

#include "tests/cluster/in_process.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <optional>

#include "gtest/gtest.h"
#include "tests/test_stream.h"
#include "worker/engine/step_cost.h"
#include "worker/model/kv_cache.h"

namespace millrace {

class InProcessCluster::Sink final : public ReportSink {
 public:
  explicit Sink(Mailbox& mailbox) : mailbox_(mailbox) {}
  void OnReport(worker::v1::StepReport report) override {
    absl::MutexLock lock(&mailbox_.mutex);
    mailbox_.reports.emplace_back(this, std::move(report));
  }
  void OnBegin(std::vector<worker::v1::CachedBlocks> cached) override {
    absl::MutexLock lock(&mailbox_.mutex);
    cached_ = std::move(cached);
  }
  std::vector<worker::v1::CachedBlocks> AwaitCached() {
    absl::MutexLock lock(&mailbox_.mutex);
    const auto begun = [this] { return cached_.has_value(); };
    mailbox_.mutex.Await(absl::Condition(&begun));
    return *std::move(cached_);
  }
  void OnError(absl::Status status) override { ADD_FAILURE() << "the engine refused an edit: " << status; }

 private:
  Mailbox& mailbox_;
  std::optional<std::vector<worker::v1::CachedBlocks>> cached_;  // guarded by the mailbox's mutex
};

SchedulerOptions InProcessCluster::Options(int lease_tokens_ahead, bool speculation) {
  SchedulerOptions options;
  options.lease_tokens_ahead = lease_tokens_ahead;
  options.speculation = speculation;
  options.hash_key[0] = 0x243f6a8885a308d3;
  options.hash_key[1] = 0x13198a2e03707344;
  return options;
}

void InProcessCluster::AddWorker(const WorkerShape& shape) {
  ModelRunnerOptions options;
  options.model_dir = model_dir_;
  options.kv_bytes = 1;  // replaced below, once the block's size is known
  options.max_slots = shape.num_slots;
  options.max_rows = shape.max_rows;
  options.max_logit_rows = std::max(shape.num_slots, 64) + 128;
  options.draft_model_dir = shape.draft_model;
  options.draft_layers = shape.draft_layers;
  const auto config = ModelConfig::Load(model_dir_);
  ASSERT_TRUE(config.ok()) << config.status();
  const auto block_bytes = TestsRunOnGpu() ? KvCache<bf16>::BlockBytes : KvCache<float>::BlockBytes;
  options.kv_bytes = shape.num_blocks * block_bytes(*config);
  if (!shape.draft_model.empty()) {
    const auto draft_config = ModelConfig::Load(shape.draft_model);
    ASSERT_TRUE(draft_config.ok()) << draft_config.status();
    options.kv_bytes += shape.num_blocks * block_bytes(*draft_config);
  }
  auto runner = ModelRunner::Load(options, OpenTestStream(2));
  ASSERT_TRUE(runner.ok()) << runner.status();
  ASSERT_EQ((*runner)->num_blocks(), shape.num_blocks);

  worker::v1::Ready ready;
  ready.set_worker_id("worker-" + std::to_string(workers_.size()));
  ready.set_instance_id(std::to_string(workers_.size()));
  ready.mutable_model()->set_name("test");
  ready.mutable_model()->set_vocab_size(static_cast<uint32_t>(config->vocab_size));
  const auto max_context = static_cast<uint32_t>(std::min(config->max_position, shape.num_blocks * kBlockTokens));
  ready.mutable_model()->set_max_context(max_context);
  ready.mutable_model()->set_fingerprint("test");
  ready.set_num_blocks(static_cast<uint32_t>(shape.num_blocks));
  ready.set_block_tokens(kBlockTokens);
  ready.set_num_slots(static_cast<uint32_t>(shape.num_slots));
  ready.set_step_target_us(static_cast<uint32_t>(shape.step_target_us));
  worker::v1::StepCost& cost = *ready.mutable_step_cost();
  cost.set_step_us(100);
  cost.set_prefill_token_us(20);
  cost.set_prefill_context_ns(10);
  cost.set_row_us(20);
  cost.set_context_ns(100);

  auto draft_table = DraftTable::Load(model_dir_ / DraftTable::kFileName, config->vocab_size);
  ASSERT_TRUE(draft_table.ok()) << draft_table.status();
  EngineOptions engine;
  engine.draft_table = *std::move(draft_table);
  engine.limits = {shape.num_slots,          static_cast<int32_t>(shape.num_blocks),
                   config->vocab_size,       static_cast<int32_t>(max_context),
                   shape.max_rows,           options.max_logit_rows,
                   (*runner)->draft_model(), (*runner)->guesses_with_penalties()};
  engine.step_cost = cost;
  engine.step_target_us = shape.step_target_us;
  measured_ = shape.measured;
  if (measured_) {
    cost = engine.step_cost = MeasureStepCost(**runner, engine.limits);
    const auto drafters = MeasureDrafters(**runner, engine.limits);
    ready.mutable_drafters()->Assign(drafters.begin(), drafters.end());
    PassTime();
  }
  // Otherwise as if drafting were cheap, so that there is much of it.
  for (const auto method : {worker::v1::DRAFT_METHOD_LOOKUP, worker::v1::DRAFT_METHOD_MODEL}) {
    if (measured_ || (method == worker::v1::DRAFT_METHOD_MODEL && engine.limits.draft_model == DraftModel::kNone)) {
      continue;
    }
    worker::v1::Drafter& drafter = *ready.add_drafters();
    drafter.set_method(method);
    drafter.set_max_length(kMaxDrafts);
    drafter.set_step_us(1);
  }
  Worker worker;
  worker.engine = std::make_unique<Engine>(*std::move(runner), engine);
  worker.sink = std::make_shared<Sink>(mailbox_);
  worker.engine->Attach(worker.sink);
  const auto id = scheduler_->AddWorker(ready, now_);
  ASSERT_TRUE(id.ok()) << id.status();
  worker.id = *id;
  worker.ready = ready;
  workers_.push_back(std::move(worker));
}

void InProcessCluster::PassTime() {
  const auto since = std::chrono::steady_clock::now().time_since_epoch();
  now_ = measured_ ? std::chrono::duration_cast<std::chrono::microseconds>(since).count() : now_ + 1000;
}

void InProcessCluster::LoseWorker(size_t index) {
  Worker& worker = workers_[index];
  worker.engine->Detach(worker.sink.get());
  worker.sink = nullptr;
  scheduler_->RemoveWorker(worker.id, now_);
}

void InProcessCluster::RestartRouter() {
  ++options_.hash_key[0];
  scheduler_ = std::make_unique<Scheduler>(options_);
  for (Worker& worker : workers_) {
    worker.sink = std::make_shared<Sink>(mailbox_);
    worker.engine->Attach(worker.sink);
    const auto id = scheduler_->AddWorker(worker.ready, now_, worker.sink->AwaitCached());
    ASSERT_TRUE(id.ok()) << id.status();
    worker.id = *id;
  }
}

void InProcessCluster::PostEdits() {
  for (const WorkerId id : scheduler_->PendingWorkers()) {
    const auto worker = std::ranges::find(workers_, id, &Worker::id);
    ASSERT_NE(worker, workers_.end());
    worker::v1::Edit edit = scheduler_->TakeEdit(id);
    if (editor_) editor_(&edit);
    ASSERT_TRUE(worker->engine->Post(worker->sink.get(), std::move(edit)).ok());
  }
}

std::vector<Output> InProcessCluster::Run(std::vector<std::vector<SequenceSpec>> groups, int reports_between,
                                          const std::function<void(int)>& on_report) {
  std::map<SequenceId, size_t> place;
  std::vector<Output> outputs;
  size_t next_group = 0, ended = 0;
  const auto submit = [&] {
    auto ids = scheduler_->Submit(std::move(groups[next_group++]), now_);
    ASSERT_TRUE(ids.ok()) << ids.status();
    for (const SequenceId id : *ids) {
      place[id] = outputs.size();
      outputs.emplace_back();
    }
  };
  PassTime();
  submit();
  PostEdits();
  for (int num_reports = 0; next_group < groups.size() || ended < outputs.size();) {
    std::pair<const ReportSink*, worker::v1::StepReport> mail;
    {
      absl::MutexLock lock(&mailbox_.mutex);
      mailbox_.mutex.Await(absl::Condition(&mailbox_, &Mailbox::HasReport));
      mail = std::move(mailbox_.reports.front());
      mailbox_.reports.pop_front();
    }
    const auto worker = std::ranges::find_if(workers_, [&](const Worker& w) { return w.sink.get() == mail.first; });
    if (worker == workers_.end()) continue;  // of a lost worker
    PassTime();
    for (const auto& row : mail.second.rows()) {
      num_drafted_ += row.num_drafted();
      num_right_ += std::max(0, row.token_ids_size() - 1);
    }
    const absl::Status applied = scheduler_->Apply(worker->id, mail.second, now_);
    if (!applied.ok()) {
      ADD_FAILURE() << "the core refused a report: " << applied;
      return outputs;
    }
    ++num_reports;
    if (next_group < groups.size() && num_reports >= static_cast<int>(next_group) * reports_between) submit();
    if (on_report) on_report(num_reports);
    for (SequenceEvent& event : scheduler_->TakeEvents()) {
      Output& output = outputs[place.at(event.sequence)];
      output.tokens.insert(output.tokens.end(), event.token_ids.begin(), event.token_ids.end());
      for (const auto& logprobs : event.logprobs) output.logprobs.push_back(logprobs.logprob());
      if (!event.finished) continue;
      output.status = event.status;
      output.report = scheduler_->Report(event.sequence);
      ++ended;
    }
    if (ended == outputs.size() && next_group < groups.size()) submit();  // else no report would come any more
    PostEdits();
  }
  return outputs;
}

}  // namespace millrace

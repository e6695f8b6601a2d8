#include "tests/cluster/sim/decider.h"

#include <algorithm>
#include <ctime>
#include <utility>

#include "kernels/check.h"

namespace millrace {
namespace {

constexpr uint32_t kMaxContext = 1 << 28;
constexpr uint32_t kSpareTokens = 1024;         // room for the answer behind a prompt
constexpr int32_t kFirstOutputToken = 1 << 30;  // above every token of a prompt; which one, tells the request

int32_t OutputToken(const TraceRequest& request) {
  return kFirstOutputToken + static_cast<int32_t>(request.id % kFirstOutputToken);
}

}  // namespace

double ThreadMicroseconds() {
  timespec time;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) * 1e6 + static_cast<double>(time.tv_nsec) * 1e-3;
}

nlohmann::json Decider::Answer(const Json& event) {
  scheduler_us_ = 0;
  const std::string kind = event.at("event");
  if (kind == "end") return Json::object();
  now_ = event.at("now").get<Time>() + 1;  // the Scheduler's zero means never
  if (kind == "hello") return Hello(event);
  for (size_t place = 0; place < workers_.size(); ++place) workers_[place].ledger->free = event.at("free").at(place);
  if (kind == "need") return {{"do", Need(event.at("worker"))}};
  if (kind == "arrive") Arrive(event);
  if (kind == "step") Step(event);
  if (kind == "preempt") Preempt(event);
  if (kind == "left") Left(event.at("worker"));
  if (kind == "joined") Join(event.at("worker"));
  return {{"do", Flush()}};
}

nlohmann::json Decider::Hello(const Json& event) {
  MILLRACE_CHECK(event.at("block_tokens") == kTraceBlock, "the trace's blocks have 512 tokens");
  SchedulerOptions options;
  options.max_queued_sequences = 1 << 24;
  options.max_queued_tokens = int64_t{1} << 40;
  scheduler_ = std::make_unique<Scheduler>(options);
  const Json& cost = event.at("cost");
  const double rate = cost.at("prefill_tokens_per_s");
  for (const Json& worker : event.at("workers")) {
    worker::v1::Ready ready;
    ready.mutable_model()->set_vocab_size(INT32_MAX);
    ready.mutable_model()->set_max_context(kMaxContext);
    ready.set_num_blocks(worker.at("blocks"));
    ready.set_block_tokens(kTraceBlock);
    ready.set_num_slots(worker.at("slots"));
    ready.set_step_target_us(std::max(1u, static_cast<uint32_t>(cost.at("step_target_us").get<double>())));
    ready.mutable_step_cost()->set_step_us(cost.at("step_us"));
    ready.mutable_step_cost()->set_prefill_token_us(1e6 / rate);
    ready.mutable_step_cost()->set_prefill_context_ns(1e9 / rate / cost.at("attention_span").get<double>());
    ready.mutable_step_cost()->set_row_us(cost.at("row_us"));
    ready.mutable_step_cost()->set_context_ns(cost.at("kv_ns_per_token"));
    workers_.emplace_back().ready = ready;
  }
  for (size_t place = 0; place < workers_.size(); ++place) Join(place);
  return {{"protocol", 1}, {"name", "millrace"}, {"blocks", "decider"}, {"order", "rank"}};
}

void Decider::Join(size_t place) {
  Worker& worker = workers_.at(place);
  worker::v1::Ready ready = std::move(worker.ready);
  worker = Worker{};
  worker.ledger = std::make_unique<Ledger>(ready.num_blocks());
  worker.ledger->free = ready.num_blocks();
  worker.slots.resize(ready.num_slots());
  const absl::StatusOr<WorkerId> id = scheduler_->AddWorker(ready, now_);
  MILLRACE_CHECK(id.ok(), "the Scheduler takes the worker");
  worker.ready = std::move(ready);
  worker.id = *id;
  places_[*id] = place;
  TakeEdits();
}

TraceRequest& Decider::At(int64_t id) {
  const auto found = requests_.find(id);
  MILLRACE_CHECK(found != requests_.end(), "events name requests that are here", static_cast<long long>(id));
  return *found->second;
}

void Decider::Arrive(const Json& event) {
  const int64_t id = event.at("request");
  if (missing_ > 0) {
    TraceRequest& request = At(id);
    request.length = request.tokens + event.at("generated").get<uint32_t>();
    if (--missing_ == 0) Lost(leaving_);
    return;
  }
  auto request = std::make_unique<TraceRequest>();
  request->id = id;
  request->tokens = event.at("tokens");
  request->length = request->tokens + event.at("generated").get<uint32_t>();
  for (const Json& block : event.at("blocks")) {
    const auto [name, is_new] = names_.try_emplace(block.get<int64_t>(), static_cast<BlockName>(names_.size()));
    if (is_new) {
      trace_names_.push_back(name->first);
      depths_.push_back(static_cast<uint32_t>(request->blocks.size()));
    }
    MILLRACE_CHECK(depths_[static_cast<size_t>(name->second)] == request->blocks.size(),
                   "an id names everything before it, so it has one place", static_cast<long long>(name->first));
    request->blocks.push_back(name->second);
  }
  MILLRACE_CHECK(names_.size() < kFirstOutputToken / kTraceBlock, "tokens of prompts are below those of outputs");
  Submit(request.get());
  requests_[id] = std::move(request);
  TakeEdits();
}

std::vector<int32_t> Decider::Prompt(const TraceRequest& request) const {
  std::vector<int32_t> tokens;
  tokens.reserve(request.length + kSpareTokens);
  tokens.resize(request.length, OutputToken(request));
  for (uint32_t i = 0; i < request.tokens && i / kTraceBlock < request.blocks.size(); ++i) {
    tokens[i] =
        request.blocks[i / kTraceBlock] * static_cast<int32_t>(kTraceBlock) + static_cast<int32_t>(i % kTraceBlock);
  }
  return tokens;
}

// Output lengths are not told: it may be as long as the pools allow.
void Decider::Submit(TraceRequest* request) {
  int64_t smallest = INT64_MAX;
  for (const Worker& worker : workers_) smallest = std::min<int64_t>(smallest, worker.ready.num_blocks());
  smallest *= kTraceBlock;
  const int64_t longest = request->length + 4096 < smallest ? smallest : scheduler_->max_sequence_tokens();
  SequenceSpec spec;
  spec.prompt = Prompt(*request);
  spec.max_tokens = static_cast<int32_t>(longest - request->length);
  spec.sampling.set_repetition_penalty(1);
  spec.sampling.set_seed(static_cast<uint64_t>(request->id));
  std::vector<SequenceSpec> specs;
  specs.push_back(std::move(spec));
  const absl::StatusOr<std::vector<SequenceId>> ids = Ask([&] { return scheduler_->Submit(std::move(specs), now_); });
  MILLRACE_CHECK(ids.ok(), "the Scheduler takes the request", static_cast<long long>(request->id));
  request->sequence = ids->front();
  request->fed = request->length;
  by_sequence_[request->sequence] = request;
}

// A client that tries again with the tokens that it has.
void Decider::SubmitAgain(TraceRequest* request) {
  scheduler_->Cancel(request->sequence, now_);
  by_sequence_.erase(request->sequence);
  Submit(request);
}

void Decider::Preempt(const Json& event) {
  TraceRequest& request = At(event.at("request"));
  Worker& worker = workers_.at(request.worker);
  request.length = request.tokens + event.at("generated").get<uint32_t>();
  Feed(&worker);
  Leave(&worker, &request);
  if (request.fed == request.length) {
    scheduler_->Requeue(request.sequence, now_);
  } else {
    SubmitAgain(&request);
  }
  TakeEdits();
}

void Decider::Leave(Worker* worker, TraceRequest* request) {
  std::vector<BlockName> evicted;
  worker->ledger->End(*request, &evicted);
  Evict(worker, std::move(evicted));
  worker->slots[request->slot] = nullptr;
  std::erase(worker->rows, request);
  request->running = request->told = request->decoding = false;
}

// Its requests arrive again, one by one; until then nothing can be decided about them.
void Decider::Left(size_t place) {
  Worker& worker = workers_.at(place);
  worker.outbox.clear();
  worker.evictions.clear();
  scheduler_->DrainWorker(*worker.id);
  leaving_ = place;
  for (const TraceRequest* request : worker.slots) missing_ += request != nullptr && request->told ? 1 : 0;
  if (missing_ == 0) Lost(place);
}

void Decider::Lost(size_t place) {
  Worker& worker = workers_[place];
  Feed(&worker);
  const WorkerId gone = *std::exchange(worker.id, std::nullopt);
  std::vector<TraceRequest*> lost = std::exchange(worker.slots, {});
  std::erase(lost, nullptr);
  worker.rows.clear();
  worker.outbox.clear();
  worker.evictions.clear();
  for (TraceRequest* request : lost) request->running = request->told = request->decoding = false;
  scheduler_->RemoveWorker(gone, now_);
  places_.erase(gone);
  for (TraceRequest* request : lost) {
    if (request->fed != request->length) SubmitAgain(request);
  }
  TakeEdits();
}

worker::v1::StepReport Decider::Report(Worker* worker) const {
  worker::v1::StepReport report;
  report.set_step(++worker->step);
  report.set_applied_edit(worker->edit);
  return report;
}

void Decider::Apply(Worker* worker, const worker::v1::StepReport& report) {
  const absl::Status status = Ask([&] { return scheduler_->Apply(*worker->id, report, now_); });
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
  MILLRACE_CHECK(status.ok(), "the Scheduler accepts a report");
}

// Up to `length` tokens, but not beyond its lease: there the Scheduler would make room by preemption, which is the
// judge's to decide. Returns how many were added.
uint32_t Decider::AddTokens(TraceRequest* request, uint32_t length, worker::v1::StepReport* report) const {
  const uint32_t before = request->fed;
  length = std::min(length, request->lease * kTraceBlock);
  if (length <= request->fed) return 0;
  for (; request->fed < length; ++request->fed) {  // a row each: nothing was guessed
    worker::v1::Row* row = report->add_rows();
    row->set_slot(request->slot);
    row->add_token_ids(OutputToken(*request));
  }
  return request->fed - before;
}

void Decider::Feed(Worker* worker) {
  for (bool more = true; more;) {
    worker::v1::StepReport report = Report(worker);
    more = false;
    for (TraceRequest* row : worker->rows) {
      more |= AddTokens(row, row->length, &report) > 0;
      if (row->fed < row->length) report.add_stalled_slots(row->slot);
    }
    if (!more && report.stalled_slots().empty()) return;
    Apply(worker, report);
    TakeEdits();
  }
}

// A decoding row needs a block. Which one, the judge does not say: the row that is next to need one here gets its
// tokens ahead of time. False if no row can take a block.
bool Decider::Starve(Worker* worker) {
  TraceRequest* next = nullptr;
  const auto left = [](const TraceRequest* row) { return row->lease * kTraceBlock - row->fed; };
  for (TraceRequest* row : worker->rows) {
    if (left(row) > 0 && (next == nullptr || left(row) < left(next))) next = row;
  }
  if (next == nullptr) return false;
  worker::v1::StepReport report = Report(worker);
  AddTokens(next, next->lease * kTraceBlock, &report);
  Apply(worker, report);
  TakeEdits();
  return true;
}

nlohmann::json Decider::Need(size_t place) {
  Json answer = Json::array();
  do {
    FlushEvictions(place, &answer);
  } while (answer.empty() && Starve(&workers_.at(place)));
  MILLRACE_CHECK(!answer.empty(), "the Scheduler frees a block for a row that needs one");
  return answer;
}

void Decider::Step(const Json& event) {
  Worker& worker = workers_.at(event.at("worker"));
  worker::v1::StepReport report = Report(&worker);
  // Every row that goes on has got the same number of tokens since the last report.
  int64_t context = event.at("context");
  auto num_going_on = static_cast<int64_t>(worker.rows.size());
  for (const TraceRequest* row : worker.rows) context -= row->length;
  std::vector<TraceRequest*> ended, started;
  for (const Json& did : event.at("did")) {
    TraceRequest& request = At(did.at(0));
    const uint32_t computed = did.at(1);
    const bool ends = did.at(2) == 1;
    if (ends) ended.push_back(&request);
    if (request.decoding) {
      context += request.length;
      --num_going_on;
      continue;
    }
    if (computed > request.computed) {
      request.computed = computed;
      worker::v1::Progress* progress = report.add_prefill();
      progress->set_slot(request.slot);
      progress->set_num_computed_tokens(computed);
    }
    if (computed < request.length) continue;
    request.decoding = true;
    started.push_back(&request);
    if (!ends) context -= ++request.length;
  }
  MILLRACE_CHECK(num_going_on == 0 ? context == 0 : context >= 0 && context % num_going_on == 0,
                 "rows advance together", static_cast<long long>(context), static_cast<long long>(num_going_on));
  for (TraceRequest* row : worker.rows) {
    if (num_going_on > 0) row->length += static_cast<uint32_t>(context / num_going_on);
  }
  worker.rows.insert(worker.rows.end(), started.begin(), started.end());
  for (TraceRequest* row : worker.rows) {
    if (std::find(ended.begin(), ended.end(), row) == ended.end()) {
      AddTokens(row, row->length, &report);
      continue;
    }
    worker::v1::Row* last = report.add_rows();
    last->set_slot(row->slot);
    last->add_token_ids(OutputToken(*row));
    last->set_finish_reason(worker::v1::FINISH_REASON_STOP_TOKEN);
  }
  for (TraceRequest* request : ended) Leave(&worker, request);
  Apply(&worker, report);
  for (const TraceRequest* request : ended) {
    by_sequence_.erase(request->sequence);
    requests_.erase(request->id);
  }
  TakeEdits();
  Feed(&worker);
}

void Decider::TakeEdits() {
  for (;;) {
    for (const SequenceEvent& event : Ask([&] { return scheduler_->TakeEvents(); })) {
      const auto found = by_sequence_.find(event.sequence);
      if (found != by_sequence_.end() && !event.status.ok()) SubmitAgain(found->second);  // it lost two workers
    }
    const std::vector<WorkerId> pending = Ask([&] { return scheduler_->PendingWorkers(); });
    if (pending.empty()) return;
    for (const WorkerId id : pending) {
      Worker& worker = workers_[places_.at(id)];
      if (TakeEdit(places_.at(id))) Apply(&worker, Report(&worker));
    }
  }
}

bool Decider::TakeEdit(size_t place) {
  Worker& worker = workers_[place];
  const worker::v1::Edit edit = Ask([&] { return scheduler_->TakeEdit(*worker.id); });
  worker.edit = edit.edit_id();
  std::vector<BlockName> evicted;
  for (const worker::v1::Extend& extend : edit.extend()) {
    TraceRequest* const request = worker.slots.at(extend.slot());
    if (request == nullptr) continue;
    worker.ledger->Give(*request, request->lease, {extend.block_table().begin(), extend.block_table().end()}, &evicted);
    request->lease += static_cast<uint32_t>(extend.block_table_size());
  }
  for (const worker::v1::Admit& admit : edit.admit()) Admit(place, admit, &evicted);
  Evict(&worker, std::move(evicted));
  for (const worker::v1::Rank& rank : edit.rank()) {
    const TraceRequest* const request = worker.slots.at(rank.slot());
    if (request != nullptr) worker.outbox.push_back({nullptr, request->id, rank.rank()});
  }
  return edit.release_size() > 0;
}

void Decider::Admit(size_t place, const worker::v1::Admit& admit, std::vector<BlockName>* evicted) {
  Worker& worker = workers_[place];
  TraceRequest& request = At(static_cast<int64_t>(admit.sampling().seed()));
  request.running = true;
  request.worker = place;
  request.slot = admit.slot();
  request.computed = admit.num_cached_tokens();
  request.lease = static_cast<uint32_t>(admit.block_table_size());
  worker.slots.at(admit.slot()) = &request;
  // Exact both ways: what it found is there, and it found all that it can share.
  const uint32_t found = admit.num_cached_tokens() / kTraceBlock;
  request.cached = std::min(found, request.full_blocks());
  for (uint32_t i = 0; i < request.cached; ++i) {
    MILLRACE_CHECK(worker.ledger->holds(admit.block_table(static_cast<int>(i))) == request.blocks[i],
                   "a cached block holds what the Scheduler says", static_cast<long long>(request.id), i);
  }
  MILLRACE_CHECK(request.cached >= request.shareable_blocks() || !worker.ledger->Holds(request.blocks[request.cached]),
                 "the Scheduler finds every block that is there", static_cast<long long>(request.id), request.cached);
  worker.ledger->Give(request, found, {admit.block_table().begin() + found, admit.block_table().end()}, evicted);
  worker.outbox.push_back({&request, request.id, admit.rank()});
}

void Decider::Evict(Worker* worker, std::vector<BlockName> names) {
  if (!names.empty()) worker->evictions.push_back(std::move(names));
}

// What the Scheduler has given away nobody uses, late admissions included: it can go at once.
void Decider::FlushEvictions(size_t place, Json* answer) {
  Worker& worker = workers_.at(place);
  for (std::vector<BlockName>& names : worker.evictions) {
    std::stable_sort(names.begin(), names.end(), [&](BlockName a, BlockName b) {
      return depths_[static_cast<size_t>(a)] > depths_[static_cast<size_t>(b)];
    });
    Json blocks = Json::array();
    for (const BlockName name : names) {
      worker.ledger->Evict(name);
      blocks.push_back(trace_names_[static_cast<size_t>(name)]);
    }
    answer->push_back({"evict", place, std::move(blocks)});
  }
  worker.evictions.clear();
}

nlohmann::json Decider::Flush() {
  Json answer = Json::array();
  for (size_t place = 0; place < workers_.size() && missing_ == 0; ++place) {
    Worker& worker = workers_[place];
    FlushEvictions(place, &answer);
    for (; !worker.outbox.empty(); worker.outbox.pop_front()) {
      const Action& action = worker.outbox.front();
      TraceRequest* const request = action.admit;
      if (request == nullptr) {
        answer.push_back({"rank", action.request, action.rank});
        continue;
      }
      if (!worker.ledger->Fits(*request)) break;
      const uint32_t claim = worker.ledger->Match(*request);
      MILLRACE_CHECK(claim == request->cached || request->cached >= request->shareable_blocks(),
                     "the judge has what the Scheduler found", static_cast<long long>(request->id), claim);
      worker.ledger->Admit(*request);
      request->told = true;
      answer.push_back({"admit", request->id, place, claim, action.rank});
    }
  }
  return answer;
}

}  // namespace millrace

// gpu_bench [--folder DIR] WORKLOAD…: the engine alone on one GPU, models of exact shapes with random weights. Every
// line: the figure, its share of what memory or arithmetic allow, and the runs it is the median of.
//
//   w1   nano-vllm's bench.py, Qwen3-0.6B: 256 prompts of 100 … 1,024 tokens, outputs of 100 … 1,024, temperature 0.6
//   w1c  the same, shape of Qwen2-0.5B
//   w2   Qwen3-0.6B, one sequence: 128 tokens in, 512 out
//   w3   Qwen3-8B, context of 1,024, 1 / 16 / 64 / 256 sequences
//   w7   time to first token: Qwen3-8B 2,048 tokens, Qwen3-0.6B 1,024; w7s: the latter alone
//   w10  Qwen3-8B, 64 sequences that share 8,192 tokens and have 512 of their own
//   w12  Qwen3-0.6B, 256 sequences that all stay; w12c: one ends at every step. For gpu_timeline, which sees the gaps
//   w13  Qwen3-0.6B, from the start of the process to the first token
//   exact  shape of Qwen3-0.6B: how many of 1,000 prompts get other tokens in company than alone
//   serve  leaves a folder with the model and w1.jsonl, w1's requests as a trace for `millrace bench`, and says where
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "kernels/buffer.h"
#include "kernels/check.h"
#include "nlohmann/json.hpp"
#include "tests/bench/forced_guesses.h"
#include "tests/bench/random_model.h"
#include "worker/engine/engine.h"
#include "worker/engine/step_cost.h"
#include "worker/model/model_runner.h"

namespace millrace {
namespace {

const auto process_start = std::chrono::steady_clock::now();

constexpr double kFlops = 790e12;  // bf16, what a large product reaches on an H200

double Now() { return std::chrono::duration<double>(std::chrono::steady_clock::now() - process_start).count(); }

double Median(std::vector<double> values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}

// Bytes per second of a copy, reads and writes counted.
double CopyBandwidth() {
  Stream stream = Stream::OpenCuda(0);
  constexpr size_t kBytes = size_t{4} << 30;
  const DeviceBuffer from(kBytes, stream), to(kBytes, stream);
  std::vector<double> rates;
  for (int i = 0; i < 6; ++i) {
    const double begin = Now();
    stream.Copy(to.data(), from.data(), kBytes);
    rates.push_back(2.0 * kBytes / (Now() - begin));
  }
  return Median(rates);
}

// Counts what is reported.
class Counter final : public ReportSink {
 public:
  void OnReport(worker::v1::StepReport report) override {
    const double now = Now();
    const absl::MutexLock lock(&mutex_);
    for (const auto& row : report.rows()) {
      tokens_ += row.token_ids_size();
      auto& output = outputs_[row.slot()];
      output.insert(output.end(), row.token_ids().begin(), row.token_ids().end());
      MILLRACE_CHECK(row.finish_reason() != worker::v1::FINISH_REASON_NON_FINITE, "logits are finite", row.slot());
      if (row.finish_reason() != worker::v1::FINISH_REASON_UNSPECIFIED) ++finished_;
    }
    if (tokens_ > 0 && first_token_ == 0) first_token_ = now;
    if (report.rows_size() > 0) steps_.push_back({now, report.rows_size(), report.prefill_size(), tokens_});
  }
  void OnError(absl::Status status) override {
    std::fprintf(stderr, "%s\n", status.ToString().c_str());
    std::abort();
  }

  struct Step {
    double end;
    int rows, prefills;
    int64_t tokens;  // so far
  };
  void AwaitFinished(int count) {
    const absl::MutexLock lock(&mutex_);
    const auto done = [&] { return finished_ >= count; };
    mutex_.Await(absl::Condition(&done));
  }
  double first_token() {
    const absl::MutexLock lock(&mutex_);
    return first_token_;
  }
  // Tokens by slot.
  std::map<uint32_t, std::vector<int32_t>> outputs() {
    const absl::MutexLock lock(&mutex_);
    return outputs_;
  }
  std::vector<Step> steps() {
    const absl::MutexLock lock(&mutex_);
    return steps_;
  }

 private:
  absl::Mutex mutex_;
  int64_t tokens_ = 0;
  int finished_ = 0;
  double first_token_ = 0;
  std::vector<Step> steps_;
  std::map<uint32_t, std::vector<int32_t>> outputs_;
};

struct Request {
  std::vector<int32_t> prompt;
  int output = 1;
  int cached = 0;  // leading tokens that an earlier request of the same session computed, in the pool's first blocks
  float temperature = 0;
  uint64_t seed = 0;
};

class Session {
 public:
  // With a draft model, whose guesses are right with the probability given.
  Session(const std::filesystem::path& model, int max_slots, int max_rows, const std::filesystem::path& draft = {},
          double right = 0) {
    const int max_logit_rows = draft.empty() ? max_slots : max_slots + 512;
    auto runner = ModelRunner::Load({.model_dir = model,
                                     .max_slots = max_slots,
                                     .max_rows = max_rows,
                                     .max_logit_rows = max_logit_rows,
                                     .draft_model_dir = draft},
                                    Stream::OpenCuda(0));
    if (!runner.ok()) {
      std::fprintf(stderr, "%s\n", runner.status().ToString().c_str());
      std::exit(1);
    }
    config_ = (*runner)->config();
    EngineOptions options;
    options.limits = {.num_slots = max_slots,
                      .num_blocks = static_cast<int32_t>((*runner)->num_blocks()),
                      .vocab_size = config_.vocab_size,
                      .max_context = 32'768,
                      .max_rows = max_rows,
                      .max_logit_rows = max_logit_rows,
                      .draft_model = (*runner)->draft_model(),
                      .guesses_with_penalties = (*runner)->guesses_with_penalties()};
    options.step_cost = MeasureStepCost(**runner, options.limits);
    drafters_ = MeasureDrafters(**runner, options.limits);
    options.step_target_us = 1e9;  // prefill first, as the workloads ask for
    std::unique_ptr<Model> engines_model = *std::move(runner);
    if (!draft.empty()) engines_model = std::make_unique<ForcedGuesses>(std::move(engines_model), right);
    engine_ = std::make_unique<Engine>(std::move(engines_model), options);
  }

  const ModelConfig& config() const { return config_; }
  const std::vector<worker::v1::Drafter>& drafters() const { return drafters_; }
  // What every sequence drafts from the next Run on.
  void SetDraftLength(uint32_t length) { draft_length_ = length; }

  // All requests at once, each with the blocks for its whole length. Returns the seconds to the last token.
  double Run(const std::vector<Request>& requests) {
    auto sink = std::make_shared<Counter>();
    engine_->Attach(sink);
    worker::v1::Edit edit;
    edit.set_edit_id(1);
    uint32_t next_block = 0;
    for (size_t i = 0; i < requests.size(); ++i)
      next_block = std::max<uint32_t>(next_block, Blocks(requests[i].cached));
    for (size_t i = 0; i < requests.size(); ++i) {
      const Request& request = requests[i];
      auto* admit = edit.add_admit();
      admit->set_slot(static_cast<uint32_t>(i));
      admit->set_num_cached_tokens(static_cast<uint32_t>(request.cached));
      admit->mutable_token_ids()->Assign(request.prompt.begin() + request.cached, request.prompt.end());
      admit->set_num_prompt_tokens(static_cast<uint32_t>(request.prompt.size()));
      const auto length = static_cast<int>(request.prompt.size()) + request.output;
      admit->set_max_length(static_cast<uint32_t>(length));
      for (uint32_t b = 0; b < Blocks(length); ++b) {
        admit->add_block_table(b < Blocks(request.cached) ? b : next_block++);
      }
      admit->mutable_sampling()->set_top_p(1);
      admit->mutable_sampling()->set_repetition_penalty(1);
      admit->mutable_sampling()->set_temperature(request.temperature);
      admit->mutable_sampling()->set_seed(request.seed);
      if (draft_length_ == 0) continue;
      auto* draft = edit.add_draft();
      draft->set_slot(static_cast<uint32_t>(i));
      draft->set_method(worker::v1::DRAFT_METHOD_MODEL);
      draft->set_length(draft_length_);
    }
    const double begin = Now();
    const absl::Status status = engine_->Post(sink.get(), std::move(edit));
    MILLRACE_CHECK(status.ok(), "the requests fit");
    sink->AwaitFinished(static_cast<int>(requests.size()));
    const double seconds = Now() - begin;
    first_token_ = sink->first_token() - begin;
    last_ = std::move(sink);
    return seconds;
  }
  double first_token() const { return first_token_; }
  const std::shared_ptr<Counter>& last() const { return last_; }

 private:
  static uint32_t Blocks(int tokens) { return static_cast<uint32_t>((tokens + kBlockTokens - 1) / kBlockTokens); }

  ModelConfig config_;
  std::unique_ptr<Engine> engine_;
  std::vector<worker::v1::Drafter> drafters_;
  uint32_t draft_length_ = 0;
  std::shared_ptr<Counter> last_;
  double first_token_ = 0;
};

std::vector<int32_t> Tokens(std::mt19937_64& random, size_t count) {
  std::vector<int32_t> tokens(count);
  for (int32_t& token : tokens) token = static_cast<int32_t>(random() % 10'000);
  return tokens;
}

double WeightBytes(const ModelConfig& c) {
  const double q = c.num_heads * c.head_dim, kv = c.num_kv_heads * c.head_dim, hidden = c.hidden_size;
  return 2 * (c.num_layers * (hidden * (2 * q + 2 * kv) + 3 * hidden * c.intermediate_size) + hidden * c.vocab_size);
}
double KvBytes(const ModelConfig& c) { return 4.0 * c.num_layers * c.num_kv_heads * c.head_dim; }
double PrefillFlops(const ModelConfig& c, double tokens) {
  return (WeightBytes(c) - 2.0 * c.hidden_size * c.vocab_size) * tokens +
         2.0 * c.num_layers * c.num_heads * c.head_dim * tokens * tokens;
}

void Print(const char* name, const std::string& model, double value, const char* unit, double share,
           const std::vector<double>& runs) {
  std::printf("%-4s %-34s %10.2f %-8s %5.1f %% of the limit;  %zu runs %.2f … %.2f\n", name, model.c_str(), value, unit,
              100 * share, runs.size(), *std::ranges::min_element(runs), *std::ranges::max_element(runs));
  std::fflush(stdout);
}

// Python's random.seed(0) with randint(100, 1024) gives 142,827 tokens in and 133,966 out; these lengths have the same
// law and are scaled to the same sums.
std::vector<Request> NanoVllmRequests() {
  std::mt19937_64 random(0);
  std::vector<int> in(256), out(256);
  const auto draw = [&](std::vector<int>& lengths, int sum) {
    for (int& length : lengths) length = 100 + static_cast<int>(random() % 925);
    for (size_t i = 0; std::accumulate(lengths.begin(), lengths.end(), 0) != sum; i = (i + 1) % lengths.size()) {
      const int step = std::accumulate(lengths.begin(), lengths.end(), 0) < sum ? 1 : -1;
      lengths[i] = std::clamp(lengths[i] + step, 100, 1024);
    }
  };
  draw(in, 142'827);
  draw(out, 133'966);
  std::vector<Request> requests;
  for (size_t i = 0; i < in.size(); ++i) {
    requests.push_back({Tokens(random, static_cast<size_t>(in[i])), out[i], 0, 0.6f, i});
  }
  return requests;
}

void W1(const char* name, const std::string& shape, const std::filesystem::path& folder, double bandwidth) {
  const RandomModel model(shape, folder);
  Session session(model.folder(), 256, 16'384);
  const std::vector<Request> requests = NanoVllmRequests();
  double bytes = 0, flops = 0, tokens = 0;
  int longest = 0;
  for (const Request& r : requests) {
    for (int i = 1; i < r.output; ++i) bytes += KvBytes(session.config()) * (static_cast<int>(r.prompt.size()) + i);
    flops += PrefillFlops(session.config(), static_cast<double>(r.prompt.size()));
    tokens += r.output;
    longest = std::max(longest, r.output);
  }
  bytes += (longest - 1) * WeightBytes(session.config());
  std::vector<double> rates;
  for (int run = -1; run < 5; ++run) {
    const double seconds = session.Run(requests);
    if (run >= 0) rates.push_back(tokens / seconds);
  }
  const double limit = bytes / bandwidth + flops / kFlops;
  Print(name, shape, Median(rates), "tok/s", Median(rates) * limit / tokens, rates);
}

// Milliseconds of a step that decodes `batch` sequences of `context` tokens, `shared` of them common.
void Decode(const char* name, Session& session, const std::string& shape, int batch, int context, int shared,
            double bandwidth, int steps = 48) {
  std::mt19937_64 random(1);
  const std::vector<int32_t> prefix = Tokens(random, static_cast<size_t>(shared));
  if (shared > 0) session.Run({{prefix, 1}});
  std::vector<Request> requests;
  for (int i = 0; i < batch; ++i) {
    std::vector<int32_t> prompt = prefix, own = Tokens(random, static_cast<size_t>(context - shared));
    prompt.insert(prompt.end(), own.begin(), own.end());
    requests.push_back({std::move(prompt), steps, shared});
  }
  std::vector<double> runs;
  for (int run = 0; run < 5; ++run) {
    session.Run(requests);
    std::vector<Counter::Step> all = session.last()->steps();
    std::erase_if(all, [&](const Counter::Step& s) { return s.rows != batch || s.prefills != 0; });
    MILLRACE_CHECK(all.size() > 10, "steps were measured");
    runs.push_back(1e3 * (all.back().end - all[2].end) / static_cast<double>(all.size() - 3));
  }
  const ModelConfig& c = session.config();
  const double bytes = WeightBytes(c) + KvBytes(c) * (shared + batch * (context - shared + steps / 2.0));
  const double ms = Median(runs);
  Print(name, shape + " x " + std::to_string(batch) + " at " + std::to_string(context), ms, "ms/step",
        1e3 * bytes / bandwidth / ms, runs);
  std::printf("     %40.1f tok/s\n", 1e3 * batch / ms);
}

// Tokens per second of `batch` sequences of `context` tokens that draft `length` tokens a step.
double DraftingRate(Session& session, int batch, int context, uint32_t length, int num_runs) {
  std::mt19937_64 random(1);
  std::vector<Request> requests;
  for (int i = 0; i < batch; ++i) requests.push_back({Tokens(random, static_cast<size_t>(context)), 160});
  session.SetDraftLength(length);
  std::vector<double> runs;
  for (int run = 0; run < num_runs; ++run) {
    session.Run(requests);
    std::vector<Counter::Step> all = session.last()->steps();
    std::erase_if(all, [&](const Counter::Step& s) { return s.rows != batch || s.prefills != 0; });
    MILLRACE_CHECK(all.size() > 8, "steps were measured");
    runs.push_back(static_cast<double>(all.back().tokens - all[2].tokens) / (all.back().end - all[2].end));
  }
  return Median(runs);
}

// Speculation where four of five guesses are right, by decree: the weights are random.
void W14(const std::filesystem::path& folder) {
  const RandomModel target("qwen3-8b", folder), draft("qwen3-0.6b", folder);
  constexpr double kRight = 0.8;
  Session session(target.folder(), 256, 8192, draft.folder(), kRight);
  for (const worker::v1::Drafter& drafter : session.drafters()) {
    std::printf("w14  drafter %d: %.0f us a pass, %.1f us a row, %.2f ns a token of context\n", drafter.method(),
                drafter.step_us(), drafter.row_us(), drafter.context_ns());
  }
  for (const int batch : {1, 4, 16, 32, 64, 256}) {
    const double plain = DraftingRate(session, batch, 1024, 0, batch < 64 ? 3 : 1);
    std::printf("w14  qwen3-8b + 0.6b x %d, guesses right by decree in %.0f %%: plain %.1f tok/s;", batch, 100 * kRight,
                plain);
    for (const uint32_t length : {1u, 2u, 3u, 4u, 6u, 8u}) {
      if (batch >= 64 && length > 2) break;
      const double rate = DraftingRate(session, batch, 1024, length, batch < 64 ? 3 : 1);
      std::printf("  %u: %.2f", length, rate / plain);
      std::fflush(stdout);
    }
    std::printf("\n");
  }
}

void FirstToken(const char* name, Session& session, const std::string& shape, int tokens) {
  std::mt19937_64 random(2);
  std::vector<double> runs;
  for (int run = -2; run < 7; ++run) {
    session.Run({{Tokens(random, static_cast<size_t>(tokens)), 1}});
    if (run >= 0) runs.push_back(1e3 * session.first_token());
  }
  const double ms = Median(runs);
  Print(name, shape + ", " + std::to_string(tokens) + " tokens", ms, "ms",
        1e3 * PrefillFlops(session.config(), tokens) / kFlops / ms, runs);
}

void ColdStart(const std::filesystem::path& model) {
  Session session(model, 256, 8192);
  const double ready = Now();
  std::mt19937_64 random(3);
  session.Run({{Tokens(random, 16), 1}});
  std::printf("w13  from the process's start: ready %.2f s, first token %.2f s\n", ready, Now());
}

// Tokens that differ from those of `alone`, over requests run `batch` at a time.
int64_t Differences(Session& session, const std::vector<Request>& requests, size_t batch,
                    const std::vector<std::vector<int32_t>>& alone) {
  int64_t differ = 0;
  for (size_t begin = 0; begin < requests.size(); begin += batch) {
    const size_t end = std::min(begin + batch, requests.size());
    session.Run(
        {requests.begin() + static_cast<std::ptrdiff_t>(begin), requests.begin() + static_cast<std::ptrdiff_t>(end)});
    for (const auto& [slot, tokens] : session.last()->outputs()) {
      for (size_t i = 0; i < tokens.size(); ++i) differ += tokens[i] != alone[begin + slot][i] ? 1 : 0;
    }
  }
  return differ;
}

void Exact(const std::filesystem::path& folder) {
  const RandomModel model("qwen3-0.6b", folder);
  std::mt19937_64 random(4);
  std::vector<Request> requests;
  for (uint64_t i = 0; i < 1000; ++i) {
    requests.push_back({Tokens(random, 20 + random() % 300), 16, 0, i % 2 == 0 ? 0.0f : 0.8f, i});
  }
  std::vector<std::vector<int32_t>> alone;
  const auto report = [&](const char* how, int64_t differ, size_t count) {
    std::printf("exact: %lld of %zu tokens differ from those of a prompt alone: %s\n", static_cast<long long>(differ),
                16 * count, how);
    std::fflush(stdout);
  };
  {
    Session session(model.folder(), 256, 8192);
    for (const Request& request : requests) {
      session.Run({request});
      alone.push_back(session.last()->outputs()[0]);
    }
    for (const size_t batch : {8, 64, 256}) {
      const std::string how = "in batches of " + std::to_string(batch);
      report(how.c_str(), Differences(session, requests, batch, alone), requests.size());
    }
    int64_t differ = 0;
    size_t hits = 0;
    for (size_t i = 0; i < requests.size() && hits < 200; ++i) {
      Request hit = requests[i];
      hit.cached = static_cast<int>(hit.prompt.size() - 1) / kBlockTokens * kBlockTokens;
      if (hit.cached == 0) continue;
      ++hits;
      session.Run({{{hit.prompt.begin(), hit.prompt.begin() + hit.cached}, 1}});
      differ += Differences(session, {hit}, 1, {alone[i]});
    }
    report("after a prefix hit", differ, hits);
  }
  Session session(model.folder(), 256, 256);
  report("in batches of 256 with chunks of at most 256 rows", Differences(session, requests, 256, alone),
         requests.size());
}

// Steps whose running set stays, or loses a sequence every time.
void Steady(const char* name, const std::filesystem::path& folder, bool leaving) {
  const RandomModel model("qwen3-0.6b", folder);
  Session session(model.folder(), 256, 8192);
  std::mt19937_64 random(5);
  std::vector<Request> requests;
  for (int i = 0; i < 256; ++i) requests.push_back({Tokens(random, 64), leaving ? 64 + i : 320});
  session.Run(requests);
  std::printf("%-4s qwen3-0.6b, 256 sequences: %.2f s\n", name, session.Run(requests));
}

// For a run through router and gRPC.
void LeaveForServing(const std::filesystem::path& folder) {
  RandomModel model("qwen3-0.6b", folder);
  model.Keep();
  std::ofstream trace(model.folder() / "w1.jsonl");
  int64_t block = 0;
  for (const Request& request : NanoVllmRequests()) {
    nlohmann::json ids = nlohmann::json::array();
    for (size_t begin = 0; begin < request.prompt.size(); begin += 512) ids.push_back(++block);
    trace << nlohmann::json{{"timestamp", 0},
                            {"input_length", request.prompt.size()},
                            {"output_length", request.output},
                            {"hash_ids", ids}}
          << '\n';
  }
  std::printf("%s\n", model.folder().c_str());
}

int Main(int argc, char** argv) {
  std::filesystem::path folder = "/dev/shm";
  std::vector<std::string> names;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--folder") == 0 && i + 1 < argc) {
      folder = argv[++i];
    } else {
      names.emplace_back(argv[i]);
    }
  }
  const std::vector<std::string> known = {"w1",  "w1c",  "w2",  "w3",  "w7",    "w7s",  "w10",
                                          "w12", "w12c", "w13", "w14", "exact", "serve"};
  const auto is_known = [&](const std::string& name) {
    return std::ranges::find(known, name) != known.end() || name.starts_with("w13:");
  };
  if (names.empty() || !std::ranges::all_of(names, is_known)) {
    std::fprintf(stderr, "usage: gpu_bench [--folder DIR] w1|w1c|w2|w3|w7|w7s|w10|w12|w12c|w13|exact|serve …\n");
    return 2;
  }
  if (Stream::CountCuda() == 0) {
    std::fprintf(stderr, "gpu_bench: no GPU here\n");
    return 1;
  }
  // The model is made by one process and loaded by a fresh one.
  if (names[0].starts_with("w13:")) return ColdStart(names[0].substr(4)), 0;
  if (names[0] == "serve") return LeaveForServing(folder), 0;
  const double bandwidth = CopyBandwidth();
  std::printf("copy %.2f TB/s; arithmetic taken as %.0f TFLOP/s\n", bandwidth * 1e-12, kFlops * 1e-12);
  const auto asked = [&](const char* name) { return std::ranges::find(names, name) != names.end(); };
  if (asked("exact")) Exact(folder);
  if (asked("w14")) W14(folder);
  if (asked("w1")) W1("w1", "qwen3-0.6b", folder, bandwidth);
  if (asked("w1c")) W1("w1c", "qwen2-0.5b", folder, bandwidth);
  if (asked("w12")) Steady("w12", folder, false);
  if (asked("w12c")) Steady("w12c", folder, true);
  const bool small_w7 = asked("w7") || asked("w7s");
  if (asked("w2") || small_w7 || asked("w13")) {
    const RandomModel model("qwen3-0.6b", folder);
    if (asked("w13")) {
      std::fflush(stdout);
      const std::string again =
          std::filesystem::read_symlink("/proc/self/exe").string() + " w13:" + model.folder().string();
      for (int i = 0; i < 3; ++i) MILLRACE_CHECK(std::system(again.c_str()) == 0, "a fresh process starts");
    }
    if (asked("w2") || small_w7) {
      Session session(model.folder(), 256, 8192);
      if (asked("w2")) Decode("w2", session, "qwen3-0.6b", 1, 128, 0, bandwidth, 512);
      if (small_w7) FirstToken("w7", session, "qwen3-0.6b", 1024);
    }
  }
  if (asked("w3") || asked("w7") || asked("w10")) {
    const RandomModel model("qwen3-8b", folder);
    Session session(model.folder(), 256, 8192);
    if (asked("w7")) FirstToken("w7", session, "qwen3-8b", 2048);
    if (asked("w3")) {
      for (const int batch : {1, 16, 64, 256}) Decode("w3", session, "qwen3-8b", batch, 1024, 0, bandwidth);
    }
    if (asked("w10")) Decode("w10", session, "qwen3-8b", 64, 8192 + 512, 8192, bandwidth);
  }
  return 0;
}

}  // namespace
}  // namespace millrace

int main(int argc, char** argv) { return millrace::Main(argc, argv); }

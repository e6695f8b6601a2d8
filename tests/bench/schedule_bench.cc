// What a decision costs. Targets: the match of a 4,096-token prompt with its hashing within 10 us; Submit with its
// dispatch over 16 workers within 50 us at the 99th percentile, over 64 workers with a prompt of 32,768 tokens within
// 100; 64 bytes for a cached block, besides its tokens.
#include <malloc.h>

#include <algorithm>
#include <chrono>
#include <random>
#include <vector>

#include "benchmark/benchmark.h"
#include "kernels/check.h"
#include "router/schedule/prefix_hash.h"
#include "router/schedule/prefix_index.h"
#include "router/schedule/scheduler.h"

namespace millrace {
namespace {

constexpr uint64_t kKey[2] = {1, 2};
constexpr uint32_t kBlockTokens = 32;  // as workers have it

std::vector<int32_t> Tokens(size_t n, uint64_t seed) {
  std::mt19937_64 rng(seed);
  std::vector<int32_t> tokens(n);
  for (int32_t& token : tokens) token = static_cast<int32_t>(rng() % 150'000);
  return tokens;
}

void BM_Hash(benchmark::State& state) {
  const std::vector<int32_t> tokens = Tokens(4096, 1);
  const PrefixHasher hasher(kKey);
  std::vector<PrefixHash> hashes;
  for (auto _ : state) {
    hashes.clear();
    hasher.Extend(hashes, hasher.Root(""), tokens, kBlockTokens);
    benchmark::DoNotOptimize(hashes.data());
  }
  state.SetBytesProcessed(state.iterations() * 4096 * 4);
}
BENCHMARK(BM_Hash);

// An index of 1,000 prompts of 4,096 tokens in blocks of 32; each prompt is held by `holders` of 16 workers.
void BM_HashAndMatch(benchmark::State& state) {
  const auto num_holders = static_cast<uint32_t>(state.range(0));
  const PrefixHasher hasher(kKey);
  PrefixIndex index(kBlockTokens);
  std::vector<std::vector<int32_t>> prompts;
  std::vector<PrefixHash> hashes;
  BlockId block = 0;
  for (uint64_t i = 0; i < 1000; ++i) {
    prompts.push_back(Tokens(4096, i));
    hashes.clear();
    hasher.Extend(hashes, hasher.Root(""), prompts.back(), kBlockTokens);
    EntryId parent = kNone;
    for (size_t n = 0; n < hashes.size(); ++n, ++block) {
      EntryId entry = kNone;
      for (uint32_t worker = 0; worker < num_holders; ++worker) {
        entry = index.Insert(hasher.Root(""), parent, hashes[n], prompts.back().data() + n * kBlockTokens,
                             {worker, block, kNone});
      }
      parent = entry;
    }
  }
  PrefixIndex::Match match;
  const size_t used = static_cast<size_t>(state.range(1));  // prompts in turn; 1: warm in the caches
  size_t turn = 0;
  for (auto _ : state) {
    const std::vector<int32_t>& prompt = prompts[turn++ % used];
    hashes.clear();
    hasher.Extend(hashes, hasher.Root(""), prompt, kBlockTokens);
    index.Find(hasher.Root(""), hashes, prompt.data(), 16, &match);
    MILLRACE_CHECK(match.depth[0] == 4096 / kBlockTokens, "all blocks match");
  }
}
BENCHMARK(BM_HashAndMatch)->Args({1, 1})->Args({4, 1})->Args({16, 1})->Args({1, 1000});

worker::v1::Ready Ready(uint32_t blocks, uint32_t slots) {
  worker::v1::Ready ready;
  ready.mutable_model()->set_vocab_size(150'000);
  ready.mutable_model()->set_max_context(131'072);
  ready.set_num_blocks(blocks);
  ready.set_block_tokens(kBlockTokens);
  ready.set_num_slots(slots);
  ready.set_step_target_us(45'000);
  ready.mutable_step_cost()->set_step_us(5000);
  ready.mutable_step_cost()->set_prefill_token_us(20);
  ready.mutable_step_cost()->set_prefill_context_ns(1);
  ready.mutable_step_cost()->set_row_us(20);
  ready.mutable_step_cost()->set_context_ns(20);
  return ready;
}

SequenceSpec Spec(std::vector<int32_t> prompt, int32_t max_tokens) {
  SequenceSpec spec;
  spec.prompt = std::move(prompt);
  spec.max_tokens = max_tokens;
  spec.sampling.set_repetition_penalty(1);
  return spec;
}

// The whole prompt is computed and every slot that the edit admitted got one token.
worker::v1::StepReport Answer(const worker::v1::Edit& edit, uint64_t step, bool finish) {
  worker::v1::StepReport report;
  report.set_step(step);
  report.set_applied_edit(edit.edit_id());
  for (const auto& admit : edit.admit()) {
    worker::v1::Row* row = report.add_rows();
    row->set_slot(admit.slot());
    row->add_token_ids(1);
    if (finish) row->set_finish_reason(worker::v1::FINISH_REASON_STOP_TOKEN);
  }
  return report;
}

// 16 workers of 65,536 blocks that run 64 sequences each; prompts share 24 blocks with one of 64 conversations.
void BM_SubmitAndDispatch(benchmark::State& state) {
  SchedulerOptions options;
  Scheduler scheduler(options);
  std::vector<WorkerId> workers;
  std::vector<uint64_t> steps(64, 0);
  for (int i = 0; i < 16; ++i) workers.push_back(*scheduler.AddWorker(Ready(65'536, 256), 0));
  std::vector<std::vector<int32_t>> conversations;
  for (uint64_t i = 0; i < 64; ++i) conversations.push_back(Tokens(24 * kBlockTokens, i));
  Time now = 1;
  const auto answer = [&](bool finish) {
    for (const WorkerId worker : scheduler.PendingWorkers()) {
      const worker::v1::Edit edit = scheduler.TakeEdit(worker);
      MILLRACE_CHECK(scheduler.Apply(worker, Answer(edit, ++steps[worker], finish), now).ok(),
                     "reports keep the contract");
    }
    scheduler.TakeEvents();
  };
  std::mt19937_64 rng(3);
  const auto prompt = [&] {
    std::vector<int32_t> tokens = conversations[rng() % conversations.size()];
    for (int i = 0; i < 64; ++i) tokens.push_back(static_cast<int32_t>(rng() % 150'000));
    return tokens;
  };
  for (int i = 0; i < 16 * 64; ++i) {
    MILLRACE_CHECK(scheduler.Submit({Spec(prompt(), 10'000)}, now).ok(), "it is taken");
    answer(false);
  }
  std::vector<double> times;
  for (auto _ : state) {
    std::vector<SequenceSpec> specs = {Spec(prompt(), 10'000)};
    now += 1000;
    const auto start = std::chrono::steady_clock::now();
    const bool taken = scheduler.Submit(std::move(specs), now).ok();
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    MILLRACE_CHECK(taken, "it is taken");
    state.SetIterationTime(took.count());
    times.push_back(took.count());
    answer(true);
  }
  std::sort(times.begin(), times.end());
  state.counters["p50_us"] = times[times.size() / 2] * 1e6;
  state.counters["p99_us"] = times[times.size() * 99 / 100] * 1e6;
}
BENCHMARK(BM_SubmitAndDispatch)->UseManualTime()->Iterations(20'000);

// A prompt of 32,768 tokens of which half the workers hold half, the others nothing. `admitted`: it gets its 1,024
// blocks, half of them taken from others; else every worker has its prefill ahead, and all that is decided is where it
// would go.
void BM_SubmitALongPrompt(benchmark::State& state) {
  const auto num_workers = static_cast<uint32_t>(state.range(0));
  const bool admitted = state.range(1) != 0;
  constexpr size_t kPrompt = 32'768;
  Scheduler scheduler{SchedulerOptions()};
  std::vector<uint64_t> steps(num_workers, 0);
  Time now = 1;
  const std::vector<int32_t> shared = Tokens(kPrompt / 2, 1);
  const auto answer = [&] {
    for (const WorkerId worker : scheduler.PendingWorkers()) {
      const worker::v1::StepReport report = Answer(scheduler.TakeEdit(worker), ++steps[worker], true);
      MILLRACE_CHECK(scheduler.Apply(worker, report, now).ok(), "reports keep the contract");
    }
    scheduler.TakeEvents();
  };
  for (uint32_t i = 0; i < num_workers; ++i) {
    (void)*scheduler.AddWorker(Ready(4096, 256), now);
    if (i % 2 == 1) continue;
    MILLRACE_CHECK(scheduler.Submit({Spec(shared, 10)}, now).ok(), "it is taken");
    answer();
  }
  for (uint32_t i = 0; !admitted && scheduler.counts().queued == 0; ++i) {
    (void)scheduler.Submit({Spec(Tokens(kPrompt, 1'000'000 + i), 10)}, now);
    for (const WorkerId worker : scheduler.PendingWorkers()) scheduler.TakeEdit(worker);
  }
  std::vector<double> times;
  uint64_t seed = 100;
  for (auto _ : state) {
    std::vector<int32_t> prompt = shared, own = Tokens(kPrompt / 2, ++seed);
    prompt.insert(prompt.end(), own.begin(), own.end());
    std::vector<SequenceSpec> specs = {Spec(std::move(prompt), 10)};
    now += 1000;
    const auto start = std::chrono::steady_clock::now();
    const auto ids = scheduler.Submit(std::move(specs), now);
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    MILLRACE_CHECK(ids.ok(), "it is taken");
    state.SetIterationTime(took.count());
    times.push_back(took.count());
    if (admitted) {
      answer();
    } else {
      scheduler.Cancel(ids->front(), now);
      scheduler.TakeEvents();
    }
  }
  std::sort(times.begin(), times.end());
  state.counters["p50_us"] = times[times.size() / 2] * 1e6;
  state.counters["p99_us"] = times[times.size() * 99 / 100] * 1e6;
}
BENCHMARK(BM_SubmitALongPrompt)
    ->UseManualTime()
    ->ArgNames({"workers", "admitted"})
    ->ArgsProduct({{16, 64, 1000}, {0, 1}})
    ->Iterations(500);

// Bytes of a cached block in index and pool, its tokens left out, and the match of a prompt of 128 blocks among so
// many; `range(1)` workers hold each block.
void BM_MemoryPerBlock(benchmark::State& state) {
  const auto num_blocks = static_cast<uint32_t>(state.range(0)), num_holders = static_cast<uint32_t>(state.range(1));
  constexpr size_t kPromptBlocks = 128;
  const PrefixHasher hasher(kKey);
  std::vector<PrefixHash> hashes;
  const auto heap = [] {
    const struct mallinfo2 info = mallinfo2();
    return static_cast<double>(info.uordblks + info.hblkhd);
  };
  const double before = heap();
  std::vector<BlockPool> pools;
  pools.reserve(num_holders);
  for (uint32_t i = 0; i < num_holders; ++i) pools.emplace_back(num_blocks);
  PrefixIndex index(kBlockTokens);
  index.Reserve(num_blocks);
  const auto prompt_of = [&](size_t i) { return Tokens(kPromptBlocks * kBlockTokens, i); };
  BlockId block = 0;
  for (size_t i = 0; i < num_blocks / kPromptBlocks; ++i) {
    const std::vector<int32_t> prompt = prompt_of(i);
    hashes.clear();
    hasher.Extend(hashes, hasher.Root(""), prompt, kBlockTokens);
    EntryId parent = kNone;
    for (size_t n = 0; n < hashes.size(); ++n, ++block) {
      EntryId entry = kNone;
      for (uint32_t worker = 0; worker < num_holders; ++worker) {
        entry =
            index.Insert(hasher.Root(""), parent, hashes[n], prompt.data() + n * kBlockTokens, {worker, block, kNone});
      }
      parent = entry;
    }
  }
  const double tokens = 4.0 * kBlockTokens * static_cast<double>(index.size());
  state.counters["bytes_per_block"] = (heap() - before - tokens) / (static_cast<double>(block) * num_holders);
  std::vector<std::vector<int32_t>> prompts;
  for (size_t i = 0; i < std::min<size_t>(num_blocks / kPromptBlocks, 1000); ++i)
    prompts.push_back(prompt_of(i * (num_blocks / kPromptBlocks) / 1000));
  PrefixIndex::Match match;
  size_t turn = 0;
  for (auto _ : state) {
    const std::vector<int32_t>& prompt = prompts[turn++ % prompts.size()];
    hashes.clear();
    hasher.Extend(hashes, hasher.Root(""), prompt, kBlockTokens);
    index.Find(hasher.Root(""), hashes, prompt.data(), num_holders, &match);
    MILLRACE_CHECK(match.depth[0] == kPromptBlocks, "all blocks match");
  }
}
BENCHMARK(BM_MemoryPerBlock)
    ->Args({100'000, 1})
    ->Args({1'000'000, 1})
    ->Args({10'000'000, 1})
    ->Args({100'000, 2})
    ->Args({10'000, 64})
    ->Unit(benchmark::kMicrosecond);

// The same when nothing can be admitted: all slots of 16 workers are taken, or all have their prefill ahead, and
// `range` sequences wait.
void BM_SubmitToAFullQueue(benchmark::State& state) {
  SchedulerOptions options;
  options.max_queued_sequences = 1 << 20;
  Scheduler scheduler(options);
  for (int i = 0; i < 16; ++i) (void)scheduler.AddWorker(Ready(65'536, 256), 0);
  for (int64_t i = 0; i < state.range(0); ++i) {
    (void)scheduler.Submit({Spec(Tokens(16'000, static_cast<uint64_t>(i)), 100)}, i);
    for (const WorkerId worker : scheduler.PendingWorkers()) scheduler.TakeEdit(worker);
  }
  std::vector<double> times;
  Time now = state.range(0);
  for (auto _ : state) {
    std::vector<SequenceSpec> specs = {Spec(Tokens(640, static_cast<uint64_t>(now)), 100)};
    const auto start = std::chrono::steady_clock::now();
    const auto ids = scheduler.Submit(std::move(specs), ++now);
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    state.SetIterationTime(took.count());
    times.push_back(took.count());
    scheduler.Cancel(ids->front(), now);
    scheduler.TakeEvents();
  }
  std::sort(times.begin(), times.end());
  state.counters["p99_us"] = times[times.size() * 99 / 100] * 1e6;
}
BENCHMARK(BM_SubmitToAFullQueue)->UseManualTime()->Arg(4000)->Iterations(5'000);

// One step of a worker with so many decoding rows: every 32nd step extends each slot. The edit is taken, too. The other
// workers of the fleet run nothing. `drafts`: all look guesses up.
void BM_ApplyRows(benchmark::State& state) {
  const auto rows = static_cast<uint32_t>(state.range(0));
  Scheduler scheduler{SchedulerOptions()};
  worker::v1::Ready ready = Ready(1 << 20, rows);
  if (state.range(2) != 0) {
    worker::v1::Drafter* const drafter = ready.add_drafters();
    drafter->set_method(worker::v1::DRAFT_METHOD_LOOKUP);
    drafter->set_max_length(kDraftPositions);
  }
  const WorkerId worker = *scheduler.AddWorker(ready, 0);
  uint64_t step = 0;
  while (scheduler.counts().running < rows) {
    (void)scheduler.Submit({Spec(Tokens(100, step), 100'000)}, 0);
    if (!scheduler.PendingWorkers().empty())
      (void)scheduler.Apply(worker, Answer(scheduler.TakeEdit(worker), ++step, false), 0);
  }
  ready.set_num_blocks(16);
  for (int64_t i = 1; i < state.range(1); ++i) (void)*scheduler.AddWorker(ready, 0);
  worker::v1::StepReport report;
  for (uint32_t slot = 0; slot < rows; ++slot) {
    worker::v1::Row* row = report.add_rows();
    row->set_slot(slot);
    row->add_token_ids(1);
  }
  uint64_t edit = step;
  for (auto _ : state) {
    report.set_step(++step);
    report.set_applied_edit(edit);
    MILLRACE_CHECK(scheduler.Apply(worker, report, 1).ok(), "reports keep the contract");
    benchmark::DoNotOptimize(scheduler.TakeEvents());
    if (!scheduler.PendingWorkers().empty()) edit = scheduler.TakeEdit(worker).edit_id();
  }
}
BENCHMARK(BM_ApplyRows)
    ->ArgNames({"rows", "workers", "drafts"})
    ->ArgsProduct({{1, 256}, {1, 1000}, {0, 1}})
    ->Iterations(20'000)
    ->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace millrace

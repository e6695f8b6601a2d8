// A token is a function of weights, prompt, sampling, seed and position alone: sequences that arrive at random, in
// random slots and blocks, cut into random chunks and sharing prefixes, get bit for bit what they get alone.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/fixtures.h"
#include "tests/test_stream.h"
#include "tests/worker/engine/edits.h"
#include "tests/worker/engine/recorder.h"
#include "worker/engine/engine.h"
#include "worker/model/model_runner.h"

namespace millrace::testing {
namespace {

using worker::v1::Admit;
using worker::v1::Edit;

struct Case {
  std::vector<int32_t> prompt;
  int num_tokens = 0;
  worker::v1::Sampling sampling;
};

struct Output {
  std::vector<int32_t> tokens;
  std::vector<float> logprobs;
  bool operator==(const Output&) const = default;
};

class Invariance : public ::testing::TestWithParam<std::string> {
 protected:
  static std::unique_ptr<Engine> Open(int max_rows, double target_us) {
    return Open(Fixture(GetParam()), 8, max_rows, target_us);
  }
  static std::unique_ptr<Engine> Open(const std::filesystem::path& model, int slots, int max_rows, double target_us) {
    auto runner = ModelRunner::Load({.model_dir = model,
                                     .kv_bytes = int64_t{slots} << 19,
                                     .max_slots = slots,
                                     .max_rows = max_rows,
                                     .max_logit_rows = slots},
                                    OpenTestStream(2));
    EXPECT_TRUE(runner.ok()) << runner.status();
    EngineOptions options;
    const auto max_context = std::min<int64_t>((*runner)->config().max_position, 512);
    options.limits = {.num_slots = slots,
                      .num_blocks = static_cast<int32_t>((*runner)->num_blocks()),
                      .vocab_size = (*runner)->config().vocab_size,
                      .max_context = static_cast<int32_t>(max_context),
                      .max_rows = max_rows,
                      .max_logit_rows = slots};
    options.step_cost.set_prefill_token_us(10);
    options.step_cost.set_row_us(1);
    options.step_target_us = target_us;
    return std::make_unique<Engine>(*std::move(runner), options);
  }

  static Admit AdmitOf(const Case& c, uint32_t slot, const std::vector<uint32_t>& blocks) {
    Admit admit =
        MakeAdmit(slot, c.prompt, blocks, static_cast<uint32_t>(c.prompt.size()) + static_cast<uint32_t>(c.num_tokens));
    *admit.mutable_sampling() = c.sampling;
    return admit;
  }

  static Output OutputOf(const Recorder::SlotView& slot) {
    Output output{slot.tokens, {}};
    for (const auto& logprobs : slot.logprobs) output.logprobs.push_back(logprobs.logprob());
    return output;
  }

  static std::vector<Case> Cases(std::mt19937& random, int32_t vocab_size, int32_t max_context, int count) {
    const auto token = [&] { return static_cast<int32_t>(random() % static_cast<uint32_t>(vocab_size)); };
    std::vector<Case> cases(static_cast<size_t>(count));
    for (int i = 0; i < count; ++i) {
      Case& c = cases[static_cast<size_t>(i)];
      c.num_tokens = 4 + static_cast<int>(random() % 12);
      const auto longest = static_cast<uint32_t>(std::min(150, max_context - c.num_tokens));
      c.prompt.resize(1 + random() % longest);
      std::ranges::generate(c.prompt, token);
      c.sampling.set_top_p(1);
      c.sampling.set_repetition_penalty(i % 5 == 4 ? 1.2f : 1.0f);
      c.sampling.set_temperature(i % 2 == 0 ? 0.0f : 0.9f);
      if (i % 4 == 3) c.sampling.set_top_k(40);
      c.sampling.set_seed(random());
      c.sampling.set_logprobs(0);
    }
    return cases;
  }
};

TEST_P(Invariance, TokensDoNotDependOnCompany) {
  if (!std::filesystem::exists(Fixture(GetParam()))) GTEST_SKIP() << "no fixture " << GetParam();
  const char* given = std::getenv("MILLRACE_TEST_SEED");
  const auto seed = given != nullptr ? static_cast<uint32_t>(std::strtoul(given, nullptr, 10)) : std::random_device()();
  std::printf("MILLRACE_TEST_SEED=%u\n", seed);
  std::mt19937 random(seed);

  const auto alone = Open(256, 1e9);
  const EngineLimits& limits = alone->options().limits;
  const std::vector<Case> cases = Cases(random, limits.vocab_size, limits.max_context, 24);
  const auto blocks_of = [](const Case& c) { return static_cast<int>(c.prompt.size()) / kBlockTokens + 2; };
  std::vector<Output> expected;
  {
    const auto router = std::make_shared<Recorder>();
    alone->Attach(router);
    uint64_t id = 0;
    for (const Case& c : cases) {
      ASSERT_TRUE(alone->Post(router.get(), MakeEdit(++id, {AdmitOf(c, 0, Blocks(0, blocks_of(c)))})).ok());
      expected.push_back(OutputOf(router->AwaitFinished({0}).slots.at(0)));
      ASSERT_EQ(expected.back().tokens.size(), static_cast<size_t>(c.num_tokens));
      router->Forget(0);
    }
  }

  // Together: chunks of a few tokens while others decode, slots and blocks at random, as soon as a slot is free.
  const auto together = Open(48, 120);
  const auto router = std::make_shared<Recorder>();
  together->Attach(router);
  std::vector<uint32_t> free_blocks = Blocks(0, limits.num_blocks);
  std::vector<uint32_t> free_slots = Blocks(0, limits.num_slots);
  std::map<uint32_t, std::pair<size_t, std::vector<uint32_t>>> running;  // slot: case, blocks
  uint64_t id = 0;
  size_t next = 0, done = 0;
  while (done < cases.size()) {
    Edit edit = MakeEdit(++id);
    for (size_t n = random() % 4; n > 0 && next < cases.size() && !free_slots.empty(); --n, ++next) {
      std::ranges::shuffle(free_slots, random);
      std::ranges::shuffle(free_blocks, random);
      const auto num_blocks = static_cast<std::ptrdiff_t>(blocks_of(cases[next]));
      ASSERT_GE(static_cast<std::ptrdiff_t>(free_blocks.size()), num_blocks);
      const std::vector<uint32_t> blocks(free_blocks.end() - num_blocks, free_blocks.end());
      free_blocks.resize(free_blocks.size() - static_cast<size_t>(num_blocks));
      Admit admit = AdmitOf(cases[next], free_slots.back(), blocks);
      admit.set_rank(static_cast<int64_t>(random() % 3));
      *edit.add_admit() = admit;
      running[free_slots.back()] = {next, blocks};
      free_slots.pop_back();
    }
    ASSERT_TRUE(together->Post(router.get(), edit).ok());
    const bool must_finish = free_slots.empty() || next == cases.size();
    const auto view = router->Await([&](const Recorder::View& v) {
      const bool any = std::ranges::any_of(running, [&](const auto& entry) { return v.Finished(entry.first); });
      return !v.error.ok() || (v.last.applied_edit() == id && (any || !must_finish));
    });
    ASSERT_TRUE(view.error.ok()) << view.error;
    for (auto entry = running.begin(); entry != running.end();) {
      const auto& [slot, what] = *entry;
      if (!view.Finished(slot)) {
        ++entry;
        continue;
      }
      EXPECT_EQ(OutputOf(view.slots.at(slot)), expected[what.first]) << "sequence " << what.first;
      router->Forget(slot);
      free_slots.push_back(slot);
      free_blocks.insert(free_blocks.end(), what.second.begin(), what.second.end());
      ++done;
      entry = running.erase(entry);
    }
  }
}

TEST_P(Invariance, ASharedPrefixChangesNothing) {
  if (!std::filesystem::exists(Fixture(GetParam()))) GTEST_SKIP() << "no fixture " << GetParam();
  const auto engine = Open(48, 1e9);
  const auto router = std::make_shared<Recorder>();
  engine->Attach(router);
  std::mt19937 random(1);
  Case c = Cases(random, engine->options().limits.vocab_size, engine->options().limits.max_context, 1).front();
  c.prompt.resize(100, 3);
  ASSERT_TRUE(engine->Post(router.get(), MakeEdit(1, {AdmitOf(c, 0, Blocks(0, 5))})).ok());
  const Output expected = OutputOf(router->AwaitFinished({0}).slots.at(0));
  router->Forget(0);
  // At once: one fills, the other waits for it; then one finds the blocks computed.
  Admit waiting = AdmitOf(c, 1, {10, 11, 12, 20, 21});
  const auto use_cache = [&](Admit& admit) {
    admit.set_num_cached_tokens(96);
    admit.mutable_token_ids()->Assign(c.prompt.begin() + 96, c.prompt.end());
  };
  use_cache(waiting);
  waiting.set_filling_slot(0);
  ASSERT_TRUE(engine->Post(router.get(), MakeEdit(2, {AdmitOf(c, 0, Blocks(10, 5)), waiting})).ok());
  const auto both = router->AwaitFinished({0, 1});
  EXPECT_EQ(OutputOf(both.slots.at(0)), expected);
  EXPECT_EQ(OutputOf(both.slots.at(1)), expected);
  Admit cached = AdmitOf(c, 2, {10, 11, 12, 30, 31});
  use_cache(cached);
  ASSERT_TRUE(engine->Post(router.get(), MakeEdit(3, {cached})).ok());
  EXPECT_EQ(OutputOf(router->AwaitFinished({2}).slots.at(2)), expected);
}

constexpr int32_t kPoison = 1000;  // the token whose embedding is not finite in the copy below

// A copy of the model in which one token's embedding is NaN: whatever it touches, in the cache and in buffers that
// later steps pad their rows with, is NaN as well.
std::filesystem::path PoisonedCopy(const std::filesystem::path& model) {
  const auto copy = std::filesystem::path(::testing::TempDir()) / ("poisoned-" + std::to_string(getpid()));
  std::filesystem::remove_all(copy);
  std::filesystem::copy(model, copy, std::filesystem::copy_options::recursive);
  int patched = 0;
  for (const auto& entry : std::filesystem::directory_iterator(copy)) {
    if (!entry.path().filename().string().starts_with("model-0")) continue;
    std::fstream file(entry.path(), std::ios::in | std::ios::out | std::ios::binary);
    uint64_t length = 0;
    file.read(reinterpret_cast<char*>(&length), sizeof length);
    std::string header(length, ' ');
    file.read(header.data(), static_cast<std::streamsize>(length));
    const auto tensor = nlohmann::json::parse(header).value("model.embed_tokens.weight", nlohmann::json());
    if (tensor.is_null()) continue;
    const std::vector<uint16_t> row(tensor["shape"][1].get<size_t>(), 0x7fc0);  // bf16 NaN
    file.seekp(static_cast<std::streamoff>(sizeof length + length + tensor["data_offsets"][0].get<uint64_t>() +
                                           kPoison * row.size() * sizeof(uint16_t)));
    file.write(reinterpret_cast<const char*>(row.data()), static_cast<std::streamsize>(row.size() * sizeof(uint16_t)));
    ++patched;
  }
  EXPECT_EQ(patched, 1);
  return copy;
}

class SlotWalk : public Invariance {};

// From 1 sequence to 256 and back to 1: mixed chunks, cancelled sequences, and sequences that leave NaN behind in
// slots, blocks and padding. Nobody sees anything foreign.
TEST_P(SlotWalk, NoForeignValueFromOneTo256AndBack) {
  constexpr uint32_t kSlots = 256;
  constexpr int kBlocksEach = 6;
  std::mt19937 random(7);
  const std::filesystem::path model = PoisonedCopy(Fixture(GetParam()));
  const auto engine = Open(model, kSlots, 512, 1200);
  const EngineLimits& limits = engine->options().limits;
  ASSERT_GE(limits.num_blocks, static_cast<int32_t>(kSlots) * kBlocksEach);
  std::vector<Case> cases = Cases(random, kPoison, limits.max_context, 48);
  std::vector<Output> expected;
  uint64_t id = 0;
  {
    const auto router = std::make_shared<Recorder>();
    engine->Attach(router);
    for (const Case& c : cases) {
      ASSERT_TRUE(engine->Post(router.get(), MakeEdit(++id, {AdmitOf(c, 0, Blocks(0, kBlocksEach))})).ok());
      expected.push_back(OutputOf(router->AwaitFinished({0}).slots.at(0)));
      router->Forget(0);
    }
  }
  const auto router = std::make_shared<Recorder>();
  engine->Attach(router);
  struct Running {
    size_t c;
    bool poisoned;
    std::vector<uint32_t> blocks;
  };
  std::map<uint32_t, Running> running;
  std::vector<uint32_t> free_slots = Blocks(0, kSlots), free_blocks = Blocks(0, kSlots * kBlocksEach);
  size_t compared = 0, cancelled = 0, poisoned = 0;
  id = 0;
  for (size_t wanted = 1, most = 0; wanted > 0 || !running.empty();) {
    Edit edit = MakeEdit(++id);
    const auto before = router->Await([](const Recorder::View&) { return true; });
    std::vector<uint32_t> released;
    for (const auto& [slot, it] : running) {
      if (random() % 96 == 0 && !before.Finished(slot)) released.push_back(slot);
    }
    edit.mutable_release()->Assign(released.begin(), released.end());
    while (running.size() < wanted && !free_slots.empty()) {
      Running it{random() % cases.size(), random() % 8 == 0, {}};
      it.blocks.assign(free_blocks.end() - kBlocksEach, free_blocks.end());  // those used last
      free_blocks.resize(free_blocks.size() - kBlocksEach);
      Case c = cases[it.c];
      if (it.poisoned) c.prompt[random() % c.prompt.size()] = kPoison;
      *edit.add_admit() = AdmitOf(c, free_slots.back(), it.blocks);
      running[free_slots.back()] = std::move(it);
      free_slots.pop_back();
    }
    most = std::max(most, running.size());
    if (wanted == kSlots) {
      EXPECT_EQ(most, kSlots);
      wanted = 0;
    } else if (wanted > 0) {
      wanted *= 2;
    }
    ASSERT_TRUE(engine->Post(router.get(), edit).ok());
    const auto view = router->Await([&](const Recorder::View& v) {
      const bool any = std::ranges::any_of(running, [&](const auto& entry) { return v.Finished(entry.first); });
      return !v.error.ok() || (v.last.applied_edit() == id && (any || running.size() == released.size() || wanted > 0));
    });
    ASSERT_TRUE(view.error.ok()) << view.error;
    const auto leave = [&](uint32_t slot) {
      const auto it = running.find(slot);
      free_blocks.insert(free_blocks.end(), it->second.blocks.begin(), it->second.blocks.end());
      free_slots.push_back(slot);
      running.erase(it);
      router->Forget(slot);
    };
    for (const uint32_t slot : released) leave(slot), ++cancelled;
    for (uint32_t slot = 0; slot < kSlots; ++slot) {
      if (!running.contains(slot) || !view.Finished(slot)) continue;
      const auto& [c, is_poisoned, blocks] = running[slot];
      if (is_poisoned) {
        EXPECT_EQ(view.slots.at(slot).finish, worker::v1::FINISH_REASON_NON_FINITE);
        ++poisoned;
      } else {
        EXPECT_EQ(OutputOf(view.slots.at(slot)), expected[c]) << "sequence " << c;
        ++compared;
      }
      leave(slot);
    }
  }
  std::printf("%zu compared, %zu cancelled, %zu not finite\n", compared, cancelled, poisoned);
  EXPECT_GE(compared, 100u);
  EXPECT_GE(cancelled, 20u);
  EXPECT_GE(poisoned, 10u);
  std::filesystem::remove_all(model);
}

INSTANTIATE_TEST_SUITE_P(Untied, SlotWalk, ::testing::Values("qwen3-tiny-untied"));
INSTANTIATE_TEST_SUITE_P(Fixtures, Invariance,
                         ::testing::Values("llama-tiny-3x48", "qwen2-tiny-5x16", "qwen3-tiny-6x32",
                                           "qwen3-tiny-untied"),
                         [](const auto& test) {
                           std::string name = test.param;
                           std::ranges::replace(name, '-', '_');
                           return name;
                         });

}  // namespace
}  // namespace millrace::testing

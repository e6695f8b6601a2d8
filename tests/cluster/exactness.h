// Requests of every kind, and what each of them gives alone: the truth that any other way of computing them is held to.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/cluster/in_process.h"
#include "tests/fixtures.h"

namespace millrace {

inline constexpr int kNumSequences = 64;
using Groups = std::vector<std::vector<SequenceSpec>>;

inline uint64_t Seed() {
  static const uint64_t seed = [] {
    const char* given = std::getenv("MILLRACE_SEED");
    const uint64_t value = given != nullptr ? std::strtoull(given, nullptr, 10) : std::random_device()();
    std::printf("MILLRACE_SEED=%llu\n", static_cast<unsigned long long>(value));
    return value;
  }();
  return seed;
}

class ExactnessTest : public testing::Test {
 protected:
  void Prepare(const char* model) {
    model_ = Fixture(model);
    std::mt19937_64 random(Seed());
    const auto config = ModelConfig::Load(model_);
    ASSERT_TRUE(config.ok()) << config.status();
    std::vector<int32_t> shared(96);
    for (int32_t& token : shared) token = static_cast<int32_t>(random() % config->vocab_size);
    for (int i = 0; i < kNumSequences; ++i) {
      SequenceSpec spec;
      if (i % 2 == 0) spec.prompt.assign(shared.begin(), shared.begin() + 32 + random() % 64);
      for (uint64_t n = 1 + random() % 40; n > 0; --n)
        spec.prompt.push_back(static_cast<int32_t>(random() % config->vocab_size));
      spec.max_tokens = static_cast<int32_t>(60 + random() % 60);
      spec.sampling.set_temperature(i % 4 < 2 ? 0.0f : 0.8f);
      spec.sampling.set_top_p(i % 8 == 3 ? 0.9f : 1.0f);
      spec.sampling.set_repetition_penalty(i % 5 == 4 ? 1.1f : 1.0f);
      spec.sampling.set_frequency_penalty(i % 7 == 6 ? 0.3f : 0.0f);
      spec.sampling.set_seed(random());
      if (i % 3 == 0) spec.sampling.set_logprobs(1);
      specs_.push_back(spec);
    }
  }

  // Each request alone on an empty worker, with no prefix to hit: the truth.
  // Computed once for each model.
  const std::vector<Output>& Truth() {
    static std::map<std::filesystem::path, std::vector<Output>> truths;
    std::vector<Output>& truth = truths[model_];
    if (truth.empty()) {
      InProcessCluster cluster(model_);
      cluster.AddWorker({});
      for (size_t i = 0; i < specs_.size(); ++i) {
        SequenceSpec spec = specs_[i];
        spec.cache_salt = "alone " + std::to_string(i);
        truth.push_back(cluster.Run({{spec}}, 0)[0]);
      }
    }
    return truth;
  }

  Groups Singles(bool may_share) const {
    Groups groups;
    for (size_t i = 0; i < specs_.size(); ++i) {
      groups.push_back({specs_[i]});
      groups.back()[0].cache_salt = may_share ? "" : "apart " + std::to_string(i);
    }
    return groups;
  }

  void ExpectTruth(const std::vector<Output>& outputs) {
    ASSERT_EQ(outputs.size(), Truth().size());
    size_t tokens = 0, different = 0;
    for (size_t i = 0; i < outputs.size(); ++i) {
      ASSERT_TRUE(outputs[i].status.ok()) << outputs[i].status;
      tokens += outputs[i].tokens.size();
      different += outputs[i].tokens != Truth()[i].tokens || outputs[i].logprobs != Truth()[i].logprobs;
      EXPECT_EQ(outputs[i].tokens, Truth()[i].tokens) << "request " << i;
      EXPECT_EQ(outputs[i].logprobs, Truth()[i].logprobs) << "request " << i;
    }
    std::printf("%s: %zu tokens, %zu of %zu requests differ\n",
                testing::UnitTest::GetInstance()->current_test_info()->name(), tokens, different, outputs.size());
  }

  // Of two workers the first is lost while it computes.
  std::vector<Output> RunLosingAWorker(InProcessCluster& cluster) {
    bool lost = false;
    std::vector<Output> outputs = cluster.Run(Singles(true), 1, [&](int num_reports) {
      if (num_reports < 70 || lost) return;
      cluster.LoseWorker(0);
      lost = true;
    });
    EXPECT_TRUE(lost);
    return outputs;
  }

  static void ExpectEmpty(InProcessCluster& cluster, size_t worker) {
    EXPECT_EQ(cluster.scheduler().counts().queued, 0);
    EXPECT_EQ(cluster.scheduler().counts().running, 0);
    const WorkerCounts counts = cluster.scheduler().worker_counts(cluster.worker_id(worker));
    EXPECT_EQ(counts.used_slots, 0u);
    EXPECT_EQ(counts.used_blocks, 0u);
    EXPECT_EQ(counts.free_blocks + counts.cached_blocks + counts.quarantined_blocks, counts.blocks);
  }

  std::filesystem::path model_;
  std::vector<SequenceSpec> specs_;
};

}  // namespace millrace

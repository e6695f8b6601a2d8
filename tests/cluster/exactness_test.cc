// A token is a function of weights, prompt, sampling parameters, seed and position, and of nothing else. Bit for bit,
// through the router's core and the worker's engine: tokens and log-probabilities of the same requests alone, in mixed
// batches with arrivals, with other chunk sizes, with prefix hits, after preemption, as one of n choices, and after a
// worker was lost.
#include "tests/cluster/exactness.h"

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace millrace {
namespace {

class Exactness : public ExactnessTest, public testing::WithParamInterface<const char*> {
 protected:
  void SetUp() override { Prepare(GetParam()); }
};

TEST_P(Exactness, HoldsInMixedBatchesWithArrivals) {
  InProcessCluster cluster(model_);
  cluster.AddWorker({});
  ExpectTruth(cluster.Run(Singles(false), 3));
  ExpectEmpty(cluster, 0);
}

TEST_P(Exactness, HoldsForEveryChunkSize) {
  for (const WorkerShape& shape : {WorkerShape{1, 1}, WorkerShape{4, 7}, WorkerShape{16, 64}, WorkerShape{64, 512}}) {
    SCOPED_TRACE(shape.max_rows);
    InProcessCluster cluster(model_);
    cluster.AddWorker(shape);
    ExpectTruth(cluster.Run(Singles(false), 0));
  }
}

TEST_P(Exactness, HoldsWithPrefixHits) {
  InProcessCluster cluster(model_);
  cluster.AddWorker({});
  ExpectTruth(cluster.Run(Singles(true), 1));  // some hit blocks that are still being computed
  ExpectTruth(cluster.Run(Singles(true), 1));  // all hit whatever the first round left
  EXPECT_GT(cluster.scheduler().counts().cached_tokens, cluster.scheduler().counts().prompt_tokens / 3);
  ExpectEmpty(cluster, 0);
}

TEST_P(Exactness, HoldsAfterPreemption) {
  InProcessCluster cluster(model_, 0);
  WorkerShape shape;
  shape.num_blocks = 16;
  cluster.AddWorker(shape);
  ExpectTruth(cluster.Run(Singles(true), 0));
  EXPECT_GT(cluster.scheduler().counts().preemptions, 0u);
  ExpectEmpty(cluster, 0);
}

TEST_P(Exactness, HoldsForEachOfNChoices) {
  InProcessCluster cluster(model_);
  cluster.AddWorker({});
  constexpr int kChoices = 8;
  Groups together, alone;
  for (int i = 0; i < 8; ++i) {
    std::vector<SequenceSpec> choices(kChoices, specs_[i]);
    for (int k = 0; k < kChoices; ++k) {
      choices[k].sampling.set_temperature(0.8f);
      choices[k].sampling.set_seed(specs_[i].sampling.seed() + k);
      alone.push_back({choices[k]});
      alone.back()[0].cache_salt = "choice " + std::to_string(alone.size());
    }
    together.push_back(choices);
  }
  const std::vector<Output> shared = cluster.Run(std::move(together), 2);
  for (size_t i = 0; i < alone.size(); ++i) {
    const Output truth = cluster.Run({alone[i]}, 0)[0];
    EXPECT_EQ(shared[i].tokens, truth.tokens) << "choice " << i;
    if (i % kChoices > 0 && shared[i].report.prompt_tokens > kBlockTokens) {
      EXPECT_GT(shared[i].report.cached_tokens, 0);
    }
  }
}

TEST_P(Exactness, HoldsWhenAWorkerIsLost) {
  InProcessCluster cluster(model_);
  cluster.AddWorker({});
  cluster.AddWorker({});
  const std::vector<Output> outputs = RunLosingAWorker(cluster);
  ExpectTruth(outputs);
  int moves = 0;
  for (const Output& output : outputs) moves += output.report.moves;
  EXPECT_GT(moves, 0);
  ExpectEmpty(cluster, 1);
}

TEST_P(Exactness, HoldsWithWhatAnEarlierRouterLeftInTheCaches) {
  InProcessCluster cluster(model_);
  cluster.AddWorker({});
  ExpectTruth(cluster.Run(Singles(true), 3));
  const uint32_t kept = cluster.scheduler().worker_counts(cluster.worker_id(0)).cached_blocks;
  cluster.RestartRouter();
  EXPECT_EQ(cluster.scheduler().worker_counts(cluster.worker_id(0)).cached_blocks, kept);
  ExpectTruth(cluster.Run(Singles(true), 0));
  EXPECT_GT(cluster.scheduler().counts().cached_tokens, cluster.scheduler().counts().prompt_tokens / 3);
  ExpectTruth(cluster.Run(Singles(false), 0));  // other salts: nothing of it may be found
  ExpectEmpty(cluster, 0);
}

// As after the loss of a router: the client brings what it has of each answer.
TEST_P(Exactness, HoldsWhenAnAnswerIsResumedElsewhere) {
  InProcessCluster cluster(model_);
  cluster.AddWorker({4, 64});
  std::mt19937_64 random(Seed());
  Groups groups = Singles(true);
  std::vector<size_t> cuts;
  for (size_t i = 0; i < groups.size(); ++i) {
    SequenceSpec& spec = groups[i][0];
    const std::vector<int32_t>& answer = Truth()[i].tokens;
    cuts.push_back(random() % answer.size());
    spec.output.assign(answer.begin(), answer.begin() + static_cast<std::ptrdiff_t>(cuts[i]));
  }
  const std::vector<Output> outputs = cluster.Run(std::move(groups), 2);
  for (size_t i = 0; i < outputs.size(); ++i) {
    ASSERT_TRUE(outputs[i].status.ok()) << outputs[i].status;
    const Output& truth = Truth()[i];
    const auto cut = static_cast<std::ptrdiff_t>(cuts[i]);
    EXPECT_EQ(outputs[i].tokens, std::vector(truth.tokens.begin() + cut, truth.tokens.end())) << i << " after " << cut;
    if (truth.logprobs.empty()) continue;
    EXPECT_EQ(outputs[i].logprobs, std::vector(truth.logprobs.begin() + cut, truth.logprobs.end())) << i;
  }
  ExpectEmpty(cluster, 0);
}

INSTANTIATE_TEST_SUITE_P(Models, Exactness, testing::Values("qwen3-tiny-6x32", "llama-tiny-3x48", "qwen2-tiny-5x16"),
                         [](const auto& model) {
                           std::string name = model.param;
                           for (char& c : name) c = c == '-' ? '_' : c;
                           return name;
                         });

}  // namespace
}  // namespace millrace

// What the choice of draft lengths promises while load comes and goes, in virtual time: an 8B model and a draft of 0.6B
// on one H200, 1 … 256 … 1 sequences, beside the same worker without drafts and with every fixed length.
#include <algorithm>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "tests/cluster/sim/virtual_cluster.h"
#include "tests/router/schedule/random_seed.h"

namespace millrace {
namespace {

constexpr Time kWire = 200;  // microseconds, one way
constexpr size_t kLoads[] = {1, 4, 16, 64, 256, 64, 16, 4, 1};
constexpr int kMostDrafts = 6;
constexpr int kPlain = 0, kPolicy = -1;

worker::v1::Ready Ready() {
  worker::v1::Ready ready;
  ready.mutable_model()->set_vocab_size(1 << 30);
  ready.mutable_model()->set_max_context(32'768);
  ready.set_num_blocks(16'384);
  ready.set_block_tokens(32);
  ready.set_num_slots(256);
  ready.set_step_target_us(45'000);
  worker::v1::StepCost* cost = ready.mutable_step_cost();
  cost->set_step_us(3520);
  cost->set_prefill_token_us(22);
  cost->set_prefill_context_ns(0.8);
  cost->set_row_us(8);
  cost->set_context_ns(34.3);
  worker::v1::Drafter* drafter = ready.add_drafters();
  drafter->set_method(worker::v1::DRAFT_METHOD_MODEL);
  drafter->set_max_length(kMostDrafts);
  drafter->set_step_us(277);
  drafter->set_row_us(1);
  drafter->set_context_ns(26.7);
  return ready;
}

struct Ramp {
  std::vector<double> rates;  // tokens a second, by place in kLoads
  std::vector<Time> firsts;   // times to first tokens, in order
  uint64_t told = 0;          // lengths that slots were told
  uint64_t steps = 0;
};

// At each load so many requests come within half a second; the next load begins when they have ended.
Ramp Serve(double accuracy, int fixed, uint64_t seed) {
  SchedulerOptions options;
  options.speculation = fixed == kPolicy;
  VirtualCluster cluster(options, kWire);
  cluster.Join(Ready(), Ready().step_cost(), {accuracy, fixed});
  std::mt19937_64 rng(seed);
  Ramp ramp;
  Time begin = 1;
  for (const size_t load : kLoads) {
    uint64_t tokens = 0;
    const size_t rounds = std::max<size_t>(1, 4 / load);  // a lone sequence is served again and again
    for (size_t round = 0; round < rounds; ++round) {
      const Time at = cluster.now();
      for (size_t i = 0; i < load; ++i) {
        VirtualRequest request;
        for (int token = 0; token < 256; ++token) request.prompt.push_back(static_cast<int32_t>(rng() % (1 << 30)));
        request.output = 1024;
        tokens += request.output;
        cluster.Arrive(at + static_cast<Time>(load == 1 ? 0 : rng() % 500'000), std::move(request));
      }
      cluster.Run();
    }
    ramp.rates.push_back(static_cast<double>(tokens) / static_cast<double>(cluster.now() - begin) * 1e6);
    begin = cluster.now();
  }
  for (const VirtualRequest& request : cluster.requests()) {
    EXPECT_TRUE(request.done()) << request.status;
    ramp.firsts.push_back(request.first - request.arrived);
  }
  std::sort(ramp.firsts.begin(), ramp.firsts.end());
  ramp.told = cluster.num_drafts_told(0);
  ramp.steps = cluster.num_steps();
  return ramp;
}

class SpeculationRamp : public testing::TestWithParam<double> {};

TEST_P(SpeculationRamp, IsNeverMuchSlowerThanPlainOrTheBestFixedLengthAndHarmsNoFirstToken) {
  const uint64_t seed = TestSeed(3);
  std::vector<Ramp> fixed;
  for (int length = 0; length <= kMostDrafts; ++length) fixed.push_back(Serve(GetParam(), length, seed));
  const Ramp policy = Serve(GetParam(), kPolicy, seed);
  for (size_t i = 0; i < std::size(kLoads); ++i) {
    double best = 0;
    for (const Ramp& it : fixed) best = std::max(best, it.rates[i]);
    std::printf("accuracy %.1f, load %3zu: plain %6.0f, best fixed %6.0f, policy %6.0f tokens/s\n", GetParam(),
                kLoads[i], fixed[kPlain].rates[i], best, policy.rates[i]);
    EXPECT_GE(policy.rates[i], 0.97 * best) << "load " << kLoads[i];
    if (i == 0) continue;
    // No cliff: more sequences bring more tokens.
    const bool grows = kLoads[i] > kLoads[i - 1];
    EXPECT_GE(policy.rates[grows ? i : i - 1], 0.97 * policy.rates[grows ? i - 1 : i]) << "load " << kLoads[i];
  }
  const auto quantile = [](const Ramp& ramp, double share) {
    return static_cast<double>(ramp.firsts[static_cast<size_t>(share * static_cast<double>(ramp.firsts.size() - 1))]);
  };
  for (const double share : {0.5, 0.99}) {
    std::printf("first token, share %.2f: plain %.1f ms, policy %.1f ms\n", share,
                quantile(fixed[kPlain], share) / 1000, quantile(policy, share) / 1000);
    EXPECT_LE(quantile(policy, share), 1.02 * quantile(fixed[kPlain], share));
  }
  const size_t sequences = policy.firsts.size();
  std::printf("%llu lengths told in %llu steps to %zu sequences\n", static_cast<unsigned long long>(policy.told),
              static_cast<unsigned long long>(policy.steps), sequences);
  EXPECT_LE(policy.told, 10 * sequences);
}

INSTANTIATE_TEST_SUITE_P(Accuracies, SpeculationRamp, testing::Values(0.3, 0.6, 0.8));

}  // namespace
}  // namespace millrace

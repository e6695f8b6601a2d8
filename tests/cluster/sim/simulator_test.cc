// What the whole scheduling core promises of a cluster, shown in virtual time: exact replay, nothing lost, fair shares,
// goodput in overload, costs that heal.
#include <algorithm>
#include <cmath>
#include <map>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "router/schedule/step_cost.h"
#include "tests/cluster/sim/virtual_cluster.h"
#include "tests/router/schedule/random_seed.h"

namespace millrace {
namespace {

constexpr Time kSecond = 1'000'000;
constexpr Time kWire = 200;  // microseconds, one way

worker::v1::Ready Ready(uint32_t blocks = 4096, uint32_t slots = 64) {
  worker::v1::Ready ready;
  ready.mutable_model()->set_vocab_size(1 << 30);
  ready.mutable_model()->set_max_context(32'768);
  ready.set_num_blocks(blocks);
  ready.set_block_tokens(32);
  ready.set_num_slots(slots);
  ready.set_step_target_us(45'000);
  ready.mutable_step_cost()->set_step_us(5000);
  ready.mutable_step_cost()->set_prefill_token_us(200);
  ready.mutable_step_cost()->set_prefill_context_ns(20);
  ready.mutable_step_cost()->set_row_us(100);
  ready.mutable_step_cost()->set_context_ns(200);
  return ready;
}

worker::v1::StepCost Times(worker::v1::StepCost cost, double factor) {
  cost.set_step_us(cost.step_us() * factor);
  cost.set_prefill_token_us(cost.prefill_token_us() * factor);
  cost.set_prefill_context_ns(cost.prefill_context_ns() * factor);
  cost.set_row_us(cost.row_us() * factor);
  cost.set_context_ns(cost.context_ns() * factor);
  return cost;
}

// Prompts of 64 … 4,096 tokens, most of them short; a third begin like an earlier one. Outputs of 1 … 100 tokens.
class Traffic {
 public:
  explicit Traffic(uint64_t seed) : rng_(seed) {}
  VirtualRequest Next() {
    VirtualRequest request;
    const size_t length = static_cast<size_t>(64 * std::exp2(6 * std::pow(Uniform(), 2)));
    if (!earlier_.empty() && Uniform() < 0.33) {
      const std::vector<int32_t>& other = earlier_[rng_() % earlier_.size()];
      request.prompt.assign(other.begin(), other.begin() + static_cast<ptrdiff_t>(std::min(other.size(), length / 2)));
    }
    while (request.prompt.size() < length) request.prompt.push_back(static_cast<int32_t>(rng_() % (1 << 30)));
    request.output = 1 + static_cast<uint32_t>(rng_() % 100);
    earlier_.push_back(request.prompt);
    if (earlier_.size() > 200) earlier_.erase(earlier_.begin());
    return request;
  }
  double Uniform() { return static_cast<double>(rng_() >> 11) * 0x1p-53; }
  Time Gap(double per_second) { return static_cast<Time>(-std::log(1 - Uniform()) / per_second * kSecond); }

 private:
  std::mt19937_64 rng_;
  std::vector<std::vector<int32_t>> earlier_;
};

bool Good(const VirtualRequest& request, size_t prompt_tokens) {
  const double limit = std::max(2.0, 2 * PrefillSeconds(Ready().step_cost(), 0, static_cast<double>(prompt_tokens)));
  return request.done() && static_cast<double>(request.first - request.arrived) * 1e-6 <= limit;
}

struct Outcome {
  uint64_t digest = 0;
  size_t requests = 0, done = 0, good = 0, refused = 0;
  double goodput = 0;  // good requests a second, of those that arrived in `seconds`
};

Outcome Serve(uint64_t seed, size_t num_workers, double per_second, double seconds, bool faults,
              SchedulerOptions options) {
  VirtualCluster cluster(options, kWire);
  for (size_t i = 0; i < num_workers; ++i) cluster.Join(Ready(), Ready().step_cost());
  Traffic traffic(seed);
  std::vector<size_t> sizes;
  for (Time at = 1; at < static_cast<Time>(seconds * kSecond); at += traffic.Gap(per_second)) {
    VirtualRequest request = traffic.Next();
    sizes.push_back(request.prompt.size());
    cluster.Arrive(at, std::move(request));
  }
  if (faults) {
    for (size_t i = 0; i < num_workers; ++i) {
      const Time at = static_cast<Time>((0.2 + 0.6 * traffic.Uniform()) * seconds * kSecond);
      cluster.At(at, [&cluster, i] { cluster.Lose(i); });
      cluster.At(at + kSecond, [&cluster] { cluster.Join(Ready(), Ready().step_cost()); });
    }
  }
  cluster.Run();
  Outcome run;
  run.digest = cluster.digest();
  run.requests = cluster.requests().size();
  for (size_t i = 0; i < sizes.size(); ++i) {
    const VirtualRequest& request = cluster.requests()[i];
    EXPECT_NE(request.ended, 0) << "request " << i << " never ends";
    run.done += request.done();
    run.good += Good(request, sizes[i]);
    run.refused += request.status.code() == absl::StatusCode::kResourceExhausted;
  }
  run.goodput = static_cast<double>(run.good) / seconds;
  EXPECT_EQ(cluster.scheduler().counts().queued, 0);
  EXPECT_EQ(cluster.scheduler().counts().running, 0);
  return run;
}

TEST(ClusterSimulator, ReplaysBitForBit) {
  const uint64_t seed = TestSeed(1);
  const Outcome first = Serve(seed, 4, 20, 30, true, {}), again = Serve(seed, 4, 20, 30, true, {});
  EXPECT_EQ(first.digest, again.digest);
  EXPECT_NE(first.digest, Serve(seed + 1, 4, 20, 30, true, {}).digest);
  EXPECT_GT(first.done, 500u);
}

// Each worker is lost once and comes back, under load: every request but those that lost two workers is answered.
TEST(ClusterSimulator, LosesNothingWhenWorkersGo) {
  const Outcome run = Serve(TestSeed(2), 8, 40, 60, true, {});
  std::printf("%zu requests, %zu done, %zu good\n", run.requests, run.done, run.good);
  EXPECT_GE(run.done + 5, run.requests);
  EXPECT_GE(static_cast<double>(run.good), 0.95 * static_cast<double>(run.requests));
}

TEST(ClusterSimulator, KeepsItsGoodputInTenfoldOverload) {
  const uint64_t seed = TestSeed(3);
  SchedulerOptions options;
  options.max_queued_sequences = 512;
  double peak = 0;
  for (const double per_second : {10, 12, 14, 16, 20}) {
    const Outcome run = Serve(seed, 2, per_second, 60, false, options);
    std::printf("%4.0f/s: %zu of %zu good, %.2f/s\n", per_second, run.good, run.requests, run.goodput);
    peak = std::max(peak, run.goodput);
  }
  const Outcome flood = Serve(seed, 2, 120, 60, false, options);
  std::printf(" 120/s: %zu of %zu good, %zu refused, %.2f/s\n", flood.good, flood.requests, flood.refused,
              flood.goodput);
  EXPECT_GE(flood.goodput, 0.95 * peak);
}

// Four tenants ask for 1, 2, 4 and 8 times as much as a quarter of what there is; each gets about a quarter.
TEST(ClusterSimulator, SharesFairlyAmongTenantsInOverload) {
  SchedulerOptions options;
  options.max_queued_sequences = 512;
  VirtualCluster cluster(options, kWire);
  for (int i = 0; i < 2; ++i) cluster.Join(Ready(), Ready().step_cost());
  std::vector<size_t> sizes;
  for (int tenant = 0; tenant < 4; ++tenant) {
    Traffic traffic(TestSeed(4) + static_cast<uint64_t>(tenant));
    for (Time at = 1; at < 120 * kSecond; at += traffic.Gap(5 << tenant)) {
      VirtualRequest request = traffic.Next();
      request.tenant = std::string(1, static_cast<char>('a' + tenant));
      sizes.push_back(request.prompt.size());
      cluster.Arrive(at, std::move(request));
    }
  }
  cluster.Run(120 * kSecond);
  std::map<std::string, double> served;
  for (size_t i = 0; i < sizes.size(); ++i) {
    const VirtualRequest& request = cluster.requests()[i];
    if (request.first == 0) continue;
    served[request.tenant] += static_cast<double>(sizes[i] - request.cached) + 2.0 * request.received;
  }
  double sum = 0, squares = 0;
  for (const auto& [tenant, tokens] : served) {
    std::printf("%s: %.0f tokens\n", tenant.c_str(), tokens);
    sum += tokens;
    squares += tokens * tokens;
  }
  ASSERT_EQ(served.size(), 4u);
  const double jain = sum * sum / 4 / squares;
  std::printf("Jain %.4f\n", jain);
  EXPECT_GE(jain, 0.95);
}

// Clients wait 3 s. What cannot be in time is refused early; what is admitted has its first token in time, whoever
// comes later.
TEST(ClusterSimulator, RefusesWhatCannotMakeItsDeadline) {
  VirtualCluster cluster({}, kWire);
  for (int i = 0; i < 2; ++i) cluster.Join(Ready(), Ready().step_cost());
  Traffic traffic(TestSeed(5));
  for (Time at = 1; at < 60 * kSecond; at += traffic.Gap(60)) {
    VirtualRequest request = traffic.Next();
    request.patience = 3 * kSecond;
    cluster.Arrive(at, std::move(request));
  }
  cluster.Run();
  size_t done = 0, refused = 0, expired = 0, wasted = 0;
  for (const VirtualRequest& request : cluster.requests()) {
    done += request.done();
    refused += request.status.code() == absl::StatusCode::kResourceExhausted;
    expired += request.status.code() == absl::StatusCode::kDeadlineExceeded;
    wasted += request.status.code() == absl::StatusCode::kDeadlineExceeded && request.first == 0 && request.admitted;
    if (request.status.code() != absl::StatusCode::kResourceExhausted) continue;
    EXPECT_TRUE(request.status.GetPayload(kRetryAfterMs).has_value());
  }
  std::printf("%zu done, %zu refused, %zu expired, of these %zu admitted and before their first token\n", done, refused,
              expired, wasted);
  EXPECT_GT(done, 500u);
  EXPECT_GT(refused, 500u);
  EXPECT_EQ(wasted, 0u);
  EXPECT_LE(expired, refused);
}

// One of four workers is really three times slower than it says. After a minute its share of the work shows it.
TEST(ClusterSimulator, AWrongStepCostHeals) {
  VirtualCluster cluster({}, kWire);
  for (int i = 0; i < 3; ++i) cluster.Join(Ready(), Ready().step_cost());
  const size_t slow = cluster.Join(Ready(), Times(Ready().step_cost(), 3));
  Traffic traffic(TestSeed(6));
  for (Time at = 1; at < 120 * kSecond; at += traffic.Gap(28)) cluster.Arrive(at, traffic.Next());
  cluster.Run(60 * kSecond);
  std::vector<double> before;
  for (size_t i = 0; i < 4; ++i) before.push_back(static_cast<double>(cluster.computed_tokens(i)));
  cluster.Run();
  double others = 0;
  for (size_t i = 0; i < 3; ++i) others += (static_cast<double>(cluster.computed_tokens(i)) - before[i]) / 3;
  const double share = (static_cast<double>(cluster.computed_tokens(slow)) - before[slow]) / others;
  std::printf("the slow worker computes %.2f of what the others do\n", share);
  EXPECT_GT(share, 0.02);
  EXPECT_LT(share, 0.6);
}

TEST(ClusterSimulator, RunsAThousandWorkers) {
  const Outcome run = Serve(TestSeed(7), 1000, 400, 1, false, {});
  std::printf("%zu requests, %zu done, %zu good\n", run.requests, run.done, run.good);
  EXPECT_EQ(run.done, run.requests);
  EXPECT_GE(static_cast<double>(run.good), 0.99 * static_cast<double>(run.requests));
}

}  // namespace
}  // namespace millrace

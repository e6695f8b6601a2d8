// Edits as a broken or hostile router would send them: valid traffic, then one random mutation.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/worker/engine/edits.h"
#include "tests/worker/engine/fake_model.h"
#include "tests/worker/engine/recorder.h"
#include "worker/engine/engine.h"

namespace millrace::testing {
namespace {

using worker::v1::Admit;
using worker::v1::Edit;

class Mutator {
 public:
  explicit Mutator(uint64_t seed) : random_(seed) {}

  uint32_t Below(uint32_t end) { return static_cast<uint32_t>(random_() % end); }

  // Near the limits, or anything.
  uint32_t Number() {
    static constexpr uint32_t kSpecial[] = {
        0, 1, 7, 8, 31, 32, 33, 63, 64, 99, 100, 511, 512, 513, 1u << 31, UINT32_MAX - 31, UINT32_MAX};
    return Below(3) == 0 ? static_cast<uint32_t>(random_()) : kSpecial[Below(std::size(kSpecial))];
  }
  float Real() {
    static constexpr float kSpecial[] = {0, -1, 1, 2, 1e38f, -1e38f, NAN, INFINITY, -INFINITY, 1e-40f};
    return kSpecial[Below(std::size(kSpecial))];
  }

  Edit SomeEdit(uint64_t id) {
    std::vector<Admit> admits;
    const uint32_t slot = Below(8), blocks = 1 + Below(4), length = 1 + Below(blocks * 32);
    Admit admit = MakeAdmit(slot, Prompt(static_cast<int32_t>(length)), Blocks(slot * 8, static_cast<int>(blocks)),
                            length + 1 + Below(100));
    admit.set_rank(static_cast<int64_t>(random_()));
    admits.push_back(admit);
    Edit edit = MakeEdit(id, admits, {slot});
    AddExtend(edit, slot, {slot * 8 + 4, slot * 8 + 5});
    auto* rank = edit.add_rank();
    rank->set_slot(Below(8));
    rank->set_rank(static_cast<int64_t>(random_()));
    return edit;
  }

  void Mutate(Edit& edit) {
    Admit& admit = *edit.mutable_admit(0);
    auto& sampling = *admit.mutable_sampling();
    switch (Below(24)) {
      case 0:
        return edit.set_edit_id(Number());
      case 1:
        return edit.set_release(0, Number());
      case 2:
        return admit.set_slot(Number());
      case 3:
        return admit.set_num_cached_tokens(Number());
      case 4:
        return admit.set_token_ids(0, static_cast<int32_t>(Number()));
      case 5:
        return admit.set_block_table(0, Number());
      case 6:
        return admit.add_block_table(Number());
      case 7:
        return admit.set_filling_slot(Number());
      case 8:
        return admit.set_num_prompt_tokens(Number());
      case 9:
        return admit.set_min_length(Number());
      case 10:
        return admit.set_max_length(Number());
      case 11:
        return admit.add_stop_token_ids(static_cast<int32_t>(Number()));
      case 12:
        return sampling.set_temperature(Real());
      case 13:
        return sampling.set_top_k(Number());
      case 14:
        return sampling.set_top_p(Real());
      case 15:
        return sampling.set_repetition_penalty(Real());
      case 16:
        return sampling.set_frequency_penalty(Real());
      case 17:
        return sampling.add_bias_token_ids(static_cast<int32_t>(Number())), sampling.add_bias_values(Real());
      case 18:
        return sampling.set_logprobs(Number());
      case 19:
        return sampling.set_prompt_logprobs(Number());
      case 20:
        return edit.mutable_extend(0)->set_slot(Number());
      case 21:
        return edit.mutable_extend(0)->set_block_table(0, Number());
      case 22:
        return edit.mutable_rank(0)->set_slot(Number());
      case 23:
        return admit.clear_token_ids();
    }
  }

 private:
  std::mt19937_64 random_;
};

uint64_t Seed() {
  const char* seed = std::getenv("MILLRACE_TEST_SEED");
  return seed != nullptr ? std::strtoull(seed, nullptr, 10) : std::random_device()();
}

// After whatever a stream did, the next one computes what it would have computed on a fresh worker, in every block.
TEST(HostileEdits, NeverTouchAnotherStream) {
  const uint64_t seed = Seed();
  SCOPED_TRACE(::testing::Message() << "MILLRACE_TEST_SEED=" << seed);
  std::printf("MILLRACE_TEST_SEED=%llu\n", static_cast<unsigned long long>(seed));
  Mutator mutator(seed);
  EngineOptions options;
  options.limits = SmallLimits();
  Engine engine(std::make_unique<FakeModel>(options.limits), options);
  int refused = 0;
  for (int round = 0; round < 150; ++round) {
    const auto hostile = std::make_shared<Recorder>();
    engine.Attach(hostile);
    absl::Status status;
    uint64_t id = 1;
    for (; id < 6 && status.ok(); ++id) {
      Edit edit = mutator.SomeEdit(id);
      if (mutator.Below(2) == 0) mutator.Mutate(edit);
      status = engine.Post(hostile.get(), edit);
    }
    if (status.ok()) {
      const auto end = hostile->Await(
          [&](const Recorder::View& view) { return !view.error.ok() || view.last.applied_edit() + 1 == id; });
      status = end.error;
    }
    if (!status.ok()) {
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
      ++refused;
    }
    const auto honest = std::make_shared<Recorder>();
    engine.Attach(honest);
    std::vector<Admit> admits;
    for (uint32_t slot = 0; slot < 8; ++slot) {
      admits.push_back(MakeAdmit(slot, Prompt(40, static_cast<int32_t>(slot)), Blocks(slot * 8, 8), 44));
    }
    ASSERT_TRUE(engine.Post(honest.get(), MakeEdit(1, admits)).ok());
    const auto view = honest->AwaitFinished({0, 1, 2, 3, 4, 5, 6, 7});
    for (uint32_t slot = 0; slot < 8; ++slot) {
      ASSERT_EQ(view.slots.at(slot).tokens, FakeModel::Generate(Prompt(40, static_cast<int32_t>(slot)), 4)) << round;
    }
  }
  EXPECT_GT(refused, 20) << "the mutations are to be mostly hostile";
}

}  // namespace
}  // namespace millrace::testing

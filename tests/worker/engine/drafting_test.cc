// Drafted tokens change nothing but how many come in a step: whoever guesses, however well, and wherever the sequence
// ends.
#include "worker/engine/drafting.h"

#include <memory>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/worker/engine/edits.h"
#include "tests/worker/engine/fake_model.h"
#include "tests/worker/engine/recorder.h"
#include "worker/engine/engine.h"

namespace millrace::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using worker::v1::Admit;
using worker::v1::DRAFT_METHOD_LOOKUP;
using worker::v1::DRAFT_METHOD_MODEL;
using worker::v1::DraftMethod;
using worker::v1::Edit;
using View = Recorder::View;

std::vector<int32_t> LookUp(const std::vector<int32_t>& tokens, int32_t max_count) {
  return LookUpDraft({tokens.data(), std::ssize(tokens)}, max_count);
}

TEST(LookUpDraft, GivesWhatFollowedTheLongestAgreement) {
  EXPECT_THAT(LookUp({1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3}, 2), ElementsAre(4, 9));
  EXPECT_THAT(LookUp({7, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3}, 2), ElementsAre(5, 1)) << "of equals the latest";
}

TEST(LookUpDraft, GivesNothingWhereTheEndIsNew) {
  EXPECT_THAT(LookUp({1, 2, 3, 4}, 8), IsEmpty());
  EXPECT_THAT(LookUp({3, 1, 2, 3}, 8), IsEmpty()) << "one token in common is too few";
  EXPECT_THAT(LookUp({5}, 8), IsEmpty());
  EXPECT_THAT(LookUp({1, 2, 8, 1, 2}, 0), IsEmpty());
}

TEST(LookUpDraft, GoesOnWithARepetition) {
  EXPECT_THAT(LookUp({1, 2, 1, 2}, 5), ElementsAre(1, 2, 1, 2, 1));
  EXPECT_THAT(LookUp({5, 5, 5}, 3), ElementsAre(5, 5, 5));
}

struct Case {
  DraftMethod method;
  int32_t length;
  double right;
  DraftModel model;
};

void PrintTo(const Case& c, std::ostream* out) {
  *out << "method " << c.method << ", " << c.length << " tokens, right " << c.right << ", model "
       << static_cast<int>(c.model);
}

class EngineDraftTest : public ::testing::TestWithParam<Case> {
 protected:
  EngineDraftTest() {
    EngineOptions options;
    options.limits = SmallLimits();
    options.limits.max_logit_rows = 64;
    options.limits.draft_model = GetParam().model;
    options.step_cost.set_prefill_token_us(100);
    auto model = std::make_unique<FakeModel>(options.limits, 2, FakeDraft{.right = GetParam().right});
    model_ = model.get();
    engine_ = std::make_unique<Engine>(std::move(model), options);
    engine_->Attach(router_);
  }
  ~EngineDraftTest() override { model_->OpenGate(); }

  void Post(const Edit& edit) {
    const absl::Status status = engine_->Post(router_.get(), edit);
    EXPECT_TRUE(status.ok()) << status;
  }

  static void AddDraft(Edit& edit, uint32_t slot, uint32_t length) {
    auto* draft = edit.add_draft();
    draft->set_slot(slot);
    draft->set_length(length);
    if (length > 0) draft->set_method(GetParam().method);
  }

  static Edit Drafting(uint64_t id, const std::vector<Admit>& admits) {
    Edit edit = MakeEdit(id, admits);
    for (const Admit& admit : admits) AddDraft(edit, admit.slot(), static_cast<uint32_t>(GetParam().length));
    return edit;
  }

  // Of all rows so far; each row gives at most one token more than it drafted.
  struct Counts {
    int drafted = 0, right = 0;
  };
  static Counts Count(const View& view) {
    Counts counts;
    for (const auto& report : view.reports) {
      for (const auto& row : report.rows()) {
        EXPECT_LE(row.token_ids_size(), static_cast<int>(row.num_drafted()) + 1);
        counts.drafted += static_cast<int>(row.num_drafted());
        counts.right += std::max(0, row.token_ids_size() - 1);
      }
    }
    return counts;
  }
  static bool IsAlwaysRight() { return GetParam().method == DRAFT_METHOD_MODEL && GetParam().right == 1; }

  FakeModel* model_;
  std::unique_ptr<Engine> engine_;
  std::shared_ptr<Recorder> router_ = std::make_shared<Recorder>();
};

TEST_P(EngineDraftTest, GivesTheTokensOfPlainDecodingInFewerSteps) {
  Post(Drafting(1, {MakeAdmit(2, Prompt(100), Blocks(3, 8), 200)}));
  const View view = router_->AwaitFinished({2});
  EXPECT_EQ(view.slots.at(2).tokens, FakeModel::Generate(Prompt(100), 100));
  EXPECT_EQ(view.slots.at(2).finish, worker::v1::FINISH_REASON_LENGTH);
  const Counts counts = Count(view);
  if (!IsAlwaysRight()) return;
  EXPECT_EQ(counts.right, counts.drafted);
  EXPECT_LE(view.last.step(), 2u + 100u / static_cast<uint32_t>(GetParam().length + 1) + 1u);
}

TEST_P(EngineDraftTest, KeepsManySequencesApartWhilePromptsArrive) {
  std::vector<Admit> admits;
  for (uint32_t slot = 0; slot < 6; ++slot) {
    const auto length = static_cast<int32_t>(20 + 9 * slot);
    admits.push_back(MakeAdmit(slot, Prompt(length, static_cast<int32_t>(slot)), Blocks(slot * 8, 8), 200 + slot));
    admits.back().mutable_sampling()->set_seed(slot);
  }
  Post(Drafting(1, {admits.begin(), admits.begin() + 3}));
  router_->Await([](const View& view) { return view.slots.size() == 3; });
  Post(Drafting(2, {admits.begin() + 3, admits.end()}));
  const View view = router_->AwaitFinished({0, 1, 2, 3, 4, 5});
  for (uint32_t slot = 0; slot < 6; ++slot) {
    const auto length = static_cast<int32_t>(20 + 9 * slot);
    EXPECT_EQ(view.slots.at(slot).tokens, FakeModel::Generate(Prompt(length, static_cast<int32_t>(slot)),
                                                              static_cast<int>(200 + slot) - length, slot));
  }
}

TEST_P(EngineDraftTest, EndsWithAStopTokenAmongTheGuesses) {
  const std::vector<int32_t> expected = FakeModel::Generate(Prompt(10), 60);
  for (uint64_t n = 0; n < 8; ++n) {
    const auto first = std::ranges::find(expected, expected[10 + n]);
    Admit admit = MakeAdmit(0, Prompt(10), {0, 1, 2}, 70);
    admit.add_stop_token_ids(*first);
    Post(Drafting(n + 1, {admit}));
    const View view = router_->AwaitFinished({0});
    EXPECT_EQ(view.slots.at(0).finish, worker::v1::FINISH_REASON_STOP_TOKEN);
    EXPECT_EQ(view.slots.at(0).tokens, std::vector(expected.begin(), first + 1));
    router_->Forget(0);
  }
}

TEST_P(EngineDraftTest, SamplesNoStopTokenBelowMinLength) {
  Admit admit = MakeAdmit(0, Prompt(10), {0, 1}, 60);
  for (int32_t token = 0; token < 64; ++token) admit.add_stop_token_ids(token);
  admit.set_min_length(31);
  Post(Drafting(1, {admit}));
  const View view = router_->AwaitFinished({0});
  const auto& tokens = view.slots.at(0).tokens;
  ASSERT_GE(tokens.size(), 21u);
  for (size_t i = 0; i < 21; ++i) EXPECT_GE(tokens[i], 64) << i;
}

TEST_P(EngineDraftTest, DraftsNoFurtherThanItsLease) {
  Post(Drafting(1, {MakeAdmit(0, Prompt(30), {9}, 170)}));
  const View stalled = router_->Await([](const View& view) { return view.last.stalled_slots_size() == 1; });
  EXPECT_EQ(stalled.slots.at(0).tokens.size(), 3u) << "positions 0 to 31 have room, the token at 32 has none";
  Edit edit = MakeEdit(2);
  AddExtend(edit, 0, {4, 7, 8, 11, 12});
  Post(edit);
  EXPECT_EQ(router_->AwaitFinished({0}).slots.at(0).tokens, FakeModel::Generate(Prompt(30), 140));
}

TEST_P(EngineDraftTest, CountsForPenaltiesWhatItGaveAndNothingElse) {
  Admit admit = MakeAdmit(3, Prompt(40), Blocks(0, 4), 100);
  admit.mutable_sampling()->set_repetition_penalty(1.1f);
  Post(Drafting(1, {admit}));
  EXPECT_EQ(router_->AwaitFinished({3}).slots.at(3).tokens, FakeModel::Generate(Prompt(40), 60));
  EXPECT_EQ(model_->history(3).output, FakeModel::Generate(Prompt(40), 60));
}

TEST_P(EngineDraftTest, ReportsTheLogprobsOfEveryTokenOnce) {
  Admit admit = MakeAdmit(0, Prompt(40), Blocks(0, 4), 100);
  admit.mutable_sampling()->set_logprobs(2);
  Post(Drafting(1, {admit}));
  const View view = router_->AwaitFinished({0});
  ASSERT_EQ(view.slots.at(0).logprobs.size(), 60u);
  for (int i = 0; i < 60; ++i) {
    EXPECT_EQ(view.slots.at(0).logprobs[static_cast<size_t>(i)].logprob(), static_cast<float>(-(40 + i)));
  }
}

// What is read from the cache of an earlier sequence the draft model has read too, or reads then.
TEST_P(EngineDraftTest, DraftsAsWellAfterAPrefixHit) {
  const std::vector<int32_t> generated = FakeModel::Generate(Prompt(100), 100);
  Post(Drafting(1, {MakeAdmit(0, Prompt(100), Blocks(0, 7), 200)}));
  router_->AwaitFinished({0});
  std::vector<int32_t> longer = Prompt(100);
  longer.insert(longer.end(), generated.begin(), generated.begin() + 70);
  std::vector<uint32_t> blocks = Blocks(0, 5);
  for (const uint32_t block : {20u, 21u, 22u}) blocks.push_back(block);
  Post(Drafting(2, {MakeAdmit(1, longer, blocks, 250, 160)}));
  const View view = router_->AwaitFinished({1});
  EXPECT_EQ(view.slots.at(1).tokens, FakeModel::Generate(longer, 80));
  const Counts counts = Count(view);
  if (IsAlwaysRight()) {
    EXPECT_EQ(counts.right, counts.drafted);
  }
}

TEST_P(EngineDraftTest, ChangesItsLengthInMidStream) {
  Post(Drafting(1, {MakeAdmit(0, Prompt(30), Blocks(0, 15), 470)}));
  for (uint64_t id = 2; id < 40; ++id) {
    Edit edit = MakeEdit(id);
    AddDraft(edit, 0, static_cast<uint32_t>(id * 7 % (kMaxDrafts + 1)));
    Post(edit);
    router_->AwaitApplied(id);
  }
  EXPECT_EQ(router_->AwaitFinished({0}).slots.at(0).tokens, FakeModel::Generate(Prompt(30), 440));
}

TEST_P(EngineDraftTest, FailsWhereItsOwnLogitsFailAndKeepsTheTokensBefore) {
  // The token that is poison comes from a guess that is right: here the prompt ends with it at once.
  std::vector<int32_t> prompt = Prompt(40);
  prompt.back() = kPoison;
  Post(Drafting(1, {MakeAdmit(0, prompt, Blocks(0, 4), 100), MakeAdmit(1, Prompt(41), Blocks(8, 4), 100)}));
  const View view = router_->AwaitFinished({0, 1});
  EXPECT_EQ(view.slots.at(0).finish, worker::v1::FINISH_REASON_NON_FINITE);
  EXPECT_EQ(view.slots.at(1).tokens, FakeModel::Generate(Prompt(41), 59));
}

INSTANTIATE_TEST_SUITE_P(Drafts, EngineDraftTest,
                         ::testing::Values(Case{DRAFT_METHOD_LOOKUP, 4, 1, DraftModel::kNone},
                                           Case{DRAFT_METHOD_MODEL, 1, 1, DraftModel::kOwnCache},
                                           Case{DRAFT_METHOD_MODEL, 4, 1, DraftModel::kOwnCache},
                                           Case{DRAFT_METHOD_MODEL, 8, 0.7, DraftModel::kOwnCache},
                                           Case{DRAFT_METHOD_MODEL, 8, 0, DraftModel::kOwnCache},
                                           Case{DRAFT_METHOD_LOOKUP, 8, 1, DraftModel::kOwnCache}));

}  // namespace
}  // namespace millrace::testing

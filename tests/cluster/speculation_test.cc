// Speculation changes no token: whoever drafts, however long, well or badly, with lengths that change in mid-stream.
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/cluster/exactness.h"
#include "tests/test_stream.h"

namespace millrace {
namespace {

using worker::v1::DraftMethod;
using worker::v1::Edit;

enum class Source {
  kLookup,
  kEarlyLayers,
  kSameModel,   // always right where nothing but the tokens counts
  kOtherModel,  // of another architecture: right by chance
  kNotFinite,   // whose logits are NaN
};

struct Case {
  const char* model;
  Source source;
};

std::string NameOf(const testing::TestParamInfo<Case>& info) {
  static constexpr const char* kNames[] = {"Lookup", "EarlyLayers", "SameModel", "OtherModel", "NotFinite"};
  std::string name = std::string(info.param.model) + kNames[static_cast<int>(info.param.source)];
  std::erase(name, '-');
  return name;
}

// The same folder with every weight NaN.
std::filesystem::path CopyWithoutWeights(const std::filesystem::path& model, const std::string& name) {
  const std::filesystem::path copy = std::filesystem::path(testing::TempDir()) / ("not_finite_" + name);
  std::filesystem::remove_all(copy);
  std::filesystem::copy(model, copy, std::filesystem::copy_options::recursive);
  std::fstream file(copy / "model.safetensors", std::ios::in | std::ios::out | std::ios::binary);
  uint64_t header_bytes = 0;
  file.read(reinterpret_cast<char*>(&header_bytes), sizeof(header_bytes));
  const auto begin = static_cast<std::streamoff>(sizeof(header_bytes) + header_bytes);
  file.seekg(0, std::ios::end);
  const auto size = static_cast<size_t>(file.tellg() - begin);
  file.seekp(begin);
  const std::string nan(size, '\xff');
  file.write(nan.data(), static_cast<std::streamsize>(size));
  return copy;
}

class Speculation : public ExactnessTest, public testing::WithParamInterface<Case> {
 protected:
  void SetUp() override {
    Prepare(GetParam().model);
    const float temperatures[] = {0, 0.2f, 0.8f, 1.2f};
    for (size_t i = 0; i < specs_.size(); ++i) {
      specs_[i].sampling.set_temperature(temperatures[i % 4]);
      if (i % 3 == 1) specs_[i].sampling.set_top_p(0.9f);
      // Some repeat themselves, which looking up finds.
      if (i % 4 != 1) continue;
      std::vector<int32_t>& prompt = specs_[i].prompt;
      const std::vector<int32_t> once = prompt;
      prompt.insert(prompt.end(), once.begin(), once.end());
      prompt.push_back(once.front());
    }
  }

  DraftMethod method() const {
    return GetParam().source == Source::kLookup ? worker::v1::DRAFT_METHOD_LOOKUP : worker::v1::DRAFT_METHOD_MODEL;
  }

  WorkerShape Shape() const {
    WorkerShape shape;
    const std::string other =
        GetParam().model == std::string("llama-tiny-3x48") ? "qwen2-tiny-5x16" : "llama-tiny-3x48";
    if (GetParam().source == Source::kEarlyLayers) shape.draft_layers = 1;
    if (GetParam().source == Source::kSameModel) shape.draft_model = model_;
    if (GetParam().source == Source::kOtherModel) shape.draft_model = Fixture(other);
    if (GetParam().source == Source::kNotFinite) shape.draft_model = CopyWithoutWeights(model_, GetParam().model);
    return shape;
  }

  // Whoever is admitted drafts so many tokens.
  std::function<void(Edit*)> Always(uint32_t length) const {
    return [method = method(), length](Edit* edit) {
      for (const auto& admit : edit->admit()) Add(edit, admit.slot(), method, length);
    };
  }

  // Every edit gives everyone another length.
  std::function<void(Edit*)> Switching(uint32_t num_slots) const {
    return [method = method(), num_slots, random = std::mt19937_64(Seed())](Edit* edit) mutable {
      for (uint32_t slot = 0; slot < num_slots; ++slot) Add(edit, slot, method, static_cast<uint32_t>(random() % 9));
    };
  }

  // There were guesses, and as many of them right as the source can have.
  void ExpectGuesses(const InProcessCluster& cluster) {
    const double share = static_cast<double>(cluster.num_right()) / static_cast<double>(cluster.num_drafted());
    std::printf("%lld drafted, %.3f right\n", static_cast<long long>(cluster.num_drafted()), share);
    EXPECT_GT(cluster.num_drafted(), 20);
    if (GetParam().source == Source::kSameModel) {
      EXPECT_GT(share, 0.9) << "penalties and ends aside, every guess is right";
    } else if (GetParam().source == Source::kLookup) {
      EXPECT_GT(share, 0);
    }
  }

  static void Add(Edit* edit, uint32_t slot, DraftMethod method, uint32_t length) {
    auto* draft = edit->add_draft();
    draft->set_slot(slot);
    draft->set_length(length);
    if (length > 0) draft->set_method(method);
  }
};

TEST_P(Speculation, ChangesNothingAtAnyLength) {
  for (uint32_t length = 1; length <= 8; ++length) {
    SCOPED_TRACE(length);
    InProcessCluster cluster(model_);
    WorkerShape shape = Shape();
    shape.num_slots = static_cast<int>(2 * length);
    cluster.AddWorker(shape);
    cluster.SetEditor(Always(length));
    Groups groups;
    for (size_t i = length - 1; i < specs_.size(); i += 4) groups.push_back({specs_[i]});
    const std::vector<Output> outputs = cluster.Run(std::move(groups), 1);
    for (size_t i = 0; i < outputs.size(); ++i) {
      const Output& truth = Truth()[length - 1 + 4 * i];
      EXPECT_EQ(outputs[i].tokens, truth.tokens) << i;
      EXPECT_EQ(outputs[i].logprobs, truth.logprobs) << i;
    }
    ExpectGuesses(cluster);
    ExpectEmpty(cluster, 0);
  }
}

TEST_P(Speculation, ChangesNothingWhereLengthsChangeAndPrefixesAreFound) {
  InProcessCluster cluster(model_, 8);
  cluster.AddWorker(Shape());
  cluster.SetEditor(Switching(64));
  ExpectTruth(cluster.Run(Singles(true), 1));
  ExpectTruth(cluster.Run(Singles(true), 0));
  EXPECT_GT(cluster.scheduler().counts().cached_tokens, cluster.scheduler().counts().prompt_tokens / 3);
  ExpectGuesses(cluster);
  ExpectEmpty(cluster, 0);
}

TEST_P(Speculation, ChangesNothingAfterPreemption) {
  InProcessCluster cluster(model_, 0);
  WorkerShape shape = Shape();
  shape.num_blocks = 24;
  cluster.AddWorker(shape);
  cluster.SetEditor(Always(8));
  ExpectTruth(cluster.Run(Singles(true), 0));
  EXPECT_GT(cluster.scheduler().counts().preemptions, 0u);
  ExpectEmpty(cluster, 0);
}

TEST_P(Speculation, ChangesNothingWhenAWorkerIsLost) {
  if (TestsRunOnGpu()) GTEST_SKIP() << "a process drives a GPU for one engine";
  InProcessCluster cluster(model_);
  cluster.AddWorker(Shape());
  cluster.AddWorker(Shape());
  cluster.SetEditor(Always(3));
  ExpectTruth(RunLosingAWorker(cluster));
  ExpectEmpty(cluster, 1);
}

TEST_P(Speculation, ChangesNoneOfNChoices) {
  InProcessCluster plain(model_), cluster(model_);
  plain.AddWorker({});
  cluster.AddWorker(Shape());
  cluster.SetEditor(Always(5));
  Groups groups;
  for (size_t i = 0; i < 8; ++i) {
    groups.emplace_back(4, specs_[i]);
    for (uint64_t k = 0; k < 4; ++k) groups.back()[k].sampling.set_seed(specs_[i].sampling.seed() + k);
  }
  const std::vector<Output> truth = plain.Run(groups, 0), outputs = cluster.Run(groups, 0);
  for (size_t i = 0; i < truth.size(); ++i) EXPECT_EQ(outputs[i].tokens, truth[i].tokens) << "choice " << i;
}

TEST_P(Speculation, ChangesNothingWhereTheRouterChoosesTheLengths) {
  InProcessCluster cluster(model_);
  cluster.AddWorker(Shape());
  ExpectTruth(cluster.Run(Singles(true), 20));
  ExpectEmpty(cluster, 0);
}

constexpr const char* kLlama = "llama-tiny-3x48";
constexpr const char* kQwen2 = "qwen2-tiny-5x16";
constexpr const char* kQwen3 = "qwen3-tiny-6x32";
INSTANTIATE_TEST_SUITE_P(Sources, Speculation,
                         testing::Values(Case{kLlama, Source::kLookup}, Case{kQwen3, Source::kEarlyLayers},
                                         Case{kQwen2, Source::kSameModel}, Case{kLlama, Source::kOtherModel},
                                         Case{kQwen2, Source::kNotFinite}),
                         NameOf);

}  // namespace
}  // namespace millrace

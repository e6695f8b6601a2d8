// What speculation brings on this machine: the router's core and a worker's engine in one process, a model that writes
// real text, prompts of three kinds, with and without drafts in turns.
//   speculation_bench --model DIR [--draft_layers N | --draft_model DIR] [--max_tokens N] [--batch N]
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "nlohmann/json.hpp"
#include "router/text/chat_template.h"
#include "router/text/tokenizer.h"
#include "tests/cluster/in_process.h"
#include "tests/fixtures.h"

ABSL_FLAG(std::string, model, "", "folder of a model with a chat template");
ABSL_FLAG(std::string, draft_model, "", "folder of a draft model");
ABSL_FLAG(int, draft_layers, 0, "layers that draft");
ABSL_FLAG(int, max_tokens, 128, "of each answer");
ABSL_FLAG(int, batch, 1, "sequences at once");
ABSL_FLAG(double, temperature, 0, "of sampling");

namespace millrace {
namespace {

std::vector<std::string> ReadPrompts(const std::string& set) {
  std::ifstream file(SourceDir() / "tests" / "bench" / "prompts" / (set + ".jsonl"));
  std::vector<std::string> prompts;
  for (std::string line; std::getline(file, line);) prompts.push_back(nlohmann::json::parse(line)["prompt"]);
  return prompts;
}

class Bench {
 public:
  Bench() {
    const std::string model = absl::GetFlag(FLAGS_model);
    tokenizer_ = *Tokenizer::Load(model);
    template_ = *ChatTemplate::Load(model);
    WorkerShape shape;
    shape.measured = true;
    shape.num_blocks = 2048;
    shape.draft_model = absl::GetFlag(FLAGS_draft_model);
    shape.draft_layers = absl::GetFlag(FLAGS_draft_layers);
    for (InProcessCluster* cluster : {&plain_, &drafting_}) cluster->AddWorker(shape);
  }

  void Run(const std::string& set) {
    const std::vector<std::string> prompts = ReadPrompts(set);
    const int batch = absl::GetFlag(FLAGS_batch);
    std::vector<double> ratios;
    Sums plain, drafting;
    for (int round = 0; round < 3; ++round) {
      Sums of_round[2];
      for (size_t i = 0; i < prompts.size(); i += static_cast<size_t>(batch)) {
        std::vector<std::vector<SequenceSpec>> groups;
        for (int b = 0; b < batch; ++b)
          groups.push_back({Spec(prompts[(i + static_cast<size_t>(b)) % prompts.size()], b)});
        of_round[0] += Play(plain_, groups);
        of_round[1] += Play(drafting_, groups);
      }
      ratios.push_back(of_round[1].Rate() / of_round[0].Rate());
      plain += of_round[0];
      drafting += of_round[1];
    }
    std::sort(ratios.begin(), ratios.end());
    std::printf(
        "%-10s batch %2d  plain %6.1f  drafting %6.1f tok/s  ratio %.2f (%.2f … %.2f)  %lld drafted, %.2f right%s\n",
        set.c_str(), batch, plain.Rate(), drafting.Rate(), ratios[1], ratios[0], ratios[2],
        static_cast<long long>(drafting.drafted),
        static_cast<double>(drafting.right) / static_cast<double>(std::max<int64_t>(drafting.drafted, 1)),
        plain.tokens == drafting.tokens ? "" : "  DIFFERENT LENGTHS");
    std::fflush(stdout);
  }

 private:
  struct Sums {
    int64_t tokens = 0, drafted = 0, right = 0;
    double seconds = 0;
    double Rate() const { return static_cast<double>(tokens) / seconds; }
    Sums& operator+=(const Sums& other) {
      tokens += other.tokens;
      drafted += other.drafted;
      right += other.right;
      seconds += other.seconds;
      return *this;
    }
  };

  SequenceSpec Spec(const std::string& prompt, int seed) const {
    const nlohmann::json messages = {{{"role", "user"}, {"content", prompt}}};
    SequenceSpec spec;
    spec.prompt = *tokenizer_->EncodePieces(*template_->Render({messages.dump(), "", true, ""}));
    spec.max_tokens = absl::GetFlag(FLAGS_max_tokens);
    if (const auto eos = tokenizer_->TokenId("<|im_end|>")) spec.stop_token_ids.push_back(*eos);
    spec.sampling.set_top_p(1);
    spec.sampling.set_repetition_penalty(1);
    spec.sampling.set_temperature(static_cast<float>(absl::GetFlag(FLAGS_temperature)));
    spec.sampling.set_seed(static_cast<uint64_t>(seed));
    return spec;
  }

  // The time from the last sequence's first token to the last token of all: everybody decodes in it.
  static Sums Play(InProcessCluster& cluster, const std::vector<std::vector<SequenceSpec>>& groups) {
    const int64_t drafted = cluster.num_drafted(), right = cluster.num_right();
    const std::vector<Output> outputs = cluster.Run(groups, 0);
    Sums sums;
    Time begin = kNever, end = 0;
    for (const Output& output : outputs) {
      sums.tokens += static_cast<int64_t>(output.tokens.size()) - 1;
      begin = std::min(begin, output.report.first_token);
      end = std::max(end, output.report.last_token);
    }
    sums.drafted = cluster.num_drafted() - drafted;
    sums.right = cluster.num_right() - right;
    sums.seconds = static_cast<double>(end - begin) * 1e-6;
    return sums;
  }

  std::unique_ptr<Tokenizer> tokenizer_;
  std::unique_ptr<ChatTemplate> template_;
  InProcessCluster plain_{absl::GetFlag(FLAGS_model), 64, false}, drafting_{absl::GetFlag(FLAGS_model)};
};

}  // namespace
}  // namespace millrace

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  millrace::Bench bench;
  for (const char* set : {"code_edit", "summary", "chat"}) bench.Run(set);
}

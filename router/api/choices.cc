#include "router/api/choices.h"

#include <iterator>
#include <utility>

namespace millrace {

absl::StatusOr<Choices> MakeChoices(const v1::GenerateRequest& request, std::vector<SequenceSpec> specs,
                                    const std::string& request_id, const Tokenizer& tokenizer) {
  Choices choices;
  std::vector<ChoiceStream> complete;
  for (size_t i = 0; i < specs.size(); ++i) {
    SequenceSpec& spec = specs[i];
    ChoiceStream stream(static_cast<uint32_t>(i), request.sampling(), spec.sampling.seed(), request_id, tokenizer);
    if (!request.resume().empty()) {
      const v1::Resume& resume = request.resume(static_cast<int>(i));
      if (resume.finished()) continue;
      if (absl::Status status = stream.Replay(resume, spec); !status.ok()) return status;
    }
    if (!stream.ended()) {
      choices.streams.push_back(std::move(stream));
      choices.specs.push_back(std::move(spec));
      continue;
    }
    SequenceOutcome outcome;
    outcome.report.prompt_tokens = static_cast<int32_t>(spec.prompt.size());
    stream.Complete(outcome);
    complete.push_back(std::move(stream));
  }
  std::move(complete.begin(), complete.end(), std::back_inserter(choices.streams));
  return choices;
}

}  // namespace millrace

#include "router/api/sequence_specs.h"

#include <algorithm>
#include <limits>
#include <map>

#include "absl/strings/str_cat.h"

namespace millrace {
namespace {

constexpr float kForbids = -100;  // the bias that forbids a token
constexpr size_t kSpareTokens = 1024;

worker::v1::Sampling MakeSampling(const v1::SamplingParams& params, uint32_t vocab_size) {
  worker::v1::Sampling sampling;
  sampling.set_temperature(params.has_temperature() ? params.temperature() : 1);
  const auto top_k = static_cast<uint32_t>(params.top_k());
  sampling.set_top_k(top_k < vocab_size ? top_k : 0);
  sampling.set_top_p(params.has_top_p() ? params.top_p() : 1);
  sampling.set_min_p(params.min_p());
  sampling.set_repetition_penalty(params.has_repetition_penalty() ? params.repetition_penalty() : 1);
  sampling.set_presence_penalty(params.presence_penalty());
  sampling.set_frequency_penalty(params.frequency_penalty());
  // Sorted, because a map's order is not the same in every process.
  for (const auto& [token, bias] : std::map<int32_t, float>(params.logit_bias().begin(), params.logit_bias().end())) {
    sampling.add_bias_token_ids(token);
    sampling.add_bias_values(bias == kForbids ? -std::numeric_limits<float>::infinity() : bias);
  }
  if (params.has_logprobs()) sampling.set_logprobs(static_cast<uint32_t>(params.logprobs()));
  return sampling;
}

std::vector<int32_t> StopTokens(const v1::SamplingParams& params, const worker::v1::Model& model) {
  std::vector<int32_t> stops(params.stop_token_ids().begin(), params.stop_token_ids().end());
  if (!params.ignore_eos()) stops.insert(stops.end(), model.eos_token_ids().begin(), model.eos_token_ids().end());
  std::sort(stops.begin(), stops.end());
  stops.erase(std::unique(stops.begin(), stops.end()), stops.end());
  return stops;
}

}  // namespace

absl::StatusOr<std::vector<SequenceSpec>> MakeSpecs(const v1::GenerateRequest& request, std::vector<int32_t> prompt,
                                                    const SpecContext& context) {
  const v1::SamplingParams& params = request.sampling();
  const int64_t room = context.max_sequence_tokens - static_cast<int64_t>(prompt.size());
  SequenceSpec spec;
  // Without room for one token, the scheduler's refusal tells how much there is.
  spec.max_tokens = params.has_max_tokens() ? params.max_tokens() : static_cast<int32_t>(std::max<int64_t>(room, 1));
  spec.min_tokens = params.min_tokens();
  if (!params.has_max_tokens() && room >= 1 && spec.min_tokens > room) {
    return absl::OutOfRangeError(absl::StrCat("sampling.min_tokens is ", spec.min_tokens, "; after a prompt of ",
                                              prompt.size(), " tokens there is room for ", room));
  }
  spec.min_tokens = std::min(spec.min_tokens, spec.max_tokens);
  spec.prompt = std::move(prompt);
  spec.sampling = MakeSampling(params, context.model->vocab_size());
  spec.stop_token_ids = StopTokens(params, *context.model);
  spec.cache_salt = request.cache_salt();
  spec.tenant = request.tenant();
  spec.priority = request.priority();
  spec.deadline = context.deadline;
  const int choices = params.has_n() ? params.n() : 1;
  std::vector<SequenceSpec> specs(static_cast<size_t>(choices), spec);
  for (size_t choice = 0; choice < specs.size(); ++choice) {
    specs[choice].sampling.set_seed(context.seed + choice);
    // Here and not when the answer comes, which is under the fleet's lock: a long prompt takes its time to copy.
    specs[choice].prompt.reserve(spec.prompt.size() +
                                 std::min(static_cast<size_t>(std::max(spec.max_tokens, 0)), kSpareTokens));
  }
  for (int choice = 0; choice < request.resume_size(); ++choice) {
    const auto& received = request.resume(choice).token_ids();
    specs[static_cast<size_t>(choice)].output.assign(received.begin(), received.end());
  }
  if (params.has_prompt_logprobs())
    specs[0].sampling.set_prompt_logprobs(static_cast<uint32_t>(params.prompt_logprobs()));
  return specs;
}

}  // namespace millrace

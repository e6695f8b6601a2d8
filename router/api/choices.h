// The choices of one request: a stream of output for each, and the specs of those that have still to be generated. A
// resumed request may have choices that had ended before. A value, moved into its call.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "millrace/v1/inference.pb.h"
#include "router/api/choice_stream.h"
#include "router/schedule/scheduler.h"

namespace millrace {

struct Choices {
  std::vector<ChoiceStream> streams;  // those of `specs`, in its order, then complete ones whose Finish is to be sent
  std::vector<SequenceSpec> specs;
};

// `specs`: one for each choice. INVALID_ARGUMENT if what the client received cannot be an answer to them.
absl::StatusOr<Choices> MakeChoices(const v1::GenerateRequest& request, std::vector<SequenceSpec> specs,
                                    const std::string& request_id, const Tokenizer& tokenizer);

}  // namespace millrace

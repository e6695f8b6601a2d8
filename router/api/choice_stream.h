// One choice of a request: events of its sequence go in, messages to the client come out. What the client has not taken
// yet is merged into one message. Lives as long as its call, whose lock guards it; must not outlive the tokenizer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "millrace/v1/inference.pb.h"
#include "router/fleet/sequence_sink.h"
#include "router/text/detokenizer.h"
#include "router/text/stop_strings.h"

namespace millrace {

class ChoiceStream {
 public:
  ChoiceStream(uint32_t index, const v1::SamplingParams& params, uint64_t seed, const std::string& request_id,
               const Tokenizer& tokenizer);

  // Goes on after what the client received before: nothing of it comes again. It may have ended there. INVALID_ARGUMENT
  // if these tokens cannot be an answer to `spec`. Before any event.
  absl::Status Replay(const v1::Resume& resume, const SequenceSpec& spec);

  // An event without an error. It may end the choice: by its own finish reason, or by a stop string that came to be
  // complete, after which the sequence is of no more use. Further events of an ended choice are ignored.
  void Append(const SequenceEvent& event);
  bool ended() const { return ended_; }
  // The receipts of an ended choice; its last message can then be taken.
  void Complete(const SequenceOutcome& outcome);
  bool complete() const { return complete_; }

  bool has_message() const { return pending_bytes_ > 0 || !prompt_logprobs_.empty() || finish_waits_; }
  v1::GenerateResponse TakeMessage();                      // REQUIRES: has_message()
  size_t pending_bytes() const { return pending_bytes_; }  // of output, about
  void DropPending();

 private:
  void AppendToken(int32_t id);
  void AppendLogProbs(const worker::v1::LogProbs& logprobs);
  void AppendText(const std::string& text);
  void End(worker::v1::FinishReason reason, int32_t last_token);
  void EndText();

  const uint32_t index_;
  const std::string request_id_;
  const std::vector<std::string> stops_;
  Detokenizer detokenizer_;
  StopStrings stop_strings_;

  v1::GenerateResponse pending_;
  size_t pending_bytes_ = 0;
  std::vector<worker::v1::LogProbs> prompt_logprobs_;  // not taken yet, last position first
  size_t known_prompt_logprobs_ = 0;                   // leading ones that the client has
  v1::Finish finish_;
  uint32_t generated_tokens_ = 0;
  bool ended_ = false;
  bool complete_ = false;
  bool finish_waits_ = false;  // complete, and the last message not taken
};

}  // namespace millrace

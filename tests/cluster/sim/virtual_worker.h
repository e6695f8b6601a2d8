// A worker in virtual time: it keeps to the wire contract, packs its steps as the engine does (decoding rows first,
// then prefill by rank up to a time), and says how long each takes by a cost that need not be the one it announced. It
// holds no tokens. One per stream, single-threaded, deterministic.
#pragma once

#include <cstdint>
#include <vector>

#include "millrace/worker/v1/worker.pb.h"
#include "router/schedule/scheduler.h"

namespace millrace {

// How a virtual worker drafts, at the cost of its only drafter.
struct Drafting {
  double accuracy = 0;  // of each guess behind right ones
  int fixed = -1;       // tokens a step, whatever it is told; -1: as it is told
};

class VirtualWorker {
 public:
  // `ends`: by seed, the length at which a sequence samples its stop token.
  VirtualWorker(const worker::v1::Ready& ready, const worker::v1::StepCost& real, const std::vector<uint32_t>* ends,
                const Drafting& drafting);

  void Apply(const worker::v1::Edit& edit);
  Time Begin();  // a step's duration; 0: nothing to do
  worker::v1::StepReport End();
  worker::v1::StepReport Heartbeat() const;
  bool idle() const { return duration_ == 0; }
  uint64_t num_drafts_told() const { return num_drafts_told_; }  // new lengths of slots, but for those that came to 0

 private:
  struct Slot {
    bool live = false;
    bool decoding = false;
    uint64_t serial = 0;
    int64_t rank = 0;
    int64_t filler = -1;
    uint64_t filler_serial = 0;
    uint32_t cached = 0, computed = 0, length = 0, room = 0, max_length = 0;
    uint32_t draft = 0;  // tokens a step
    uint64_t seed = 0;
  };
  struct Chunk {
    uint32_t slot;
    uint32_t tokens;  // 0: a decoding row
    uint32_t drafts;
  };

  bool Waits(const Slot& slot) const;
  uint32_t Fits(double seconds, uint32_t start) const;
  uint32_t Drafts(const Slot& slot) const;
  bool Right(const Slot& slot) const;  // the guess of its next token
  void Sample(uint32_t id, uint32_t drafts, worker::v1::StepReport* report);

  const worker::v1::Ready ready_;
  const worker::v1::StepCost real_;
  const std::vector<uint32_t>* const ends_;
  const Drafting drafting_;
  std::vector<Slot> slots_;
  std::vector<Chunk> chunks_;
  worker::v1::StepReport report_;  // of the step that runs
  Time duration_ = 0;
  uint64_t step_ = 0;
  uint64_t applied_edit_ = 0;
  uint64_t admissions_ = 0;
  uint64_t num_drafts_told_ = 0;
};

}  // namespace millrace

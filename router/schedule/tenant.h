// One tenant in the queue: what it was given, and what of it waits. Owned by the AdmissionQueue.
#pragma once

#include <cstdint>
#include <string>
#include <tuple>

#include "absl/container/btree_set.h"

namespace millrace {

struct Sequence;

struct Tenant {
  struct Waiting {
    int64_t rank;
    uint64_t id;
    Sequence* sequence;
    bool operator<(const Waiting& other) const { return rank != other.rank ? rank < other.rank : id < other.id; }
  };
  // Whose turn it is, lowest first.
  struct Turn {
    int64_t grade = 0;  // of its first sequence: priority, and whether it ran before
    double served = 0;
    uint64_t number = 0;
    Tenant* tenant = nullptr;
    bool operator<(const Turn& other) const {
      return std::tie(grade, served, number) < std::tie(other.grade, other.served, other.number);
    }
  };

  std::string name;
  uint64_t number = 0;
  double served = 0;      // tokens
  int64_t sequences = 0;  // that live
  absl::btree_set<Waiting> waiting;
  int64_t waiting_tokens = 0;
  Turn turn;  // as listed; no tenant: not listed
};

}  // namespace millrace

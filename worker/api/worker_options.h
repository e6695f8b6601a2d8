// Everything an operator may choose about a worker. A value; filled from flags of the same names, validated before
// anything starts.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "service/tls_identity.h"

namespace millrace {

struct WorkerOptions {
  std::string model;       // a Hugging Face folder: config.json and safetensors. Required
  std::string model_name;  // as clients and routers call it; empty: the folder's name
  // HOST:PORT; port 0 takes a free one. Without TLS the stream is neither encrypted nor authenticated, so an address
  // other than loopback needs `unencrypted`.
  std::string listen = "127.0.0.1:50061";
  std::string metrics_listen = "127.0.0.1:0";  // of /metrics; beyond loopback likewise; empty: none
  std::string probe_listen;                    // of health in plaintext, for probes without a certificate; empty: none
  TlsFiles tls;                                // all three files, or none: who connects must have a certificate, too
  std::vector<std::string> router_identity = {"spiffe://millrace/router"};  // one of them is in a router's certificate
  // Anyone who reaches the port can then read every prompt and output, and command this worker.
  bool unencrypted = false;
  bool unencrypted_metrics = false;  // that of /metrics alone
  std::string otlp_endpoint;         // HOST:PORT of a collector of spans, OTLP over gRPC in plaintext; empty: none
  bool unencrypted_spans = false;    // allow one beyond this machine
  std::string worker_id;             // at most 128 bytes, e.g. the pod's name; empty: the instance id
  std::string device = "cpu";        // cpu, cuda or cuda:N, the N-th GPU
  int threads = 0;                   // compute threads on the CPU, 1 … 1,024; 0: one per core
  // Of the KV pool; a number with an optional suffix KiB, MiB, GiB or TiB. Empty: 1 GiB on the CPU, on a GPU what
  // gpu_memory_fraction leaves.
  std::string kv_memory;
  double gpu_memory_fraction = 0.9;  // of the GPU's free memory for everything, 0.05 … 0.98; used without kv_memory
  int max_slots = 256;               // sequences at once, 1 … 65,536
  // Tokens of one step, max_slots … 131,072: bounds the activations, and how long a step can take. 0: 512 on the CPU,
  // 8,192 on a GPU.
  int max_rows = 0;
  // What drafts tokens that the model then checks, at most one of the two: a folder with a small model of the same
  // vocabulary, whose cache takes part of kv_memory, or the first so many layers of the model itself, 1 … one less than
  // it has. Empty and 0: neither. On a CPU they are looked up in the sequence in any case.
  std::string draft_model;
  int draft_layers = 0;
  double step_target_ms = 45;  // decoding steps take prefill as long as they are predicted to stay below, 0.1 … 10,000

  int64_t drain_ms = 20'000;  // what sequences may take to end after SIGTERM; then they are moved. 0 … 3,600,000

  // INVALID_ARGUMENT, naming the flag, its value and the limit. Looks at nothing but the values and whether `model` is
  // a folder.
  absl::Status Validate() const;

  // REQUIRES the options to be valid.
  int64_t kv_bytes() const;  // 0: what gpu_memory_fraction leaves
  int gpu() const;           // -1: the CPU
  int step_rows() const;
  int num_threads() const;
  std::string name() const;

 private:
  absl::Status ValidateAccess() const;
};

// "512MiB" is 536870912. INVALID_ARGUMENT if it is no such number, or not below 2^60.
absl::StatusOr<int64_t> ParseBytes(absl::string_view text);

}  // namespace millrace

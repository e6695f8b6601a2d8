// What the router is told at start-up: the flags of millrace-router, one field each. A value.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "router/schedule/scheduler.h"
#include "service/address.h"
#include "service/tls_identity.h"

namespace millrace {

struct RouterOptions {
  std::string model;                           // folder with tokenizer.json and the chat template
  std::string model_name;                      // what clients call it; empty: the folder's name
  std::string listen = "127.0.0.1:50051";      // port 0: any free one
  std::string metrics_listen = "127.0.0.1:0";  // of /metrics, port 0: any free one; empty: none
  std::string probe_listen;                    // of health in plaintext, for probes without a certificate; empty: none
  // HOST:PORT of each, distinct, 1 … 1,024. dns:///HOST:PORT stands for every address behind the name, now and later.
  std::vector<std::string> workers;
  std::string router_id = "router";  // 1 … 128 bytes
  uint64_t epoch = 0;                // >= 1, higher than that of earlier routers; 0: unix time in µs at start-up
  TlsFiles tls;                      // of the client port; with a CA, clients must have a certificate, too
  TlsFiles workers_tls;              // towards workers: all three files, or none
  std::vector<std::string> worker_identity = {"spiffe://millrace/worker"};  // one of them is in a worker's certificate
  std::string tokens;                // file of clients' tokens; empty: they need none
  std::string admin_tokens;          // file of operators' tokens
  std::string otlp_endpoint;         // HOST:PORT of a collector of spans, OTLP over gRPC in plaintext; empty: none
  bool unencrypted = false;          // allow plaintext connections beyond this machine
  bool unencrypted_metrics = false;  // allow that of /metrics alone
  bool unencrypted_spans = false;    // allow that to the collector alone
  int64_t max_calls = 10'000;        // open Generate calls, 1 … 1,000,000
  int64_t max_request_bytes =
      int64_t{1} << 30;              // memory for requests being received, over all clients; at least 64 MiB
  int64_t drain_ms = 5'000;          // how long open calls may go on after SIGTERM, 0 … 3,600,000
  std::string speculation = "auto";  // off: workers are never told to draft
  SchedulerOptions scheduler;        // its hash key is drawn at start-up; `speculation` above rules its own

  // `workers`, apart. REQUIRES valid options.
  std::vector<std::string> addresses() const;
  std::vector<Address> services() const;

  // INVALID_ARGUMENT naming the flag, its value and the limit.
  absl::Status Validate() const;

 private:
  absl::Status ValidateAccess() const;
};

}  // namespace millrace

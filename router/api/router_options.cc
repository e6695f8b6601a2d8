#include "router/api/router_options.h"

#include <algorithm>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace millrace {
namespace {

constexpr absl::string_view kServicePrefix = "dns:///";

absl::Status InRange(absl::string_view flag, int64_t value, int64_t low, int64_t high) {
  if (value >= low && value <= high) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("--", flag, " is ", value, "; the limit is ", low, " to ", high));
}

absl::Status CheckAddress(absl::string_view flag, const std::string& text, bool encrypted, bool allowed,
                          absl::string_view allow_flag, int least_port) {
  const absl::StatusOr<Address> address = ParseAddress(text);
  if (!address.ok()) return absl::InvalidArgumentError(absl::StrCat("--", flag, ": ", address.status().message()));
  if (address->port < least_port) return InRange(absl::StrCat(flag, ": port"), address->port, least_port, 65535);
  if (encrypted || allowed || address->IsLoopback()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("--", flag, " is ", text,
                                                 ", beyond this machine in plaintext; "
                                                 "only loopback is allowed without TLS or --",
                                                 allow_flag));
}

}  // namespace

absl::Status RouterOptions::ValidateAccess() const {
  absl::Status status = CheckAddress("listen", listen, !tls.empty(), unencrypted, "unencrypted", 0);
  if (!metrics_listen.empty()) {
    status.Update(CheckAddress("metrics_listen", metrics_listen, false, unencrypted || unencrypted_metrics,
                               "unencrypted_metrics", 0));
  }
  if (!otlp_endpoint.empty()) {
    status.Update(
        CheckAddress("otlp_endpoint", otlp_endpoint, false, unencrypted || unencrypted_spans, "unencrypted_spans", 1));
  }
  if (!probe_listen.empty()) status.Update(CheckAddress("probe_listen", probe_listen, false, true, "", 0));
  if (!workers_tls.empty() && (workers_tls.certificate.empty() || workers_tls.key.empty() || workers_tls.ca.empty())) {
    status.Update(absl::InvalidArgumentError(
        "--workers_tls_certificate, --workers_tls_key and --workers_tls_ca: all of them or none must be given"));
  }
  status.Update(InRange("worker_identity: number of names", static_cast<int64_t>(worker_identity.size()), 1, 64));
  const bool has_tokens = !tokens.empty() || !admin_tokens.empty();
  if (status.ok() && has_tokens && tls.empty() && !ParseAddress(listen)->IsLoopback()) {
    return absl::InvalidArgumentError(absl::StrCat("--listen is ", listen,
                                                   ", where tokens would travel in plaintext; only loopback is allowed "
                                                   "with --tokens or --admin_tokens and without TLS"));
  }
  return status;
}

absl::Status RouterOptions::Validate() const {
  if (model.empty()) return absl::InvalidArgumentError("--model is empty; it must name a folder");
  absl::Status status = InRange("workers: number of addresses", static_cast<int64_t>(workers.size()), 1, 1024);
  status.Update(InRange("router_id: bytes", static_cast<int64_t>(router_id.size()), 1, 128));
  status.Update(InRange("model_name: bytes", static_cast<int64_t>(model_name.size()), 0, 256));
  status.Update(ValidateAccess());
  absl::flat_hash_set<std::string> seen;
  for (const std::string& worker : workers) {
    absl::string_view address = worker;
    absl::ConsumePrefix(&address, kServicePrefix);
    status.Update(CheckAddress("workers", std::string(address), !workers_tls.empty(), unencrypted, "unencrypted", 1));
    if (!seen.insert(worker).second)
      status.Update(absl::InvalidArgumentError(absl::StrCat("--workers names ", worker, " twice")));
  }
  status.Update(InRange("max_calls", max_calls, 1, 1'000'000));
  status.Update(InRange("max_request_bytes", max_request_bytes, 64 << 20, int64_t{1} << 50));
  status.Update(InRange("drain_ms", drain_ms, 0, 3'600'000));
  if (speculation != "auto" && speculation != "off") {
    status.Update(
        absl::InvalidArgumentError(absl::StrCat("--speculation is \"", speculation, "\"; it must be auto or off")));
  }
  status.Update(InRange("max_queued_sequences", scheduler.max_queued_sequences, 1, 1'000'000));
  status.Update(InRange("max_queued_tokens", scheduler.max_queued_tokens, 1, int64_t{1} << 32));
  return status;
}

std::vector<std::string> RouterOptions::addresses() const {
  std::vector<std::string> addresses;
  for (const std::string& worker : workers) {
    if (!absl::StartsWith(worker, kServicePrefix)) addresses.push_back(worker);
  }
  return addresses;
}

std::vector<Address> RouterOptions::services() const {
  std::vector<Address> services;
  for (absl::string_view worker : workers) {
    if (absl::ConsumePrefix(&worker, kServicePrefix)) services.push_back(*ParseAddress(worker));
  }
  return services;
}

}  // namespace millrace

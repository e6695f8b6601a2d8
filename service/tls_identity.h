// A process's certificate, key and the authorities that it trusts, from files that may be replaced while it runs: new
// connections then show and check what is new, open ones go on; what cannot be used changes nothing. Any thread. Lives
// as long as what it gave credentials.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "grpcpp/security/auth_context.h"
#include "grpcpp/security/credentials.h"
#include "grpcpp/security/server_credentials.h"
#include "grpcpp/security/tls_certificate_provider.h"
#include "service/certificate.h"
#include "service/memory_file.h"
#include "service/metric_page.h"
#include "service/watched_files.h"

namespace millrace {

// PEM files. All empty: no TLS.
struct TlsFiles {
  std::string certificate;  // its chain may follow
  std::string key;
  std::string ca;  // who must have signed the peers' certificates; empty: peers of a server need none
  bool empty() const { return certificate.empty() && key.empty() && ca.empty(); }
};

class TlsIdentity {
 public:
  // `name` stands in logs and metrics. INVALID_ARGUMENT naming the file if one is missing or does not fit the others,
  // or if the certificate has expired.
  static absl::StatusOr<std::unique_ptr<TlsIdentity>> Open(std::string name, const TlsFiles& files);
  TlsIdentity(const TlsIdentity&) = delete;
  TlsIdentity& operator=(const TlsIdentity&) = delete;

  // With a CA, who has no certificate of it gets no connection.
  std::shared_ptr<grpc::ServerCredentials> ForServer() const;
  // To servers whose certificate names one of `identities`, whatever their address. REQUIRES a CA.
  std::shared_ptr<grpc::ChannelCredentials> ForChannel(std::vector<std::string> identities) const;

  void Fill(MetricPage* page) const;

 private:
  TlsIdentity(std::string name, const TlsFiles& files) : name_(std::move(name)), files_(files) {}

  std::vector<std::string> paths() const;
  absl::StatusOr<Certificate> Parse(const WatchedFiles::Contents& contents) const;
  absl::Status Take(const WatchedFiles::Contents& contents);

  const std::string name_;
  const TlsFiles files_;
  // As in paths(), the latest that are good: gRPC would do without any rather than keep those it had.
  std::array<MemoryFile, 3> good_;
  std::shared_ptr<grpc::experimental::FileWatcherCertificateProvider> provider_;  // reads those
  std::atomic<int64_t> not_after_{0};                                             // unix time, s
  std::optional<WatchedFiles> watch_;                                             // last: its thread uses the above
};

// The DNS and URI names of the peer's verified certificate; none without one.
std::vector<std::string> PeerNames(const grpc::AuthContext& peer);

}  // namespace millrace

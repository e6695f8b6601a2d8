#include "service/tls_identity.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "grpcpp/security/tls_certificate_verifier.h"
#include "grpcpp/security/tls_credentials_options.h"
#include "service/log.h"

namespace millrace {
namespace {

constexpr unsigned kRefreshSeconds = 1;  // as often as WatchedFiles looks

// The chain is verified before; what remains is whose certificate it is.
class NameVerifier final : public grpc::experimental::ExternalCertificateVerifier {
 public:
  explicit NameVerifier(std::vector<std::string> identities) : identities_(std::move(identities)) {}

  bool Verify(grpc::experimental::TlsCustomVerificationCheckRequest* request, std::function<void(grpc::Status)>,
              grpc::Status* verdict) override {
    std::vector<std::string> names;
    for (const grpc::string_ref& name : request->dns_names()) names.emplace_back(name.data(), name.size());
    for (const grpc::string_ref& name : request->uri_names()) names.emplace_back(name.data(), name.size());
    for (const std::string& name : names) {
      if (std::ranges::count(identities_, name) > 0) return true;
    }
    *verdict = {grpc::StatusCode::UNAUTHENTICATED,
                absl::StrCat("the certificate's names are \"", absl::StrJoin(names, ","), "\"; one of ",
                             absl::StrJoin(identities_, ","), " must be among them")};
    return true;
  }
  void Cancel(grpc::experimental::TlsCustomVerificationCheckRequest*) override {}

 private:
  const std::vector<std::string> identities_;
};

absl::Status Named(const std::string& file, const absl::Status& status) {
  return absl::Status(status.code(), absl::StrCat(file, ": ", status.message()));
}

}  // namespace

absl::StatusOr<std::unique_ptr<TlsIdentity>> TlsIdentity::Open(std::string name, const TlsFiles& files) {
  if (files.certificate.empty() || files.key.empty()) {
    return absl::InvalidArgumentError("certificate and key must both be given");
  }
  std::unique_ptr<TlsIdentity> identity(new TlsIdentity(std::move(name), files));
  const WatchedFiles::Contents contents = WatchedFiles::Read(identity->paths());
  if (absl::Status status = identity->Take(contents); !status.ok()) return status;
  using grpc::experimental::FileWatcherCertificateProvider;
  const std::string certificate = identity->good_[0].path(), key = identity->good_[1].path();
  identity->provider_ = files.ca.empty()
                            ? std::make_shared<FileWatcherCertificateProvider>(key, certificate, kRefreshSeconds)
                            : std::make_shared<FileWatcherCertificateProvider>(
                                  key, certificate, identity->good_[2].path(), kRefreshSeconds);
  identity->watch_.emplace(identity->paths(), contents,
                           [raw = identity.get()](const WatchedFiles::Contents& now) { (void)raw->Take(now); });
  return identity;
}

std::vector<std::string> TlsIdentity::paths() const {
  std::vector<std::string> paths = {files_.certificate, files_.key};
  if (!files_.ca.empty()) paths.push_back(files_.ca);
  return paths;
}

absl::StatusOr<Certificate> TlsIdentity::Parse(const WatchedFiles::Contents& contents) const {
  if (!contents.ok()) return contents.status();
  absl::StatusOr<Certificate> certificate = ReadCertificate((*contents)[0], (*contents)[1]);
  if (!certificate.ok()) return Named(absl::StrCat(files_.certificate, ", ", files_.key), certificate.status());
  if (certificate->not_after <= absl::Now()) {
    return absl::InvalidArgumentError(
        absl::StrCat(files_.certificate, " has expired, ", absl::FormatTime(certificate->not_after)));
  }
  if (files_.ca.empty()) return certificate;
  if (const absl::Status ca = CheckAuthority((*contents)[2]); !ca.ok()) return Named(files_.ca, ca);
  return certificate;
}

absl::Status TlsIdentity::Take(const WatchedFiles::Contents& contents) {
  const absl::StatusOr<Certificate> certificate = Parse(contents);
  absl::Status status = certificate.status();
  for (size_t i = 0; status.ok() && i < contents->size(); ++i) status = good_[i].Replace((*contents)[i]);
  if (!status.ok()) {
    const std::string error(status.message());
    Log(LogLevel::kError, "certificate_unusable", {{"of", name_}, {"error", error}});
    return absl::InvalidArgumentError(error);
  }
  not_after_ = absl::ToUnixSeconds(certificate->not_after);
  Log(LogLevel::kInfo, "certificate",
      {{"of", name_}, {"names", certificate->names}, {"until", absl::FormatTime(certificate->not_after)}});
  return absl::OkStatus();
}

std::shared_ptr<grpc::ServerCredentials> TlsIdentity::ForServer() const {
  grpc::experimental::TlsServerCredentialsOptions options(provider_);
  options.watch_identity_key_cert_pairs();
  options.set_check_call_host(false);
  if (!files_.ca.empty()) {
    options.watch_root_certs();
    options.set_cert_request_type(GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  }
  // Without a verifier gRPC would want the peer's certificate to name an address.
  options.set_certificate_verifier(std::make_shared<grpc::experimental::NoOpCertificateVerifier>());
  return grpc::experimental::TlsServerCredentials(options);
}

std::shared_ptr<grpc::ChannelCredentials> TlsIdentity::ForChannel(std::vector<std::string> identities) const {
  grpc::experimental::TlsChannelCredentialsOptions options;
  options.set_certificate_provider(provider_);
  options.watch_identity_key_cert_pairs();
  options.watch_root_certs();
  options.set_check_call_host(false);
  options.set_certificate_verifier(
      grpc::experimental::ExternalCertificateVerifier::Create<NameVerifier>(std::move(identities)));
  return grpc::experimental::TlsCredentials(options);
}

void TlsIdentity::Fill(MetricPage* page) const {
  page->AddGauge("millrace_certificate_expiry_timestamp_seconds", "end of the certificate's validity, unix time",
                 static_cast<double>(not_after_.load(std::memory_order_relaxed)), {{"certificate", name_}});
}

std::vector<std::string> PeerNames(const grpc::AuthContext& peer) {
  std::vector<std::string> names;
  if (!peer.IsPeerAuthenticated()) return names;
  for (const char* const kind : {GRPC_PEER_DNS_PROPERTY_NAME, GRPC_PEER_URI_PROPERTY_NAME}) {
    for (const grpc::string_ref& name : peer.FindPropertyValues(kind)) names.emplace_back(name.data(), name.size());
  }
  return names;
}

}  // namespace millrace

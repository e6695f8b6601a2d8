#include "service/certificate.h"

#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/x509v3.h>

#include <ctime>
#include <memory>

#include "absl/strings/str_cat.h"

namespace millrace {
namespace {

template <auto kFree>
struct Freed {
  template <typename T>
  void operator()(T* thing) const {
    kFree(thing);
  }
};
using Bytes = std::unique_ptr<BIO, Freed<BIO_free>>;
using X509Pointer = std::unique_ptr<X509, Freed<X509_free>>;

X509Pointer Parse(absl::string_view pem) {
  const Bytes bytes(BIO_new_mem_buf(pem.data(), static_cast<int>(pem.size())));
  X509Pointer parsed(PEM_read_bio_X509(bytes.get(), nullptr, nullptr, nullptr));
  ERR_clear_error();
  return parsed;
}

std::string Names(const X509* certificate) {
  const std::unique_ptr<GENERAL_NAMES, Freed<GENERAL_NAMES_free>> names(
      static_cast<GENERAL_NAMES*>(X509_get_ext_d2i(certificate, NID_subject_alt_name, nullptr, nullptr)));
  std::string text;
  for (int i = 0; names != nullptr && i < sk_GENERAL_NAME_num(names.get()); ++i) {
    const GENERAL_NAME* const name = sk_GENERAL_NAME_value(names.get(), i);
    if (name->type != GEN_DNS && name->type != GEN_URI) continue;
    const ASN1_IA5STRING* const value = name->type == GEN_DNS ? name->d.dNSName : name->d.uniformResourceIdentifier;
    const auto* const data = reinterpret_cast<const char*>(ASN1_STRING_get0_data(value));
    absl::StrAppend(&text, text.empty() ? "" : ",",
                    absl::string_view(data, static_cast<size_t>(ASN1_STRING_length(value))));
  }
  return text;
}

}  // namespace

absl::StatusOr<Certificate> ReadCertificate(absl::string_view pem, absl::string_view key) {
  const X509Pointer certificate = Parse(pem);
  if (certificate == nullptr) return absl::InvalidArgumentError("there is no certificate in PEM form");
  const Bytes bytes(BIO_new_mem_buf(key.data(), static_cast<int>(key.size())));
  // An empty pass phrase: a key that is encrypted must not make the process ask on its terminal.
  char empty[] = "";
  const std::unique_ptr<EVP_PKEY, Freed<EVP_PKEY_free>> parsed_key(
      PEM_read_bio_PrivateKey(bytes.get(), nullptr, nullptr, empty));
  const bool fits = parsed_key != nullptr && X509_check_private_key(certificate.get(), parsed_key.get()) == 1;
  ERR_clear_error();
  if (parsed_key == nullptr) return absl::InvalidArgumentError("there is no unencrypted private key in PEM form");
  if (!fits) return absl::InvalidArgumentError("the private key is not the certificate's");
  std::tm time = {};
  if (ASN1_TIME_to_tm(X509_get0_notAfter(certificate.get()), &time) != 1) {
    return absl::InvalidArgumentError("the certificate's end of validity cannot be read");
  }
  return Certificate{absl::FromTM(time, absl::UTCTimeZone()), Names(certificate.get())};
}

absl::Status CheckAuthority(absl::string_view pem) {
  if (Parse(pem) == nullptr) return absl::InvalidArgumentError("there is no certificate in PEM form");
  return absl::OkStatus();
}

}  // namespace millrace

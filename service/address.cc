#include "service/address.h"

#include <arpa/inet.h>
#include <netinet/in.h>

#include <algorithm>

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace millrace {
namespace {

constexpr size_t kMaxHostBytes = 253;  // of a DNS name

bool IsHostName(absl::string_view host) {
  return std::all_of(host.begin(), host.end(), [](unsigned char c) {
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '.' || c == '-' ||
           c == '_';
  });
}

absl::Status Malformed(absl::string_view text) {
  return absl::InvalidArgumentError(absl::StrCat("address is \"", absl::CHexEscape(text.substr(0, 300)),
                                                 "\"; the form is HOST:PORT, with port 0 to 65535"));
}

}  // namespace

std::string Address::ToString() const {
  return host.find(':') == std::string::npos ? absl::StrCat(host, ":", port) : absl::StrCat("[", host, "]:", port);
}

bool Address::IsLoopback() const {
  in_addr v4;
  if (inet_pton(AF_INET, host.c_str(), &v4) == 1) return ntohl(v4.s_addr) >> 24 == 127;
  in6_addr v6;
  if (inet_pton(AF_INET6, host.c_str(), &v6) == 1) return IN6_IS_ADDR_LOOPBACK(&v6);
  return host == "localhost";
}

absl::StatusOr<Address> ParseAddress(absl::string_view text) {
  const size_t colon = text.rfind(':');
  if (colon == absl::string_view::npos) return Malformed(text);
  absl::string_view host = text.substr(0, colon);
  const absl::string_view port = text.substr(colon + 1);
  Address address;
  if (port.empty() || port.size() > 5 ||
      !std::all_of(port.begin(), port.end(), [](char c) { return c >= '0' && c <= '9'; }) ||
      !absl::SimpleAtoi(port, &address.port) || address.port > 65535) {
    return Malformed(text);
  }
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') {
    address.host = std::string(host.substr(1, host.size() - 2));
    in6_addr v6;
    if (inet_pton(AF_INET6, address.host.c_str(), &v6) != 1) return Malformed(text);
    return address;
  }
  if (host.empty() || host.size() > kMaxHostBytes || !IsHostName(host)) return Malformed(text);
  address.host = std::string(host);
  return address;
}

}  // namespace millrace

#include "router/fleet/resolver.h"

#include <netdb.h>
#include <sys/socket.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "service/log.h"

namespace millrace {

Resolver::Resolver(std::vector<Address> services, absl::Duration period, Lookup lookup, Found found)
    : services_(std::move(services)),
      period_(period),
      lookup_(std::move(lookup)),
      found_(std::move(found)),
      thread_([this] { Run(); }) {}

Resolver::~Resolver() {
  {
    absl::MutexLock lock(&mutex_);
    stop_ = true;
  }
  thread_.join();
}

void Resolver::Run() {
  std::vector<std::string> said(services_.size());  // of each, the latest failure
  mutex_.Lock();
  while (!stop_) {
    for (size_t i = 0; i < services_.size() && !stop_; ++i) {
      mutex_.Unlock();
      absl::StatusOr<std::vector<std::string>> addresses = lookup_(services_[i]);
      if (addresses.ok()) {
        std::sort(addresses->begin(), addresses->end());
        addresses->erase(std::unique(addresses->begin(), addresses->end()), addresses->end());
        found_(services_[i], *std::move(addresses));
        said[i].clear();
      } else if (said[i] != addresses.status().message()) {
        said[i] = std::string(addresses.status().message());
        Log(LogLevel::kWarning, "workers_not_resolved", {{"service", services_[i].ToString()}, {"error", said[i]}});
      }
      mutex_.Lock();
    }
    mutex_.AwaitWithTimeout(absl::Condition(&stop_), period_);
  }
  mutex_.Unlock();
}

absl::StatusOr<std::vector<std::string>> LookUpHost(const Address& service) {
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* list = nullptr;
  if (const int error = getaddrinfo(service.host.c_str(), nullptr, &hints, &list); error != 0) {
    return absl::UnavailableError(absl::StrCat(service.host, ": ", gai_strerror(error)));
  }
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owner(list, &freeaddrinfo);
  std::vector<std::string> addresses;
  for (const addrinfo* it = list; it != nullptr; it = it->ai_next) {
    char host[NI_MAXHOST];
    if (getnameinfo(it->ai_addr, it->ai_addrlen, host, sizeof host, nullptr, 0, NI_NUMERICHOST) != 0) continue;
    addresses.push_back(Address{host, service.port}.ToString());
  }
  return addresses;
}

}  // namespace millrace

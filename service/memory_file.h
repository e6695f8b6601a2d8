// A file without a name on any disk, for libraries that want to read a path: its content is replaced at once, never
// half. Readers find it by path() while this lives; replacing is for one thread at a time.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace millrace {

class MemoryFile {
 public:
  MemoryFile() = default;
  ~MemoryFile();
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;

  // What the system says if there is no memory or no descriptor for it; then the file is as it was.
  absl::Status Replace(absl::string_view content);
  std::string path() const;  // the same throughout; REQUIRES a first Replace

 private:
  int fd_ = -1;
};

}  // namespace millrace

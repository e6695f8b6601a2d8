// Where tests find their data. Fixture() is this repository's own tests/fixtures; Golden() is the optional folder
// `shared/golden` beside the clone, which holds other people's vocabularies and templates: tests that need it skip
// without it.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <string>

#include "gtest/gtest.h"

namespace millrace {

inline std::filesystem::path SourceDir() {
  const char* dir = std::getenv("MILLRACE_SOURCE_DIR");
  return dir != nullptr ? dir : ".";
}
inline std::filesystem::path Fixture(const std::string& name) { return SourceDir() / "tests" / "fixtures" / name; }
inline std::filesystem::path Golden(const std::string& name) { return SourceDir() / ".." / "shared" / "golden" / name; }

#define MILLRACE_NEEDS_GOLDEN(name)                       \
  if (!std::filesystem::exists(::millrace::Golden(name))) \
  GTEST_SKIP() << "shared/golden/" << (name) << " is not beside this clone"

}  // namespace millrace

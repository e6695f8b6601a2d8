// Reads golden files: JSON, plain or gzipped.
#pragma once

#include <zlib.h>

#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/fixtures.h"

namespace millrace {

inline std::string ReadText(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

inline std::string ReadGzip(const std::filesystem::path& path) {
  gzFile file = gzopen(path.c_str(), "rb");
  std::string text, chunk(1 << 20, '\0');
  for (int n; file != nullptr && (n = gzread(file, chunk.data(), static_cast<unsigned>(chunk.size()))) > 0;) {
    text.append(chunk, 0, n);
  }
  if (file != nullptr) gzclose(file);
  return text;
}

inline nlohmann::ordered_json ReadJson(const std::filesystem::path& path) {
  return nlohmann::ordered_json::parse(ReadText(path));
}

}  // namespace millrace

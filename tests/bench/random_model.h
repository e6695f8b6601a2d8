// A model folder with the exact shape of a known model and random weights, written for the life of the object, unless
// it is kept.
#pragma once

#include <filesystem>
#include <string>

namespace millrace {

class RandomModel {
 public:
  // Shapes: qwen3-0.6b, qwen3-1.7b, qwen3-8b, qwen3-14b, llama-3.1-8b, qwen2-0.5b; ends the process at another name.
  RandomModel(const std::string& shape, const std::filesystem::path& parent);
  ~RandomModel();
  RandomModel(const RandomModel&) = delete;
  RandomModel& operator=(const RandomModel&) = delete;

  void Keep() { kept_ = true; }
  const std::filesystem::path& folder() const { return folder_; }

 private:
  std::filesystem::path folder_;
  bool kept_ = false;
};

}  // namespace millrace

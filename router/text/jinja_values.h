// What the engine's value type needs from us, as templates because its own header includes this one first.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace millrace {

// Destroys the members of a dying list or object one after the other instead of one inside the other: nesting made by a
// loop would overflow the stack. The outermost destructor on the thread drains what the inner ones add.
template <typename Value>
void BuryJinjaValues(std::vector<Value>& items, std::vector<std::pair<Value, Value>>& members) {
  static thread_local std::vector<Value>* grave = nullptr;
  if (items.empty() && members.empty()) return;
  std::vector<Value> mine;
  const bool outermost = grave == nullptr;
  if (outermost) grave = &mine;
  for (Value& item : items) grave->push_back(std::move(item));
  for (auto& [key, value] : members) {
    grave->push_back(std::move(key));
    grave->push_back(std::move(value));
  }
  if (!outermost) return;
  while (!mine.empty()) {
    const Value last = std::move(mine.back());
    mine.pop_back();
  }
  grave = nullptr;
}

// Whether any text inside came from the request.
template <typename Node>
bool HoldsInput(const Node& node) {
  for (const auto& part : node.val_str.parts) {
    if (part.is_input) return true;
  }
  for (const auto& item : node.val_arr) {
    if (HoldsInput(*item)) return true;
  }
  for (const auto& [key, value] : node.val_obj) {
    if (HoldsInput(*key) || HoldsInput(*value)) return true;
  }
  return false;
}

// `text` printed from `node`: from the request as a whole as soon as anything in it is.
template <typename Node>
auto MarkedLike(const Node& node, const std::string& text) {
  return decltype(node.val_str)(text, HoldsInput(node));
}

}  // namespace millrace

// A float as Python prints it: the shortest digits that read back, "1.0", "1e-07", "1e+22". Stateless; any thread.
#pragma once

#include <string>

namespace millrace {

std::string PythonFloat(double value);

}  // namespace millrace

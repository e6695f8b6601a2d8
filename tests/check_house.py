#!/usr/bin/env python3
"""Holds the lines of the house: who may include whom, how long a file may be, a README in every top-level folder.

Exits 1 and prints one line per breach. `--self-test` proves that each rule can fail."""
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
# folder -> (folders of ours it may include besides itself, libraries it may include). The first matching prefix rules.
GRPC, PROTOBUF, ABSEIL, JSON, PCRE, CUDA, PROMETHEUS, OPENSSL = "grpc", "protobuf", "absl", "nlohmann", "pcre2", "cuda", "prometheus", "openssl"
RULES = [
    ("kernels/cuda", {"kernels"}, {CUDA}),
    ("kernels", {"kernels"}, set()),
    ("service", {"service"}, {ABSEIL, GRPC, PROMETHEUS, OPENSSL}),
    ("worker/parallel", {"kernels"}, {ABSEIL}),
    ("worker/model", {"kernels", "worker/parallel"}, {ABSEIL, JSON}),
    ("worker/engine", {"kernels", "worker/model"}, {ABSEIL, PROTOBUF}),
    ("worker", {"kernels", "worker", "service"}, {ABSEIL, PROTOBUF, GRPC, OPENSSL}),
    ("router/schedule", {"kernels/check.h"}, {ABSEIL, PROTOBUF}),
    ("router/text", {"kernels/check.h"}, {ABSEIL, JSON, PCRE}),
    ("router", {"router", "service", "kernels/check.h"}, {ABSEIL, PROTOBUF, GRPC, JSON}),
    ("cli", {"cli", "service", "router/text"}, {ABSEIL, PROTOBUF, GRPC, JSON}),
]
LIBRARIES = [
    (GRPC, r"grpc|grpcpp/|opentelemetry/|.*\.grpc\.pb\.h"), (PROTOBUF, r"google/protobuf/|.*\.pb\.h"), (ABSEIL, r"absl/"), (JSON, r"nlohmann/"),
    (PCRE, r"pcre2\.h|utf8proc\.h"), (CUDA, r"cuda|cublas|nccl"), (PROMETHEUS, r"prometheus/"), (OPENSSL, r"openssl/"),
]
OURS = ("kernels/", "service/", "worker/", "router/", "cli/")
PURE = re.compile(r"\b(std::thread|std::chrono|std::random_device|absl::Now|absl::Mutex|std::mutex|rand\(|getrandom)\b")
MAX_LINES, MAX_README = 500, 150


def includes(text):
    return re.findall(r'^\s*#\s*include\s+["<]([^">]+)[">]', text, re.M)


def breaches(path, text):
    """Yields one message for each rule that `text`, as the file `path`, breaks."""
    lines = text.count("\n")
    if path.endswith((".h", ".cc", ".cu", ".cuh", ".proto", ".py", ".sh")) and not path.startswith("tests/") and lines > MAX_LINES:
        yield f"{path}: {lines} lines; the limit is {MAX_LINES}"
    if path.endswith("README.md") and path != "README.md" and lines > MAX_README:
        yield f"{path}: {lines} lines; the limit is {MAX_README}"
    if not path.endswith((".h", ".cc", ".cu", ".cuh")):
        return
    rule = next((r for r in RULES if path.startswith(r[0] + "/")), None)
    if rule is None:
        return
    folder, ours, libraries = rule
    for header in includes(text):
        library = next((name for name, pattern in LIBRARIES if re.match(pattern, header)), None)
        if library is not None:
            if library not in libraries:
                yield f"{path}: includes {header}; {folder} may not use {library}"
        elif header.startswith(OURS) and not header.startswith(folder + "/"):
            if not any(header == o or header.startswith(o + "/") for o in ours):
                yield f"{path}: includes {header}; {folder} may include {', '.join(sorted(ours)) or 'nothing else'}"
    if folder == "router/schedule":
        for match in PURE.finditer(text):
            yield f"{path}: uses {match.group(0)}; the scheduler takes time and seeds as arguments and has no thread"


def self_test():
    cases = [
        ("kernels/cpu/x.cc", '#include "absl/status/status.h"\n'), ("router/api/x.cc", '#include "worker/model/step.h"\n'),
        ("router/schedule/x.cc", "#include <grpcpp/grpcpp.h>\n"), ("router/schedule/x.cc", "std::thread t;\n"),
        ("worker/model/x.h", '#include "millrace/worker/v1/worker.pb.h"\n'), ("router/api/x.h", '#include "prometheus/counter.h"\n'),
        ("router/api/x.cc", "#include <openssl/x509.h>\n"), ("cli/x.cc", "\n" * 501), ("cli/README.md", "\n" * 151),
    ]
    for path, text in cases:
        assert list(breaches(path, text)), f"the rule for {path} cannot fail"
    assert not list(breaches("router/api/x.cc", '#include "router/schedule/scheduler.h"\n#include <grpcpp/grpcpp.h>\n'))


def main():
    if "--self-test" in sys.argv:
        self_test()
    files = subprocess.run(["git", "-C", str(ROOT), "ls-files"], check=True, capture_output=True, text=True).stdout.split("\n")
    found = []
    for name in filter(None, files):
        path = ROOT / name
        if path.suffix in (".h", ".cc", ".cu", ".cuh", ".proto", ".py", ".sh", ".md") and path.is_file():
            found += breaches(name, path.read_text(encoding="utf-8"))
    for folder in ("protos", "router", "worker", "kernels", "service", "cli", "clients/python", "deploy", "tests"):
        if not (ROOT / folder / "README.md").is_file():
            found.append(f"{folder}/README.md: missing")
    print("\n".join(found) if found else f"the house stands: {len(files) - 1} files checked")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

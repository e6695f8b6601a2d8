#!/usr/bin/env python3
"""Millrace beside Hugging Face transformers on one machine's CPU, with equal thread counts. Run by hand:

  python3 -m venv build/transformers && build/transformers/bin/pip install torch transformers
  tests/bench/compare_transformers.py --model build/models/smollm2 --transformers_python build/transformers/bin/python

Millrace's figures come from build/cpu/bench/model_bench; transformers runs with as many threads as that reports. Under
`taskset` both keep to the same cores. Each figure is the best of REPEATS.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
REPEATS = 5
PREFILL_TOKENS = 512
DECODE_CONTEXT = 128  # tokens in the cache before the first measured decode step
DECODE_TOKENS = 64


def measure_transformers(model_dir, threads):
    """In the environment that has torch: decode at batch 1 in bf16, prefill in fp32, as a user gets it."""
    import torch  # pylint: disable=import-outside-toplevel
    import transformers  # pylint: disable=import-outside-toplevel

    torch.set_num_threads(threads)

    def load(dtype):
        model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, local_files_only=True)
        return model.to(dtype).eval()

    def tokens(model, count):
        generator = torch.Generator().manual_seed(1)
        return torch.randint(3, model.config.vocab_size, (1, count), generator=generator)

    def decode_seconds(model):
        step = model(tokens(model, DECODE_CONTEXT), use_cache=True)
        start = time.perf_counter()
        for _ in range(DECODE_TOKENS):
            step = model(step.logits[:, -1:].argmax(-1), past_key_values=step.past_key_values, use_cache=True)
        return time.perf_counter() - start

    def prefill_seconds(model):
        ids = tokens(model, PREFILL_TOKENS)
        start = time.perf_counter()
        model(ids, use_cache=True, logits_to_keep=1)
        return time.perf_counter() - start

    def best(measure, model):
        measure(model)
        return min(measure(model) for _ in range(REPEATS))

    with torch.inference_mode():
        decode = best(decode_seconds, load(torch.bfloat16))
        prefill = best(prefill_seconds, load(torch.float32))
    return {
        "decode_tok_s_batch1": DECODE_TOKENS / decode,
        "prefill_tok_s_512": PREFILL_TOKENS / prefill,
        "threads": torch.get_num_threads(),
        "versions": f"transformers {transformers.__version__}, torch {torch.__version__}",
    }


def run_json(command, fields, environment=None):
    """The JSON object on the last line of a command's output, with these fields."""
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=environment)
    if result.returncode:
        sys.exit(f"compare_transformers: `{' '.join(command)}` ended with code {result.returncode}")
    try:
        figures = json.loads(result.stdout.strip().splitlines()[-1])
        return {**figures, **{name: float(figures[name]) for name in fields}}
    except (ValueError, KeyError, IndexError, TypeError) as error:
        sys.exit(f"compare_transformers: `{' '.join(command)}` printed no JSON with {', '.join(fields)}: {error!r}")


def processor():
    """The processor's name, as Linux tells it."""
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return names[0].split(":", 1)[1].strip() if names else "an unknown processor"


def compare(arguments):
    """Runs both and prints the table."""
    for path in (arguments.bench, arguments.transformers_python, arguments.model / "config.json"):
        if not path.exists():
            sys.exit(f"compare_transformers: {path} does not exist")
    fields = ("decode_tok_s_batch1", "decode_tok_s_batch16", "prefill_tok_s_512", "threads")
    ours = run_json([str(arguments.bench), "--model", str(arguments.model), "--json"], fields)
    threads = int(ours["threads"])
    command = [str(arguments.transformers_python), __file__, "--model", str(arguments.model), "--measure", str(threads)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    theirs = run_json(command, ("decode_tok_s_batch1", "prefill_tok_s_512", "threads"), environment)
    if theirs["threads"] != threads:
        sys.exit(f"compare_transformers: {theirs['threads']:.0f} threads there, {threads} here")
    print(f"{arguments.model.name} on {processor()}, {threads} threads; {theirs['versions']}")
    print(f"{'tokens/s':34}{'Millrace':>10}{'transformers':>14}{'ratio':>8}")
    rows = [("decode, batch 1 (bf16)", "decode_tok_s_batch1"), ("prefill of 512 (theirs in fp32)", "prefill_tok_s_512")]
    for label, name in rows:
        print(f"{label:34}{ours[name]:10.1f}{theirs[name]:14.1f}{ours[name] / theirs[name]:8.2f}")
    gain = ours["decode_tok_s_batch16"] / ours["decode_tok_s_batch1"]
    print(f"{'decode, batch 16':34}{ours['decode_tok_s_batch16']:10.1f}   ({gain:.2f} times its batch 1)")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face folder")
    parser.add_argument("--transformers_python", type=Path, help="a Python that has torch and transformers")
    parser.add_argument("--bench", type=Path, default=ROOT / "build/cpu/bench/model_bench", help="default: %(default)s")
    parser.add_argument("--measure", type=int, metavar="THREADS", help="only measure transformers, in this Python")
    arguments = parser.parse_args()
    if arguments.measure is not None:
        print(json.dumps(measure_transformers(arguments.model, arguments.measure)))
    elif arguments.transformers_python is None:
        parser.error("--transformers_python is required")
    else:
        compare(arguments)


if __name__ == "__main__":
    main()

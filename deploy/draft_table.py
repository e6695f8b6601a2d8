#!/usr/bin/env python3
"""Makes the table of what a model usually says next, from which a worker drafts (worker/engine/draft_table.h has its format).

  draft_table.py prompts COUNT > prompts.jsonl
  millrace complete --router HOST:PORT --jsonl --concurrency 64 < prompts.jsonl > answers.jsonl
  draft_table.py table MODEL_DIR < answers.jsonl    writes MODEL_DIR/draft.ngrams; workers started from now on use it

The prompts are made of forms and subjects below; whoever has real traffic takes that instead. A wrong table costs time alone.
"""
import json
import random
import struct
import sys
from collections import Counter
from pathlib import Path

MAX_CONTEXT = 4        # tokens
LEAST_COUNT = 3        # of a token after a context
LEAST_LIKELIHOOD = 38  # of 255: a draft less likely than this is never made
LOAD = 0.85

SUBJECTS = """bees|bicycles|birds|black holes|bread|bridges|butterflies|cameras|camping|canals|cats|chess|chocolate|clouds|coffee|compost|computers|deserts|
dinosaurs|dogs|dreams|earthquakes|electric cars|elephants|exercise|farming|fear|films|fishing|forests|friendship|frogs|gardening|glaciers|gold|gravity|habits|
happiness|hiking|history|holidays|honesty|horses|insurance|islands|jazz|job interviews|knitting|languages|libraries|light|lightning|maps|markets|memory|
money|mountains|mushrooms|museums|music|newspapers|numbers|oceans|old age|owls|painting|paper|parents|patience|penguins|photography|planets|plastic|
poetry|pottery|public speaking|rain|reading|recycling|rice|rivers|robots|running|sailing|salt|school|sharks|ships|sleep|snakes|snow|soap|social media|
solar panels|sound|space travel|spices|spiders|stars|steel|stress|sugar|swimming|taxes|tea|teachers|the body's defences|the brain|the heart|the internet|
the moon|the piano|the Roman Empire|the seasons|the stock market|the violin|theatre|tides|time management|toys|trains|travelling alone|trees|
vaccines|vegetables|video games|villages|vitamins|volcanoes|volunteering|walking|water|weddings|whales|wind|wolves|work from home|writing|yoga""".replace("\n", "").split("|")
FORMS = ("Describe {0} in a few sentences.", "Explain {0} simply.", "Explain to a beginner what matters about {0}.", "Give me five tips about {0}.",
         "Give me three facts about {0}.", "Help me write an introduction to an essay on {0}.", "How did people think of {0} a hundred years ago?",
         "How do {0} and {1} differ?", "How would you teach {0} in an hour?", "I have a free afternoon and like {0}. What could I do?",
         "I know nothing about {0}. Where do I begin?", "Make a list of words that go with {0}.", "Make a plan for a weekend around {0}.",
         "My friend is afraid of {0}. What can I say?", "Should I spend more time on {0} or on {1}?", "Suggest a title for a book about {0}.",
         "Summarise what everybody should know about {0}.", "Tell me a joke about {0}.", "Tell me something surprising about {0}.",
         "What are good and bad sides of {0}?", "What are common mistakes with {0}?", "What do {0} have to do with {1}?", "What is special about {0}?",
         "What would change without {0}?", "Which questions about {0} are still open?", "Who should care about {0}, and why?",
         "Why are people interested in {0}?", "Why do children ask about {0}?", "Write a dialogue about {0} and {1}.", "Write a letter to a friend about {0}.",
         "Write a poem about {0}.", "Write a short story about {0}.", "Write an e-mail that invites people to a talk on {0}.")
TASKS = ("adds two matrices", "checks whether a word is a palindrome", "converts Celsius to Fahrenheit", "counts the words of a text", "draws a card from a deck",
         "finds the largest number of a list", "finds the shortest path in a graph", "formats a date", "groups words by length", "inverts a dictionary",
         "merges two sorted lists", "parses a line of CSV", "prints the first primes", "reads a file line by line", "removes duplicates from a list",
         "reverses a string", "rolls two dice", "sorts names by last name", "sums the digits of a number", "validates an e-mail address")
CODE_FORMS = ("Write a {1} function that {0}.", "How do I write a {1} program that {0}?", "Explain a {1} function that {0}, step by step.",
              "Write tests for a {1} function that {0}.")
CODE_LANGUAGES = ("Python", "JavaScript", "C", "Java", "Go")


def prompts(count):
    rng = random.Random(1)
    for seed in range(count):
        if rng.random() < 0.1:
            text = rng.choice(CODE_FORMS).format(rng.choice(TASKS), rng.choice(CODE_LANGUAGES))
        else:
            text = rng.choice(FORMS).format(*rng.sample(SUBJECTS, 2))
        yield {"messages": [{"role": "user", "content": text[0].upper() + text[1:]}], "max_tokens": 160, "seed": seed,
               "temperature": rng.choice((0, 0.8))}


def hash_of(context):
    mask = (1 << 64) - 1
    value = len(context)
    for token in context:
        value = ((value ^ token) + 0x9E3779B97F4A7C15) & mask
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
        value ^= value >> 31
    return value


def count(answers):
    """{context: (token, likelihood)}, without the contexts that say what the next shorter one says."""
    table = {}
    for size in range(1, MAX_CONTEXT + 1):
        counts = Counter()
        for tokens in answers:
            counts.update(zip(*(tokens[i:] for i in range(size + 1))))
        totals, best = Counter(), {}
        for ngram, number in counts.items():
            context = ngram[:-1]
            totals[context] += number
            if number > best.get(context, (0, 0))[0]:
                best[context] = number, ngram[-1]
        for context, (number, token) in best.items():
            if number < LEAST_COUNT:
                continue
            likelihood = round(255 * number / (totals[context] + 1))
            shorter = next((table[context[i:]] for i in range(1, size) if context[i:] in table), (None, 0))
            if token != shorter[0] and max(likelihood, shorter[1]) >= LEAST_LIKELIHOOD:
                table[context] = token, max(1, likelihood)
    return table


def pack(table, vocab_size):
    size = int(len(table) / LOAD) + 1
    entries = [(0, 0)] * size
    for context, (token, likelihood) in table.items():
        value = hash_of(context)
        at = value * size >> 64
        while entries[at][1]:
            at = (at + 1) % size
        entries[at] = value & 0xFFFFFFFF, token | likelihood << 24
    return struct.pack("<8sII", b"MRDRAFT1", vocab_size, size) + b"".join(struct.pack("<II", *entry) for entry in entries)


def main():
    if len(sys.argv) != 3 or sys.argv[1] not in ("prompts", "table"):
        sys.exit(__doc__)
    if sys.argv[1] == "prompts":
        for request in prompts(int(sys.argv[2])):
            print(json.dumps(request))
        return
    folder = Path(sys.argv[2])
    vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
    lines = map(json.loads, sys.stdin)
    answers = [choice["token_ids"] for line in lines for choice in line.get("choices", [line]) if "token_ids" in choice]
    table = count(answers)
    (folder / "draft.ngrams").write_bytes(pack(table, vocab_size))
    print(f"{len(answers)} answers, {sum(map(len, answers))} tokens, {len(table)} entries", file=sys.stderr)


if __name__ == "__main__":
    main()

"""Promises of the Python client: an answer outlives its router, token for token, and errors say what they are.

MILLRACE_SEED repeats a run."""
import json
import os
import random
import threading
import time
import unittest
from unittest import mock

from processes import FIXTURES, Fleet, free_address, millrace, status

MODEL = FIXTURES / "qwen3-tiny-untied"  # context 512
GOLDEN = json.loads((MODEL / "golden.json").read_text())
SEED = int(os.environ.get("MILLRACE_SEED", random.SystemRandom().randrange(1 << 32)))
NUM_STREAMS, NUM_TOKENS = 24, 220
TIMEOUT_S = 300


class Whole:
    """All that came of an answer, by choice, read in a thread of its own."""

    def __init__(self, answer, watch=None):
        self.answer, self.watch = answer, watch
        self.text, self.logprobs = ["" for _ in answer.token_ids], [0 for _ in answer.token_ids]
        self.longest_gap, self.error = 0.0, None

    def read(self):
        try:
            last = time.monotonic()
            for piece in self.answer:
                now = time.monotonic()
                self.longest_gap, last = max(self.longest_gap, now - last), now
                self.text[piece.index] += piece.text
                self.logprobs[piece.index] += len(piece.logprobs)
                if self.watch:
                    self.watch(len(piece.token_ids))
        except millrace.Error as error:
            self.error = error
        return self

    def facts(self):
        ends = [(finish.reason, finish.stop_string, finish.usage.prompt_tokens, finish.usage.generated_tokens)
                for finish in self.answer.finish]
        return [*zip(self.answer.token_ids, self.text, self.logprobs, ends)]


class Watch:
    """Counts tokens of many threads; can be waited for."""

    def __init__(self):
        self.count, self.condition = 0, threading.Condition()

    def __call__(self, tokens):
        with self.condition:
            self.count += tokens
            self.condition.notify_all()

    def wait_for(self, tokens):
        with self.condition:
            assert self.condition.wait_for(lambda: self.count >= tokens, TIMEOUT_S), f"{self.count} of {tokens} tokens came"


def make_requests(rng):
    requests = []
    for i in range(NUM_STREAMS):
        case = GOLDEN["cases"][i % len(GOLDEN["cases"])]
        request = {"prompt": case["prompt"], "temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True, "timeout": TIMEOUT_S}
        if i >= len(GOLDEN["cases"]):
            request.update(temperature=0.8, seed=rng.randrange(1 << 64), cache_salt=f"salt {i % 2}")
            if i % 4 == 0:
                request["n"] = 2
            if i % 3 == 0:
                request.update(repetition_penalty=1.2, frequency_penalty=0.2)
            if i % 3 == 1:
                request["logprobs"] = 2
        requests.append(request)
    return requests


def with_stop_strings(requests, truths):
    """Every fifth request gets a stop string that its own text comes to, late and across token borders."""
    for i, (request, truth) in enumerate(zip(requests, truths)):
        text = truth.text[0]
        if i % 5 == 4 and len(text) > 40:
            request["stop"] = [text[len(text) * 2 // 3:][:7]]


class ResumeTest(unittest.TestCase):
    def setUp(self):
        print(f"MILLRACE_SEED={SEED}", flush=True)
        self.fleet = self.enterContext(Fleet(MODEL))
        self.fleet.add_workers(2)

    def client(self, *addresses, **options):
        return self.enterContext(millrace.Client(addresses, **options))

    def truths_of(self, client, requests):
        """What each answer is when it runs alone, undisturbed."""
        truths = []
        for i, request in enumerate(requests):
            truths.append(Whole(client.generate(**{**request, "cache_salt": f"alone {i}"})).read())
            self.assertIsNone(truths[-1].error)
            self.assertEqual(truths[-1].answer.resumed, 0)
        return truths

    def run_through(self, client, requests, fault, after=NUM_STREAMS * NUM_TOKENS // 4):
        watch = Watch()
        wholes = [Whole(client.generate(**request), watch) for request in requests]
        threads = [threading.Thread(target=whole.read) for whole in wholes]
        for thread in threads:
            thread.start()
        watch.wait_for(after)
        fault()
        for thread in threads:
            thread.join()
        return wholes

    def assert_exact(self, requests, truths, wholes, least_resumed=NUM_STREAMS // 2):
        lost = repeated = wrong = 0
        for i, (truth, whole) in enumerate(zip(truths, wholes)):
            self.assertIsNone(whole.error, f"request {i} of seed {SEED}")
            for expected, got in zip(truth.answer.token_ids, whole.answer.token_ids):
                lost += max(0, len(expected) - len(got))
                repeated += max(0, len(got) - len(expected))
                wrong += sum(a != b for a, b in zip(expected, got))
            self.assertEqual(whole.facts(), truth.facts(), f"request {i} of seed {SEED}")
        resumed = sum(whole.answer.resumed > 0 for whole in wholes)
        gaps = sorted(whole.longest_gap for whole in wholes)
        print(f"{len(wholes)} streams, {resumed} resumed; {lost} tokens lost, {repeated} repeated, {wrong} wrong; "
              f"longest pause {gaps[len(gaps) // 2]:.2f} s at the median, {gaps[-1]:.2f} s at most", flush=True)
        # Streams keep no step with each other: on a loaded machine some have ended when the router dies.
        self.assertGreaterEqual(resumed, least_resumed, "the router went too late to hit the streams")

    def test_streams_go_on_at_another_router_when_theirs_is_killed(self):
        rng = random.Random(SEED)
        first = self.fleet.start_router()
        second_address = free_address()
        client = self.client(first.address, second_address)
        requests = make_requests(rng)
        with_stop_strings(requests, self.truths_of(client, requests))
        truths = self.truths_of(client, requests)
        for request, truth in zip(requests, truths):
            if request["temperature"] == 0:
                golden = next(case["greedy"] for case in GOLDEN["cases"] if case["prompt"] == request["prompt"])
                got = truth.answer.token_ids[0][:len(golden)]
                self.assertEqual(got, golden[:len(got)])
        started = []

        def kill():
            first.kill()
            started.append(self.fleet.start_router(second_address))

        wholes = self.run_through(client, requests, kill)
        self.assert_exact(requests, truths, wholes)
        self.assertEqual(started[0].address, second_address)
        self.wait_until_idle(second_address)

    def test_streams_go_on_at_the_same_address_when_its_router_comes_back(self):
        rng = random.Random(SEED + 1)
        router = self.fleet.start_router()
        address = router.address
        client = self.client(address)
        requests = make_requests(rng)
        truths = self.truths_of(client, requests)

        def kill():
            router.kill()
            self.fleet.start_router(address)

        self.assert_exact(requests, truths, self.run_through(client, requests, kill))
        self.wait_until_idle(address)

    def test_the_check_notices_a_client_that_forgets_a_token(self):
        router = self.fleet.start_router()
        address = router.address
        client = self.client(address)
        requests = [{**request, "n": 1} for request in make_requests(random.Random(SEED + 2))]
        truths = self.truths_of(client, requests)
        exact = millrace.Answer._resumed_request

        def forgetful(answer):
            request = exact(answer)
            for resume in request.resume:
                del resume.token_ids[-1:]
            return request

        def kill():
            router.kill()
            self.fleet.start_router(address)

        with mock.patch.object(millrace.Answer, "_resumed_request", forgetful):
            wholes = self.run_through(client, requests, kill)
        with self.assertRaises(AssertionError):
            self.assert_exact(requests, truths, wholes)

    def test_a_new_router_finds_what_the_old_one_left_cached_and_the_old_one_steps_back(self):
        rng = random.Random(SEED + 3)
        old = self.fleet.start_router()
        new_address = free_address()
        client = self.client(old.address, new_address)
        prompts = [[rng.randrange(3, 600) for _ in range(100)] for _ in range(8)]

        def ask(prompt, **options):
            answer = client.generate(prompt, temperature=0, max_tokens=40, ignore_eos=True, timeout=TIMEOUT_S, **options)
            answer.read()
            return answer.token_ids[0], answer.finish[0].route

        truths = [ask(prompt)[0] for prompt in prompts]
        long = [{"prompt": prompts[i % 8], "temperature": 0.8, "seed": rng.randrange(1 << 64), "n": 2, "max_tokens": 400, "ignore_eos": True,
                 "timeout": TIMEOUT_S} for i in range(NUM_STREAMS)]
        undisturbed = self.truths_of(client, long)
        started = []
        # Beside the old one, as a standby that comes up does.
        wholes = self.run_through(client, long, lambda: started.append(self.fleet.start_router(new_address)), after=NUM_STREAMS)
        self.assert_exact(long, undisturbed, wholes, least_resumed=8)  # it takes a while to start, and some end before
        self.assertEqual(started[0].address, new_address)
        hits = 0
        for prompt, truth in zip(prompts, truths):
            tokens, route = ask(prompt + truth)
            self.assertEqual(route.predicted_cached_tokens, route.real_cached_tokens)
            hits += route.real_cached_tokens
            self.assertEqual(ask(prompt)[0], truth)
            self.assertEqual(ask(prompt + truth, cache_salt="other")[0], tokens)
        print(f"{hits} of {sum(map(len, prompts + truths))} tokens of conversations found after the takeover", flush=True)
        self.assertGreater(hits, 0)
        with self.assertRaises(millrace.Unavailable):
            self.client(old.address, patience=0.2).generate([5], max_tokens=2).read()

    def test_says_what_went_wrong(self):
        router = self.fleet.start_router()
        client = self.client(free_address(), router.address)
        self.assertEqual([model.name for model in client.models()], [MODEL.name])
        with self.assertRaises(millrace.InvalidRequest) as caught:
            client.generate([5], temperature=-1).read()
        self.assertIn("sampling.temperature is -1", caught.exception.message)
        with self.assertRaises(millrace.InvalidRequest):
            client.generate([1 << 20]).read()
        with self.assertRaises(millrace.DeadlineExceeded):
            client.generate([5], max_tokens=400, ignore_eos=True, n=8, timeout=0.05).read()
        nobody = self.client(free_address(), free_address(), patience=0.5)
        started = time.monotonic()
        with self.assertRaises(millrace.Unavailable):
            nobody.generate([5]).read()
        with self.assertRaises(millrace.Unavailable):
            nobody.tokenize("x")
        self.assertLess(time.monotonic() - started, 20)

    def test_cancelling_frees_what_the_answer_holds(self):
        router = self.fleet.start_router()
        client = self.client(router.address)
        with client.generate([5, 6], max_tokens=400, ignore_eos=True) as answer:
            next(answer)
        with self.assertRaises(millrace.Cancelled):
            for _ in answer:
                pass
        waiting = self.client(free_address(), patience=60).generate([5])
        threading.Timer(0.3, waiting.cancel).start()
        with self.assertRaises(millrace.Cancelled):
            waiting.read()
        self.wait_until_idle(router.address)

    def test_text_and_chat_and_tokens_agree(self):
        client = self.client(self.fleet.start_router().address)
        messages = [{"role": "user", "content": "hello <|im_end|>"}]
        by_chat = client.chat(messages, temperature=0, max_tokens=8, ignore_eos=True)
        text = by_chat.read()
        by_tokens = client.generate(client.render_chat(messages), temperature=0, max_tokens=8, ignore_eos=True)
        by_tokens.read()
        self.assertEqual(by_chat.token_ids, by_tokens.token_ids)
        self.assertEqual(client.detokenize(by_chat.token_ids[0]), text)
        self.assertEqual(client.detokenize(client.tokenize("héllo 🙂")), "héllo 🙂")

    def wait_until_idle(self, address):
        """Released memory is confirmed by the worker's next report, so idleness is awaited, at most 20 s."""
        deadline = time.monotonic() + 20
        while True:
            now = status(address)
            left = [now.router.open_streams, now.router.waiting_sequences, now.router.running_sequences]
            left += [count for worker in now.workers for count in (worker.used_slots, worker.used_blocks, worker.quarantined_blocks)]
            if not any(left):
                return
            self.assertLess(time.monotonic(), deadline, f"left behind: {left}")


if __name__ == "__main__":
    unittest.main(verbosity=2)

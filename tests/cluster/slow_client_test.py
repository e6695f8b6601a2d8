"""A promise to the others: a client that stops reading is paused, holds nothing up, and loses nothing when it reads on.

MILLRACE_SEED repeats a run."""
import os
import random
import threading
import time
import unittest

import grpc

from processes import FIXTURES, Fleet, inference_pb2 as pb, millrace, status

MODEL = FIXTURES / "qwen3-tiny-untied"  # context 512
SEED = int(os.environ.get("MILLRACE_SEED", random.SystemRandom().randrange(1 << 32)))
NUM_OTHERS = 20
# Some 0.7 MB: far more than the window of its connection, which is kept from growing, and the router's buffer take.
SLOW = {"max_tokens": 500, "n": 8, "logprobs": 20, "seed": 3, "ignore_eos": True}
SLOW_PROMPT = [7, 8, 9]
SMALL_WINDOW = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 16)]


class SlowClientTest(unittest.TestCase):
    def test_a_client_that_stops_reading_is_paused_and_the_others_do_not_notice(self):
        print(f"MILLRACE_SEED={SEED}", flush=True)
        rng = random.Random(SEED)
        fleet = self.enterContext(Fleet(MODEL))
        fleet.add_workers(1)
        router = fleet.start_router()
        client = self.enterContext(millrace.Client(router.address))
        requests = [{"prompt": [rng.randrange(3, 600) for _ in range(rng.randrange(1, 90))], "temperature": 0.8, "max_tokens": 300,
                     "seed": rng.randrange(1 << 40), "ignore_eos": True} for _ in range(NUM_OTHERS)]
        truths = [self.read(client.generate(**request)) for request in requests]
        slow_truth = self.read(client.generate(SLOW_PROMPT, **SLOW))

        channel = self.enterContext(grpc.insecure_channel(router.address, SMALL_WINDOW))
        slow = channel.unary_stream(
            "/millrace.v1.InferenceService/Generate", request_serializer=pb.GenerateRequest.SerializeToString,
            response_deserializer=pb.GenerateResponse.FromString,
        )(pb.GenerateRequest(token_ids=pb.TokenIds(ids=SLOW_PROMPT), sampling=pb.SamplingParams(**SLOW)))
        slow_tokens = [[] for _ in slow_truth]
        piece = next(slow)
        slow_tokens[piece.index] += piece.token_ids
        before = status(router.address).router.generated_tokens
        together = [None] * NUM_OTHERS

        def run(i):
            together[i] = self.read(client.generate(**requests[i]))

        threads = [threading.Thread(target=run, args=(i,)) for i in range(NUM_OTHERS)]
        started = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        took = time.monotonic() - started
        # Until nothing but a request that is read makes tokens, the slow one has not come to stand yet.
        deadline = time.monotonic() + 60
        while True:
            first = status(router.address).router
            self.read(client.generate(**requests[0]))
            second = status(router.address).router
            if second.generated_tokens - first.generated_tokens == 300:
                break
            self.assertLess(time.monotonic(), deadline, "the slow client's sequences are never paused")
        made = second.generated_tokens - before
        print(f"{NUM_OTHERS} others took {took:.1f} s; {second.running_sequences} sequences stand, {made} tokens made", flush=True)
        self.assertGreater(second.running_sequences, 0)
        self.assertGreater(status(router.address).workers[0].used_blocks, 0)
        self.assertEqual(together, truths)
        for piece in slow:
            slow_tokens[piece.index] += piece.token_ids
            self.assertEqual(piece.finish.route.preemptions, 0)
        self.assertEqual(slow_tokens, slow_truth)

    def read(self, answer):
        answer.read()
        return answer.token_ids


if __name__ == "__main__":
    unittest.main(verbosity=2)

"""200 concurrent streams on one CPU worker with a pool small enough to preempt, 30 % cancelled at random moments.

Promises: every finished stream equals its solo run, token for token; afterwards no block, slot, stream or queue entry is left.
"""
import os
import random
import threading
import time
import unittest

import grpc

from cluster import FIXTURES, cluster, inference_pb2

NUM_STREAMS = int(os.environ.get("MILLRACE_STRESS_STREAMS", "200"))
SEED = int(os.environ.get("MILLRACE_SEED", random.randrange(1 << 30)))
MODEL = FIXTURES / "qwen3-tiny-untied"


def make_requests(rng):
    """A third shares one long prefix, so that blocks are shared while they are preempted."""
    shared = [rng.randrange(3, 600) for _ in range(150)]
    requests = []
    for i in range(NUM_STREAMS):
        prompt = (shared[:rng.randrange(32, 150)] if i % 3 == 0 else []) + [rng.randrange(3, 600) for _ in range(rng.randrange(1, 90))]
        sampling = inference_pb2.SamplingParams(
            temperature=rng.choice([0.0, 0.8]), seed=rng.randrange(1 << 40), max_tokens=rng.randrange(80, 260), ignore_eos=True)
        if i % 5 == 0:
            sampling.repetition_penalty = 1.2
        requests.append(inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=prompt), sampling=sampling))
    return requests


def collect(call, cancel_after=None):
    """All tokens of a stream and its Finish; (tokens, None) if it was cancelled after that many."""
    tokens = []
    try:
        for piece in call:
            tokens += piece.token_ids
            if piece.HasField("finish"):
                return tokens, piece.finish
            if cancel_after is not None and len(tokens) >= cancel_after:
                call.cancel()
    except grpc.RpcError as error:
        if error.code() != grpc.StatusCode.CANCELLED or cancel_after is None:
            raise
    return tokens, None


class Stress(unittest.TestCase):
    def test_finished_streams_equal_their_solo_runs_and_nothing_is_left(self):
        print(f"MILLRACE_SEED={SEED}", flush=True)
        rng = random.Random(SEED)
        requests = make_requests(rng)
        cancels = [rng.randrange(0, 40) if rng.random() < 0.3 else None for _ in requests]
        # 2 x layers 3 x 1 kv head x 64 floats x 32 tokens = 48 KiB a block: 40 blocks, 1,280 tokens for some 50,000 wanted.
        with cluster(MODEL, "--workers", 1, "--kv_memory", f"{40 * 48}KiB") as millrace:
            together = [None] * len(requests)

            def run(i):
                call = millrace.inference.Generate(requests[i])
                if cancels[i] == 0:
                    call.cancel()
                together[i] = collect(call, cancels[i])

            threads = [threading.Thread(target=run, args=(i,)) for i in range(len(requests))]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            self.wait_until_empty(millrace)
            status = millrace.status()
            finished = [i for i, (_, finish) in enumerate(together) if finish is not None]
            print(f"{len(finished)} finished, {len(requests) - len(finished)} cancelled, {status.router.preemptions} preemptions, "
                  f"{status.router.cached_tokens} of {status.router.prompt_tokens} prompt tokens cached", flush=True)
            self.assertGreater(status.router.preemptions, 0, "the pool was not small enough to preempt")
            self.assertGreaterEqual(len(finished), sum(c is None for c in cancels))
            for i in finished:
                alone, finish = collect(millrace.inference.Generate(requests[i]))
                self.assertEqual(together[i][0], alone, f"request {i} of seed {SEED}")
                self.assertEqual(finish.route.predicted_cached_tokens, finish.route.real_cached_tokens)
            for i, (tokens, finish) in enumerate(together):  # what a cancelled stream had got is a prefix of the truth
                if finish is None and tokens:
                    alone, _ = collect(millrace.inference.Generate(requests[i]))
                    self.assertEqual(tokens, alone[:len(tokens)], f"cancelled request {i} of seed {SEED}")
            self.wait_until_empty(millrace)
            self.assertEqual(millrace.stop(), 0)

    def wait_until_empty(self, millrace):
        """Released memory is confirmed by the worker's next report, so emptiness is awaited, at most 20 s."""
        deadline = time.monotonic() + 20
        while True:
            status = millrace.status()
            worker = status.workers[0]
            left = {
                "streams": status.router.open_streams, "waiting": status.router.waiting_sequences, "running": status.router.running_sequences,
                "slots": worker.used_slots, "used blocks": worker.used_blocks, "quarantined blocks": worker.quarantined_blocks,
                "lost blocks": worker.num_blocks - worker.free_blocks - worker.cached_blocks - worker.used_blocks - worker.quarantined_blocks,
            }
            if not any(left.values()):
                return
            self.assertLess(time.monotonic(), deadline, f"left behind: {left}")


if __name__ == "__main__":
    unittest.main(verbosity=2)

"""What takes minutes to prove, in real processes: endurance.py cancels|pinned|soak [--count N] [--seconds S]. Not part of CI.

cancels  how long a cancelled sequence keeps its slot and its blocks, beside streams that go on; then N cancels in all phases (before the
         first byte, queued, prefill, decode, paused, while workers are killed), after which nothing may be left
pinned   one worker whose pool cannot hold what runs: every stream equals its solo run, nobody is preempted more than twice
soak     streams that end, are cancelled or are read slowly, while workers are killed and restarted in order: every finished stream is
         exact, calls are accounted for, and the router's memory does not grow

MILLRACE_SEED repeats the choices, not the races."""
import argparse
import collections
import os
import random
import re
import signal
import socket
import statistics
import threading
import time
import urllib.request

import grpc

from faults_test import GOLDEN, MODEL, Process, admin_pb2, admin_pb2_grpc, inference_pb2 as pb, inference_pb2_grpc, make_requests

SEED = int(os.environ.get("MILLRACE_SEED", random.randrange(1 << 30)))
TIMEOUT_S = 120
BLOCK_KIB = 48  # 2 x 3 layers x 1 KV head x 64 floats x 32 tokens
SMALL_WINDOW = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 16)]
SLOW = pb.SamplingParams(temperature=1, seed=3, max_tokens=500, n=8, logprobs=20, ignore_eos=True)  # 0.7 MB of output


def free_address():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


class Fleet:
    """Workers at addresses that they keep, and one router."""

    def __init__(self, num_workers, num_blocks, model=MODEL):
        self.model, self.memory = str(model), f"{num_blocks * BLOCK_KIB}KiB" if model == MODEL else "256MiB"
        self.addresses = [free_address() for _ in range(num_workers)]
        self.workers = [None] * num_workers
        for i in range(num_workers):
            self.start(i)
        self.metrics_at = free_address()
        self.router = Process("millrace-router", "--model", self.model, "--listen", "127.0.0.1:0", "--workers", ",".join(self.addresses),
                              "--metrics_listen", self.metrics_at, "--log_level", "error")
        self.channel = grpc.insecure_channel(self.router.address)
        self.inference = inference_pb2_grpc.InferenceServiceStub(self.channel)
        self.admin = admin_pb2_grpc.AdminServiceStub(self.channel)
        self.await_ready()

    def start(self, i):
        self.workers[i] = Process("millrace-worker", "--model", self.model, "--listen", self.addresses[i], "--worker_id", f"worker-{i}",
                                  "--threads", "1", "--kv_memory", self.memory, "--drain_ms", "300", "--log_level", "error")

    def restart(self, i, number):
        self.workers[i].send(number)
        code = self.workers[i].wait()
        assert code == (0 if number == signal.SIGTERM else -number), f"worker {i} ended with {code}"
        self.start(i)

    def status(self):
        return self.admin.GetStatus(admin_pb2.GetStatusRequest())

    def await_ready(self):
        ready = admin_pb2.WorkerStatus.State.Value("STATE_READY")
        self.await_that(lambda status: all(worker.state == ready for worker in status.workers), "all workers are ready")

    def await_that(self, wanted, what):
        deadline = time.monotonic() + TIMEOUT_S
        while not wanted(status := self.status()):
            assert time.monotonic() < deadline, f"waited in vain until {what}: {status}"
            time.sleep(0.02)  # a status has no condition to wait on

    def await_empty(self):
        def empty(status):
            router = status.router
            lost = [w.num_blocks - w.free_blocks - w.cached_blocks - w.used_blocks - w.quarantined_blocks for w in status.workers]
            return not any([router.open_streams, router.waiting_sequences, router.running_sequences, *lost,
                            *(w.used_slots + w.used_blocks + w.quarantined_blocks for w in status.workers)])

        self.await_that(empty, "no stream, queue entry, slot or block is left")

    def metric(self, name):
        """{labels: value} of one metric."""
        with urllib.request.urlopen(f"http://{self.metrics_at}/metrics", timeout=TIMEOUT_S) as answer:
            return {m.group(1): float(m.group(2)) for m in re.finditer(rf"^{name}(?:{{(.*)}})? (\S+)$", answer.read().decode(), re.M)}

    def stop(self):
        self.channel.close()
        for process in [self.router, *self.workers]:
            process.kill()


def read(call, slowly=0.0):
    """All tokens of a stream and its Finish."""
    tokens = []
    for piece in call:
        tokens += piece.token_ids
        time.sleep(slowly)
        if piece.HasField("finish"):
            return tokens, piece.finish
    raise AssertionError("a stream ended without a finish")


def share(values, part):
    return sorted(values)[min(len(values) - 1, int(len(values) * part))]


class Threads:
    """Runs `work(rng)` in threads again and again until `stop`; the first error ends everything."""

    def __init__(self, count, work):
        self.over, self.error = threading.Event(), None
        self.threads = [threading.Thread(target=self.run, args=(work, random.Random(SEED * 1000 + i))) for i in range(count)]
        for thread in self.threads:
            thread.start()

    def run(self, work, rng):
        try:
            while not self.over.is_set():
                work(rng)
        except Exception as error:  # noqa: BLE001: raised again by `stop`
            self.error = self.error or error
            self.over.set()

    def stop(self):
        self.over.set()
        for thread in self.threads:
            thread.join()
        if self.error is not None:
            raise self.error


class Calls:
    """Starts calls and cancels them in some phase; counts what became of them."""

    def __init__(self, fleet, requests):
        self.fleet, self.requests, self.counts, self.lock = fleet, requests, collections.Counter(), threading.Lock()

    def count(self, *what):
        with self.lock:
            self.counts.update(what)

    def cancel(self, call, phase):
        call.cancel()
        try:
            for _ in call:
                pass
        except grpc.RpcError as error:
            if error.code() != grpc.StatusCode.CANCELLED:
                raise
            self.count("cancelled", phase)
        else:
            self.count("finished")  # it had ended

    def cancel_some(self, rng):
        request = rng.choice(self.requests)
        phase = rng.choices(["at once", "soon", "decode", "paused"], [4, 4, 4, 0.03])[0]
        self.count("started")
        if phase == "paused":
            with grpc.insecure_channel(self.fleet.router.address, [*SMALL_WINDOW, ("grpc.use_local_subchannel_pool", 1)]) as channel:
                call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[7, 8, 9]), sampling=SLOW))
                next(call)
                deadline = time.monotonic() + 3
                while not self.fleet.metric("millrace_paused_sequences")[None] and time.monotonic() < deadline:
                    time.sleep(0.05)
                phase = "paused" if self.fleet.metric("millrace_paused_sequences")[None] else "decode"
                return self.cancel(call, phase)
        call = self.fleet.inference.Generate(request, timeout=TIMEOUT_S)
        if phase == "soon":  # queued or in prefill
            time.sleep(rng.random() * 0.05)
        if phase == "decode":
            for _ in range(rng.randrange(1, 20)):
                next(call, None)
        self.cancel(call, phase)


def cancel_to_free(fleet, count):
    """Milliseconds and steps until the slot and the blocks of a cancelled sequence are free, while four others decode."""
    rng, times, steps = random.Random(SEED), [], []
    endless, probed = (pb.SamplingParams(temperature=0, max_tokens=length, ignore_eos=True) for length in (490, 200))

    def prompt(length):
        return pb.TokenIds(ids=[rng.randrange(3, 600) for _ in range(length)])

    while len(times) < count:
        others = [fleet.inference.Generate(pb.GenerateRequest(token_ids=prompt(10), sampling=endless)) for _ in range(4)]
        for other in others:
            next(other)
        for turn in range(12):
            call = fleet.inference.Generate(pb.GenerateRequest(token_ids=prompt(300), sampling=probed))
            if turn % 2:
                next(call)  # decode; else queued or in prefill
            else:
                time.sleep(rng.random() * 0.01)
            before = fleet.status().workers[0].steps
            begin = time.monotonic()
            call.cancel()
            while True:
                worker = fleet.status().workers[0]
                if worker.used_slots <= 4 and worker.quarantined_blocks == 0:
                    break
            took = time.monotonic() - begin
            if worker.used_slots == 4:  # the others have not ended meanwhile
                times.append(took * 1000)
                steps.append(worker.steps - before)
        for other in others:
            other.cancel()
        fleet.await_empty()
    print(f"cancel to free, {len(times)} of them, the status's own round trips included: p50 {share(times, .5):.1f} ms, "
          f"p99 {share(times, .99):.1f} ms, max {max(times):.1f} ms; steps that ended meanwhile: p50 {share(steps, .5)}, p99 {share(steps, .99)}, "
          f"max {max(steps)}", flush=True)
    return share(times, .99), share(steps, .99)


def cancels(options):
    fleet = Fleet(1, 680, options.model or MODEL)
    try:
        milliseconds, steps = cancel_to_free(fleet, min(options.count, 400))
        assert steps <= 2 if options.model else milliseconds <= 100
    finally:
        fleet.stop()
    if options.model:
        return
    fleet = Fleet(2, 96)
    try:
        calls = Calls(fleet, make_requests(random.Random(SEED)))
        begin, kills = time.monotonic(), 0
        threads = Threads(48, calls.cancel_some)
        while calls.counts["cancelled"] < options.count and not threads.over.is_set():
            time.sleep(6)  # a worker that is lost more than three times within 5 s of its start has to rest
            fleet.restart(kills % 2, signal.SIGKILL)
            kills += 1
        threads.stop()
        fleet.await_ready()
        fleet.await_empty()
        moves = fleet.metric("millrace_sequence_moves_total")[None]
        print(f"cancels: {dict(calls.counts)} in {time.monotonic() - begin:.0f} s, {kills} kills, {moves:.0f} moves; nothing is left", flush=True)
        assert calls.counts["cancelled"] >= options.count
        assert moves > 0 and calls.counts["paused"] > 0, "not every phase was met"
    finally:
        fleet.stop()


def pinned(options):
    fleet = Fleet(1, 34)
    try:
        requests = make_requests(random.Random(SEED))
        truth = [read(fleet.inference.Generate(request))[0] for request in requests]
        assert truth[-len(GOLDEN):] == [case["greedy"] for case in GOLDEN]
        preemptions, used = [], []

        def stream(rng):
            i = rng.randrange(len(requests))
            tokens, finish = read(fleet.inference.Generate(requests[i], timeout=TIMEOUT_S))
            assert tokens == truth[i], f"request {i} of seed {SEED} differs from its solo run"
            preemptions.append(finish.route.preemptions)

        threads = Threads(32, stream)
        end = time.monotonic() + options.seconds
        while time.monotonic() < end and not threads.over.is_set():
            time.sleep(0.2)
            worker = fleet.status().workers[0]
            used.append((worker.used_blocks + worker.quarantined_blocks) / worker.num_blocks)
        threads.stop()
        fleet.await_empty()
        print(f"pinned: {options.seconds:.0f} s, pool in use {statistics.mean(used):.0%} in the mean, {len(preemptions)} streams exact, preemptions "
              f"{sum(preemptions)}, by stream {sorted(collections.Counter(preemptions).items())}", flush=True)
        assert max(preemptions) <= 2 and sum(preemptions) > 0
    finally:
        fleet.stop()


def rss_kib(pid):
    with open(f"/proc/{pid}/status", encoding="ascii") as status:
        return int(re.search(r"VmRSS:\s+(\d+)", status.read()).group(1))


def growth(samples):
    """Least squares of (seconds, KiB): KiB a second, and the standard error of that."""
    times, values = zip(*samples)
    slope, intercept = statistics.linear_regression(times, values)
    residue = sum((v - intercept - slope * t)**2 for t, v in samples) / (len(samples) - 2)
    return slope, (residue / (statistics.pvariance(times) * len(times)))**0.5


def soak(options):
    fleet = Fleet(3, 300)
    try:
        requests = make_requests(random.Random(SEED))
        truth = [read(fleet.inference.Generate(request))[0] for request in requests]
        calls = Calls(fleet, requests)
        accepted = sum(fleet.metric("millrace_requests_total").values())

        def client(rng):
            if rng.random() < 0.4:
                return calls.cancel_some(rng)
            i = rng.randrange(len(requests))
            calls.count("started")
            tokens, _ = read(fleet.inference.Generate(requests[i], timeout=TIMEOUT_S), rng.choice([0, 0, 0, 0.01]))
            assert tokens == truth[i], f"request {i} of seed {SEED} differs from its solo run"
            calls.count("finished")

        threads = Threads(24, client)
        samples, begin, churns = collections.defaultdict(list), time.monotonic(), 0
        while time.monotonic() - begin < options.seconds and not threads.over.is_set():
            for _ in range(4):
                time.sleep(2)
                samples["router"].append((time.monotonic() - begin, rss_kib(fleet.router.process.pid)))
                samples[f"worker {churns}"].append((time.monotonic() - begin, rss_kib(fleet.workers[2].process.pid)))
            if churns % 40 != 39:  # now and then the last worker is replaced, too
                fleet.restart(churns % 2, [signal.SIGKILL, signal.SIGTERM][churns // 2 % 2])
            else:
                fleet.restart(2, signal.SIGTERM)
            churns += 1
        threads.stop()
        fleet.await_ready()
        fleet.await_empty()
        by_code = {code[6:-1]: n for code, n in fleet.metric("millrace_requests_total").items() if n}
        print(f"soak: {time.monotonic() - begin:.0f} s, {churns} workers went and came, {dict(calls.counts)}; the router's calls {by_code}; "
              f"nothing is left", flush=True)
        # What is cancelled soon may never reach the router; what is cancelled late may have ended there.
        assert calls.counts["started"] == calls.counts["finished"] + calls.counts["cancelled"]
        assert set(by_code) <= {"OK", "CANCELLED"} and by_code["OK"] - accepted >= calls.counts["finished"]
        assert 0 <= calls.counts["started"] - (sum(by_code.values()) - accepted) <= calls.counts["at once"] + calls.counts["soon"]
        router = samples["router"][len(samples["router"]) // 2:]  # before, caches and gRPC's arenas fill
        slope, error = growth(router)
        print(f"router's memory: {router[0][1] / 1024:.1f} MiB half-way, {router[-1][1] / 1024:.1f} MiB at the end; slope "
              f"{slope * 3600 / 1024:+.2f} ± {2 * error * 3600 / 1024:.2f} MiB/h (two standard errors)", flush=True)
        assert router[-1][1] <= 1.01 * router[0][1], "the router's memory grows"
        if options.samples:
            with open(options.samples, "w", encoding="ascii") as file:
                file.writelines(f"{name},{t:.1f},{kib}\n" for name, of in samples.items() for t, kib in of)
    finally:
        fleet.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["cancels", "pinned", "soak"])
    parser.add_argument("--count", type=int, default=20_000, help="cancels")
    parser.add_argument("--model", help="cancels: a model whose steps are longer than a status takes, so that they can be counted; only that")
    parser.add_argument("--seconds", type=float, help="pinned: 300, soak: 1200")
    parser.add_argument("--samples", help="soak: file for memory over time")
    chosen = parser.parse_args()
    chosen.seconds = chosen.seconds or {"pinned": 300, "soak": 1200}.get(chosen.what)
    print(f"MILLRACE_SEED={SEED}", flush=True)
    {"cancels": cancels, "pinned": pinned, "soak": soak}[chosen.what](chosen)

"""Promises to whoever watches a cluster: `/metrics` of both processes agrees with what clients counted themselves, holds
exactly the names, types and labels of deploy/metrics.md, and answers under load; health, reflection and log lines too.
"""
import re
import signal
import subprocess
import threading
import time
import unittest
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import grpc

from cluster import BIN, FIXTURES, ROOT, inference_pb2 as pb, inference_pb2_grpc

MODEL = FIXTURES / "qwen3-tiny-untied"
NAME = "qwen3-tiny-untied"
CALLS, CLIENTS = 96, 8
SCRAPES, SCRAPE_CPU_S = 200, 0.005  # a scrape's processor time, which a crowded machine does not change
TIMEOUT_S = 60


class Process:
    """A router or a worker, its stderr kept. `address` and `metrics` are those that it said."""

    def __init__(self, program, *options):
        self.log, self._known = [], threading.Event()
        self.metrics = None
        self.process = subprocess.Popen([str(BIN / program), "--model", str(MODEL), "--listen=127.0.0.1:0", *options],
                                        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        word, self.address = self.process.stdout.readline().split()
        assert word == "ready"
        assert self._known.wait(TIMEOUT_S), "no line said where the metrics are"

    def _read(self):
        for line in self.process.stderr:
            self.log.append(line.rstrip("\n"))
            found = re.search(r" serving .*metrics=(\S+)", line)
            if found:
                self.metrics = found.group(1)
                self._known.set()
        self._known.set()

    def scrape(self):
        with urllib.request.urlopen(f"http://{self.metrics}/metrics", timeout=TIMEOUT_S) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain"), answer.headers
            return Page(answer.read().decode())

    def stop(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(timeout=TIMEOUT_S)
        self._reader.join()
        self.process.stdout.close()
        self.process.stderr.close()
        return code


class Page:
    """A scrape: `types` by family, `values` by (name, labels as a frozenset of pairs)."""

    def __init__(self, text):
        self.types, self.values, self.labels = {}, {}, {}
        for line in text.splitlines():
            if line.startswith("# TYPE "):
                _, _, name, kind = line.split()
                assert name not in self.types, f"{name} comes twice"
                self.types[name] = kind
            elif line and not line.startswith("#"):
                found = re.fullmatch(r'([a-zA-Z_:][\w:]*)(?:\{((?:\w+="(?:[^"\\]|\\.)*",?)*)\})? (\S+)', line)
                assert found, f"not a series: {line}"
                pairs = re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', found.group(2) or "")
                key = found.group(1), frozenset(pairs)
                assert key not in self.values, f"{line} comes twice"
                self.values[key] = float(found.group(3))
                family = next(f for f in (found.group(1), re.sub("_(bucket|sum|count)$", "", found.group(1))) if f in self.types)
                self.labels.setdefault(family, set()).update((k, v) for k, v in pairs if k not in ("le", "quantile"))

    def __call__(self, name, **labels):
        return self.values[name, frozenset(labels.items())]


def documented():
    """{part: {name: (type, {label: values or None})}} of deploy/metrics.md."""
    parts, part = {}, None
    for line in (ROOT / "deploy" / "metrics.md").read_text().splitlines():
        if line.startswith("## "):
            part = line[3:]
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if part in ("Router", "Worker", "Both") and len(cells) == 4 and cells[1] in ("gauge", "counter", "histogram", "summary"):
            labels, last = {}, None
            for word in filter(None, re.split(r"[, ]+", cells[2].replace("–", ""))):
                name, equals, value = word.partition("=")
                if equals:
                    last = labels.setdefault(name, {value})
                elif last is not None and name not in ("model_name", "version"):
                    last.add(name)
                else:
                    labels[name], last = None, None
            for name in cells[0].split(", "):
                parts.setdefault(part, {})[name] = cells[1], labels
    return parts


class MetricsTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.worker = Process("millrace-worker", "--worker_id=the-worker", "--kv_memory=8MiB", "--max_slots=16", "--threads=1")
        cls.addClassCleanup(cls.worker.stop)
        cls.router = Process("millrace-router", f"--workers={cls.worker.address}", "--drain_ms=20000")
        cls.addClassCleanup(cls.router.stop)
        cls.channel = grpc.insecure_channel(cls.router.address)
        cls.addClassCleanup(cls.channel.close)
        cls.stub = inference_pb2_grpc.InferenceServiceStub(cls.channel)

    def generate(self, seed, tokens=32, shared=64):
        """The prompts share a beginning; even seeds are greedy, which repeats itself, so that guesses are right. Returns the finish."""
        ids = [7 + i % 900 for i in range(shared)] + [3 + seed % 900, 5]
        message = pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids),
                                     sampling=pb.SamplingParams(max_tokens=tokens, ignore_eos=True, seed=seed, temperature=seed % 2))
        return list(self.stub.Generate(message, timeout=TIMEOUT_S))[-1].finish

    def settled(self, **expected):
        """A page of the router with these calls by code: a call is filed when its last owner lets go."""
        for _ in range(1000):
            page = self.router.scrape()
            if all(page("millrace_requests_total", code=code) == count for code, count in expected.items()):
                return page
        raise AssertionError(f"{expected} never came")

    def test_1_agrees_with_what_clients_count_and_answers_under_load(self):
        before, durations, stop = self.router.scrape(), [], threading.Event()

        def scrape_on():
            while not stop.is_set():
                for process in (self.router, self.worker):
                    begin = time.monotonic()
                    process.scrape()
                    durations.append(time.monotonic() - begin)

        scraper = threading.Thread(target=scrape_on)
        scraper.start()
        with ThreadPoolExecutor(CLIENTS) as pool:
            finishes = list(pool.map(self.generate, range(CALLS)))
        stop.set()
        scraper.join()
        durations.sort()
        print(f"\n{len(durations)} scrapes under load: median {1e3 * durations[len(durations) // 2]:.1f} ms, "
              f"p99 {1e3 * durations[int(0.99 * len(durations))]:.1f} ms")

        page, worker = self.settled(OK=CALLS), self.worker.scrape()
        prompt = sum(f.usage.prompt_tokens for f in finishes)
        cached = sum(f.usage.cached_tokens for f in finishes)
        generated = sum(f.usage.generated_tokens for f in finishes)
        outputs = generated - sum(f.speculation.accepted_tokens for f in finishes)  # a right guess comes with the token before
        self.assertGreater(cached, 0)

        def grown(name, **labels):
            return page(name, **labels) - before(name, **labels)

        for name, value in {
            "vllm:prompt_tokens_total": prompt, "vllm:generation_tokens_total": generated,
            "vllm:prefix_cache_queries_total": prompt, "vllm:prefix_cache_hits_total": cached,
            "vllm:time_to_first_token_seconds_count": CALLS, "vllm:e2e_request_latency_seconds_count": CALLS,
            "vllm:inter_token_latency_seconds_count": outputs - CALLS, "vllm:request_queue_time_seconds_count": CALLS,
            "vllm:request_prompt_tokens_sum": prompt, "vllm:request_generation_tokens_sum": generated,
        }.items():
            self.assertEqual(grown(name, model_name=NAME), value, name)
        self.assertEqual(grown("vllm:request_success_total", model_name=NAME, finished_reason="length"), CALLS)
        self.assertEqual(grown("millrace_predicted_cached_tokens_total"), sum(f.route.predicted_cached_tokens for f in finishes))
        self.assertEqual(grown("millrace_prefix_mismatches_total"), 0)
        self.assertEqual(page("vllm:num_requests_running", model_name=NAME), 0)
        self.assertEqual(page("vllm:num_requests_waiting", model_name=NAME), 0)
        self.assertEqual(page("millrace_worker_used_slots", worker="the-worker"), 0)
        queued = sum(f.timing.queue_us for f in finishes) * 1e-6
        self.assertAlmostEqual(grown("vllm:request_queue_time_seconds_sum", model_name=NAME), queued, places=3)

        self.assertEqual(worker("millrace_engine_generated_tokens_total"), generated)
        self.assertEqual(worker("millrace_engine_admissions_total"),
                         CALLS + page("vllm:num_preemptions_total", model_name=NAME))
        self.assertEqual(worker("millrace_engine_finished_total", reason="length"), CALLS)
        self.assertEqual(worker("millrace_engine_step_seconds_count"), worker("millrace_engine_steps_total"))
        self.assertEqual(worker("millrace_engine_steps_total"), page("millrace_worker_steps_total", worker="the-worker"))
        blocks = {"free": 0, "used": 0, "cached": 0, "quarantined": 0}
        for state in blocks:
            blocks[state] = page("millrace_worker_kv_blocks", worker="the-worker", state=state)
        self.assertEqual(worker("vllm:cache_config_info", model_name=NAME, block_size="32",
                                num_gpu_blocks=f"{sum(blocks.values()):.0f}"), 1)

    def test_2_holds_what_the_document_says_and_nothing_else(self):
        table = documented()
        self.generate(1)
        for process, part in ((self.router, "Router"), (self.worker, "Worker")):
            page, expected = process.scrape(), {**table[part], **table["Both"]}
            self.assertEqual(page.types, {name: kind for name, (kind, _) in expected.items()})
            for name, (_, labels) in expected.items():
                seen = page.labels.get(name, set())
                self.assertEqual({label for label, _ in seen}, set(labels), name)
                for label, value in seen:
                    if labels[label] is not None:
                        self.assertIn(value, labels[label], name)
            self.assertLess(len(page.values), 2000)

    def test_5_costs_little_to_scrape(self):
        for process in (self.router, self.worker):
            begin, cpu = time.monotonic(), process.scrape()("process_cpu_seconds_total")
            for _ in range(SCRAPES):
                page = process.scrape()
            used = page("process_cpu_seconds_total") - cpu
            print(f"\n{process.process.args[0].rsplit('/', 1)[-1]}: {1e3 * used / SCRAPES:.2f} ms of processor time a scrape, "
                  f"{1e3 * (time.monotonic() - begin) / SCRAPES:.1f} ms by the clock")
            self.assertLess(used / SCRAPES, SCRAPE_CPU_S)

    def test_3_counts_refusals_and_cancellations(self):
        before = self.router.scrape()
        with self.assertRaises(grpc.RpcError):
            list(self.stub.Generate(pb.GenerateRequest(), timeout=TIMEOUT_S))
        call = self.stub.Generate(pb.GenerateRequest(text="x", sampling=pb.SamplingParams(max_tokens=400, ignore_eos=True)))
        next(call)
        call.cancel()
        page = self.settled(INVALID_ARGUMENT=before("millrace_requests_total", code="INVALID_ARGUMENT") + 1,
                            CANCELLED=before("millrace_requests_total", code="CANCELLED") + 1)
        self.assertGreaterEqual(page("vllm:request_success_total", model_name=NAME, finished_reason="abort"), 1)

    def test_4_logs_one_line_a_request(self):
        message = pb.GenerateRequest(request_id="a line", text="the secret words", sampling=pb.SamplingParams(max_tokens=3))
        before = self.router.scrape()("millrace_requests_total", code="OK")
        list(self.stub.Generate(message, timeout=TIMEOUT_S))
        self.settled(OK=before + 1)
        lines = [line for line in self.router.log if 'request id="a line"' in line]
        self.assertEqual(len(lines), 1, lines)
        self.assertRegex(lines[0], r'^\S+Z info request id="a line" status=OK finish=\w+ worker=the-worker prompt_tokens=\d+ '
                                   r'cached_tokens=\d+ generated_tokens=\d+ queue_us=\d+ prefill_us=\d+ decode_us=\d+ total_us=\d+ '
                                   r'preemptions=0 moves=0$')
        self.assertNotIn("secret", "\n".join(self.router.log + self.worker.log))

    def test_9_tells_the_watch_of_a_drain_within_200_ms(self):
        for process, service in ((self.router, "millrace.v1.InferenceService"), (self.worker, "millrace.worker.v1.WorkerService")):
            with grpc.insecure_channel(process.address) as channel:
                watch = channel.unary_stream("/grpc.health.v1.Health/Watch")(b"\x0a" + bytes([len(service)]) + service.encode(),
                                                                            timeout=TIMEOUT_S)
                self.assertEqual(next(watch), b"\x08\x01")  # SERVING
                begin = time.monotonic()
                process.process.send_signal(signal.SIGTERM)
                self.assertEqual(next(watch), b"\x08\x02")  # NOT_SERVING
                took = time.monotonic() - begin
                print(f"\n{service}: NOT_SERVING {1e3 * took:.1f} ms after SIGTERM")
                self.assertLess(took, 0.2)
                self.assertEqual(process.process.wait(timeout=TIMEOUT_S), 0)


if __name__ == "__main__":
    unittest.main(verbosity=2)

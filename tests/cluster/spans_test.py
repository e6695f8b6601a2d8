"""Promises to whoever traces requests: a collector gets each sampled call once, with the right parents and times; and one that is
away, hangs or is slow holds up nobody.
"""
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from concurrent import futures

import grpc
from grpc_tools import protoc

from cluster import BIN, FIXTURES, ROOT, inference_pb2 as pb, inference_pb2_grpc
from metrics_test import Process

_stubs = tempfile.TemporaryDirectory(prefix="millrace-otlp-")
if protoc.main(["protoc", f"-I{ROOT / 'protos'}", f"--python_out={_stubs.name}", f"--grpc_python_out={_stubs.name}",
                "opentelemetry/proto/collector/trace/v1/trace_service.proto"]):
    raise RuntimeError("protoc failed")
sys.path.insert(0, _stubs.name)
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp, trace_service_pb2_grpc as otlp_grpc  # noqa: E402

TIMEOUT_S = 60
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED = f"00-{TRACE}-{PARENT}-01"
MALFORMED = (
    "", "x", SAMPLED[:-1], SAMPLED + "-", SAMPLED.upper(), "ff" + SAMPLED[2:], f"00-{'0' * 32}-{PARENT}-01",
    f"00-{TRACE}-{'0' * 16}-01", SAMPLED.replace("-", "_"), f"00-{TRACE}-{PARENT}-0g", SAMPLED + "-more", "01" + SAMPLED[2:] + "more",
)


def plain(attributes):
    """As a dictionary."""
    def value(any_value):
        kind = any_value.WhichOneof("value")
        found = getattr(any_value, kind)
        return [value(one) for one in found.values] if kind == "array_value" else found

    return {one.key: value(one.value) for one in attributes}


class Collector(otlp_grpc.TraceServiceServicer):
    """Keeps the spans it is sent: (the service's name, span). While `gate` is closed it answers nobody."""

    def __init__(self, rejects=0):
        self.spans, self.rejects, self.gate = [], rejects, threading.Event()
        self._changed = threading.Condition()
        self.gate.set()
        self.server = grpc.server(futures.ThreadPoolExecutor(4))
        otlp_grpc.add_TraceServiceServicer_to_server(self, self.server)
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        self.server.start()

    def Export(self, request, context):
        self.gate.wait(TIMEOUT_S)
        with self._changed:
            for resource in request.resource_spans:
                origin = plain(resource.resource.attributes)
                self.spans += [(origin, span) for scope in resource.scope_spans for span in scope.spans]
            self._changed.notify_all()
        return otlp.ExportTraceServiceResponse(partial_success=otlp.PartialSuccess(rejected_spans=self.rejects))

    def wait_for(self, count, of=lambda span: True):
        with self._changed:
            found = lambda: [(origin, span) for origin, span in self.spans if of(span)]
            assert self._changed.wait_for(lambda: len(found()) >= count, TIMEOUT_S), f"{len(found())} of {count} spans came"
            return found()

    def stop(self):
        self.gate.set()
        self.server.stop(0).wait()


class Traced:
    """A worker and a router that export to `collector`."""

    def __init__(self, test, collector, *router_options):
        self.worker = Process("millrace-worker", "--worker_id=the-worker", "--kv_memory=8MiB", "--max_slots=16", "--threads=1",
                              f"--otlp_endpoint={collector}")
        test.addCleanup(self.worker.stop)
        self.router = Process("millrace-router", f"--workers={self.worker.address}", f"--otlp_endpoint={collector}",
                              "--router_id=the-router", *router_options)
        test.addCleanup(self.router.stop)
        channel = grpc.insecure_channel(self.router.address)
        test.addCleanup(channel.close)
        self.stub = inference_pb2_grpc.InferenceServiceStub(channel)

    def generate(self, traceparent=None, n=1, tokens=8, **fields):
        fields.setdefault("text", "the secret words")
        message = pb.GenerateRequest(sampling=pb.SamplingParams(max_tokens=tokens, ignore_eos=True, n=n), **fields)
        pieces = list(self.stub.Generate(message, timeout=TIMEOUT_S,
                                         metadata=() if traceparent is None else [("traceparent", traceparent)]))
        return [piece.finish for piece in pieces if piece.HasField("finish")]


def is_call(span):
    return span.name == "millrace.v1.InferenceService/Generate"


def microseconds(span):
    return (span.end_time_unix_nano - span.start_time_unix_nano) // 1000


class SpansTest(unittest.TestCase):
    def collector(self, **options):
        collector = Collector(**options)
        self.addCleanup(collector.stop)
        return collector

    def test_a_call_is_a_span_with_its_parts_below(self):
        collector = self.collector()
        traced = Traced(self, collector.address)
        before = time.time_ns()
        finishes = traced.generate(SAMPLED, n=2, request_id="the id")
        after = time.time_ns()
        spans = collector.wait_for(9)  # the call; queue, prefill, decode of each choice; and each choice at the worker
        self.assertEqual(len(spans), 9)
        self.assertEqual({span.trace_id.hex() for _, span in spans}, {TRACE})
        self.assertEqual(len({span.span_id for _, span in spans}), 9)
        [(origin, call)] = [(origin, span) for origin, span in spans if is_call(span)]
        self.assertEqual((origin["service.name"], origin["service.instance.id"]), ("millrace-router", "the-router"))
        self.assertEqual(call.parent_span_id.hex(), PARENT)
        self.assertEqual(call.kind, otlp.Span.KIND_SERVER)
        self.assertTrue(before <= call.start_time_unix_nano + 1000 and call.end_time_unix_nano <= after)
        said = plain(call.attributes)
        self.assertEqual(said["gen_ai.request.model"], "qwen3-tiny-untied")
        self.assertEqual(said["gen_ai.operation.name"], "text_completion")
        self.assertEqual(said["gen_ai.response.id"], "the id")
        self.assertEqual(said["gen_ai.response.finish_reasons"], ["length", "length"])
        self.assertEqual(said["gen_ai.usage.output_tokens"], 16)
        self.assertEqual(said["gen_ai.usage.input_tokens"], finishes[0].usage.prompt_tokens)
        self.assertEqual(said["rpc.grpc.status_code"], 0)
        below = {(span.name, plain(span.attributes).get("millrace.choice")): (origin, span)
                 for origin, span in spans if not is_call(span) and span.name != "sequence"}
        for choice, finish in enumerate(sorted(finishes, key=lambda one: one.seed)):
            for name, expected in (("queue", finish.timing.queue_us), ("prefill", finish.timing.prefill_us),
                                   ("decode", finish.timing.decode_us)):
                _, span = below.pop((name, choice))
                self.assertEqual(span.parent_span_id, call.span_id)
                self.assertEqual(microseconds(span), expected, name)
                self.assertTrue(call.start_time_unix_nano <= span.start_time_unix_nano and
                                span.end_time_unix_nano <= call.end_time_unix_nano, name)
        self.assertFalse(below)
        played = [(origin, span) for origin, span in spans if span.name == "sequence"]
        self.assertEqual(len(played), 2)
        for origin, span in played:
            self.assertEqual((origin["service.name"], origin["service.instance.id"]), ("millrace-worker", "the-worker"))
            self.assertEqual(span.parent_span_id, call.span_id)
            said = plain(span.attributes)
            self.assertEqual((said["gen_ai.usage.output_tokens"], said["millrace.ending"]), (8, "length"))
            [event] = span.events
            self.assertEqual(event.name, "first_token")
            self.assertTrue(span.start_time_unix_nano <= event.time_unix_nano <= span.end_time_unix_nano)
        self.assertNotIn(b"secret", b"".join(span.SerializeToString() for _, span in spans))

    def test_only_what_is_sampled_is_exported_and_what_is_malformed_is_ignored(self):
        collector = self.collector()
        traced = Traced(self, collector.address)
        traced.generate(SAMPLED[:-2] + "00")
        for value in MALFORMED:
            traced.generate(value)
        traced.generate()
        traced.generate("cc" + SAMPLED[2:] + "-what comes later")
        spans = collector.wait_for(len(MALFORMED) + 2, is_call)
        self.assertEqual(len(spans), len(MALFORMED) + 2, "one was exported that nobody samples")
        known = [span for _, span in spans if span.trace_id.hex() == TRACE]
        self.assertEqual([span.parent_span_id.hex() for span in known], [PARENT])
        begun = [span for _, span in spans if not span.parent_span_id]
        self.assertEqual(len({span.trace_id for span in begun}), len(MALFORMED) + 1)

    def test_refused_and_cancelled_calls_have_a_span_with_their_status(self):
        collector = self.collector()
        traced = Traced(self, collector.address)
        with self.assertRaises(grpc.RpcError):
            traced.generate(SAMPLED, tokens=-1)
        call = traced.stub.Generate(pb.GenerateRequest(text="x", sampling=pb.SamplingParams(max_tokens=400, ignore_eos=True)))
        next(call)
        call.cancel()
        spans = collector.wait_for(2, is_call)
        codes = sorted(plain(span.attributes)["rpc.grpc.status_code"] for _, span in spans)
        self.assertEqual(codes, [grpc.StatusCode.CANCELLED.value[0], grpc.StatusCode.INVALID_ARGUMENT.value[0]])
        self.assertEqual({span.status.code for _, span in spans}, {otlp.Status.CODE_UNSET}, "the server did not fail")
        [(_, span)] = collector.wait_for(1, lambda span: span.name == "sequence")
        self.assertEqual(plain(span.attributes)["millrace.ending"], "released")

    def test_what_waits_is_sent_when_they_end(self):
        collector = self.collector()
        traced = Traced(self, collector.address)
        traced.generate(SAMPLED)
        self.assertEqual((traced.router.stop(), traced.worker.stop()), (0, 0))
        self.assertEqual(len(collector.spans), 5)

    def test_a_collector_that_is_away_or_hangs_disturbs_nobody(self):
        away = self.collector()
        away.stop()
        hanging = self.collector()
        hanging.gate.clear()
        for collector in (away, hanging):
            traced = Traced(self, collector.address)
            slowest = 0
            for _ in range(20):
                begin = time.monotonic()
                traced.generate(SAMPLED)
                slowest = max(slowest, time.monotonic() - begin)
            begin = time.monotonic()
            self.assertEqual(traced.router.stop(), 0)
            print(f"\nslowest call {1e3 * slowest:.0f} ms; the router ended in {time.monotonic() - begin:.1f} s")
            self.assertLess(slowest, 2)
            self.assertLess(time.monotonic() - begin, 15)
            said = [line for line in traced.router.log if " spans_dropped " in line]
            self.assertLessEqual(len(said), 1, "a warning a minute is enough")

    def test_lost_spans_are_counted(self):
        collector = self.collector(rejects=1)
        traced = Traced(self, collector.address)
        traced.generate(SAMPLED)
        collector.wait_for(4, lambda span: span.name != "sequence")
        for _ in range(1000):
            page = traced.router.scrape()
            if page("millrace_spans_total", outcome="exported") + page("millrace_spans_total", outcome="dropped") == 4:
                break
        self.assertEqual(page("millrace_spans_total", outcome="dropped"), 1)
        self.assertEqual(page("millrace_spans_total", outcome="exported"), 3)
        self.assertEqual(page("millrace_spans_queued"), 0)

    def test_without_a_collector_a_trace_is_passed_on_and_none_is_begun(self):
        collector = self.collector()
        traced = Traced(self, collector.address, "--otlp_endpoint=")
        traced.generate()
        traced.generate(SAMPLED)
        traced.worker.stop()
        [(origin, span)] = collector.spans
        self.assertEqual((span.trace_id.hex(), span.parent_span_id.hex()), (TRACE, PARENT))
        self.assertFalse([name for name in traced.router.scrape().types if "span" in name])

    def test_plaintext_to_another_machine_must_be_said(self):
        for program in ("millrace-router", "millrace-worker"):
            options = [f"--model={FIXTURES / 'qwen3-tiny-untied'}", "--otlp_endpoint=192.0.2.1:4317"]
            done = subprocess.run([BIN / program, *options, *(["--workers=127.0.0.1:1"] if "router" in program else [])],
                                  capture_output=True, text=True, timeout=TIMEOUT_S)
            self.assertEqual(done.returncode, 2)
            self.assertRegex(done.stderr, "otlp_endpoint.*unencrypted_spans")


if __name__ == "__main__":
    unittest.main(verbosity=2)

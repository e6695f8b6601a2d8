"""Promises to whoever runs a fleet among strangers: without the right certificate or token nobody gets in, learns anything or
fills the log; and certificates and tokens are replaced while streams run.
"""
import os
import pathlib
import re
import signal
import ssl
import subprocess
import tempfile
import threading
import time
import unittest
import urllib.request

from authority import Authority, serial_of
from processes import BIN, FIXTURES, admin_pb2, admin_pb2_grpc, free_address, grpc, millrace
from millrace.v1 import inference_pb2 as pb, inference_pb2_grpc

MODEL = FIXTURES / "qwen3-tiny-untied"
ROUTER, WORKER = "spiffe://millrace/router", "spiffe://millrace/worker"
CLIENT_TOKEN, TENANT_TOKEN, ADMIN_TOKEN = "client-" + "a" * 20, "tenant-" + "b" * 20, "admin-" + "c" * 20
TIMEOUT_S = 60
CLIENTS, STREAM_TOKENS = 8, 400
SECRETS = (CLIENT_TOKEN, TENANT_TOKEN, ADMIN_TOKEN, "no-such-token-at-all")


class Process:
    """A router or a worker, its log kept. `address` waits until it serves."""

    def __init__(self, program, *options):
        self.log = []
        self._changed = threading.Condition()
        self.process = subprocess.Popen([str(BIN / program), f"--model={MODEL}", "--listen=127.0.0.1:0", *map(str, options)],
                                        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self._address = None

    @property
    def address(self):
        if self._address is None:
            line = self.process.stdout.readline().split()
            assert line[:1] == ["ready"], (line, self.log)
            self._address = line[1]
        return self._address

    def _read(self):
        for line in self.process.stderr:
            with self._changed:
                self.log.append(line.rstrip("\n"))
                self._changed.notify_all()

    def lines(self, pattern):
        with self._changed:
            return [line for line in self.log if re.search(pattern, line)]

    def wait_for(self, pattern, count=1):
        """The line that is the count-th to match."""
        with self._changed:
            found = self._changed.wait_for(lambda: len([x for x in self.log if re.search(pattern, x)]) >= count, TIMEOUT_S)
        assert found, f"{pattern} did not come {count} times:\n" + "\n".join(self.log)
        return self.lines(pattern)[count - 1]

    def said(self, key):
        """Of the line `serving`."""
        return re.search(rf" {key}=(\S+)", self.wait_for(r" serving ")).group(1)

    def metric(self, name):
        with urllib.request.urlopen(f"http://{self.said('metrics')}/metrics", timeout=TIMEOUT_S) as answer:
            return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in answer.read().decode().splitlines()
                    if line.startswith(name)}

    def stop(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(timeout=TIMEOUT_S)
        self._reader.join()
        self.process.stdout.close()
        self.process.stderr.close()
        assert code in (0, -signal.SIGKILL), "\n".join(self.log[-30:])


def tls_flags(files, prefix="tls", with_ca=True):
    flags = [f"--{prefix}_certificate={files.certificate}", f"--{prefix}_key={files.key}"]
    return flags + [f"--{prefix}_ca={files.ca}"] if with_ca else flags


def channel(address, ca, files=None, token=None):
    key, certificate = (files.key.read_bytes(), files.certificate.read_bytes()) if files else (None, None)
    credentials = grpc.ssl_channel_credentials(ca.read_bytes(), key, certificate)
    if token:
        credentials = grpc.composite_channel_credentials(credentials, grpc.access_token_call_credentials(token))
    # Workers have no host's name in their certificates; their names are not what is tested from here.
    return grpc.secure_channel(address, credentials, [("grpc.ssl_target_name_override", "worker.test"),
                                                      ("grpc.use_local_subchannel_pool", 1)])


def request(tokens=8, seed=1, **fields):
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=[7 + i % 900 for i in range(24)]),
                              sampling=pb.SamplingParams(max_tokens=tokens, ignore_eos=True, seed=seed), **fields)


def outcome(call):
    """(code, message) of a call that fails."""
    try:
        call()
    except grpc.RpcError as error:
        return error.code(), error.details()
    raise AssertionError("it was let in")


def health(to, service=""):
    """grpc.health.v1 without its stubs: a HealthCheckResponse as bytes."""
    name = service.encode()
    message = b"\x0a" + bytes([len(name)]) + name if name else b""
    return to.unary_unary("/grpc.health.v1.Health/Check")(message, timeout=TIMEOUT_S)


SERVING = b"\x08\x01"


def services(to):
    """What reflection lists, as bytes."""
    call = to.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
    return next(iter(call(iter([b"\x3a\x00"]), timeout=TIMEOUT_S)))  # list_services: ""


def execute(address, ca, files=None):
    """As a router would; what a worker answers to it."""
    with channel(address, ca, files) as to:
        # Bytes of a Hello: router_id "x", epoch 9.
        hello = b"\x0a\x05\x0a\x01x\x10\x09"
        call = to.stream_stream("/millrace.worker.v1.WorkerService/Execute")(iter([hello]), timeout=TIMEOUT_S)
        return next(iter(call))


class Fleet(unittest.TestCase):
    """A worker and a router that know each other by certificates, clients by tokens."""

    @classmethod
    def setUpClass(cls):
        cls.folder = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory(prefix="millrace-tls-")))
        cls.ca = Authority(cls.folder)
        cls.strangers = Authority(cls.folder, "strangers")
        cls.worker_files = cls.ca.issue("worker", uris=[WORKER], hosts=["worker.test"])
        cls.router_files = cls.ca.issue("router", uris=[ROUTER])
        cls.serving = cls.ca.issue("serving", hosts=["localhost", "worker.test"])
        cls.tokens, cls.admin_tokens = cls.folder / "tokens", cls.folder / "admin"
        cls.tokens.write_text(f"# clients\n{CLIENT_TOKEN}\n{TENANT_TOKEN} the-tenant\n")
        cls.admin_tokens.write_text(ADMIN_TOKEN + "\n")
        cls.worker = Process("millrace-worker", "--threads=1", "--kv_memory=16MiB", "--probe_listen=127.0.0.1:0",
                             *tls_flags(cls.worker_files))
        cls.addClassCleanup(cls.worker.stop)
        cls.router = Process("millrace-router", f"--workers={cls.worker.address}", "--probe_listen=127.0.0.1:0",
                             f"--tokens={cls.tokens}", f"--admin_tokens={cls.admin_tokens}",
                             *tls_flags(cls.router_files, "workers_tls"), *tls_flags(cls.serving, with_ca=False))
        cls.addClassCleanup(cls.router.stop)
        cls.router.address  # noqa: B018  waits

    def client(self, token=CLIENT_TOKEN, ca=None):
        to = self.enterContext(channel(self.router.address, ca or self.ca.file, token=token))
        return inference_pb2_grpc.InferenceServiceStub(to), admin_pb2_grpc.AdminServiceStub(to)

    def test_who_has_token_and_authority_is_served(self):
        inference, _ = self.client()
        pieces = list(inference.Generate(request(), timeout=TIMEOUT_S))
        self.assertEqual(sum(len(piece.token_ids) for piece in pieces), 8)

    def test_a_tokens_tenant_takes_the_place_of_the_requests(self):
        too_long = request(tenant="t" * 129)  # as it came it would be refused
        self.assertEqual(outcome(lambda: list(self.client()[0].Generate(too_long, timeout=TIMEOUT_S)))[0],
                         grpc.StatusCode.INVALID_ARGUMENT)
        list(self.client(TENANT_TOKEN)[0].Generate(too_long, timeout=TIMEOUT_S))

    def test_a_client_without_the_right_token_learns_nothing(self):
        for token, message in ((None, "a bearer token is required"), ("no-such-token-at-all", "the bearer token is not valid")):
            inference, admin = self.client(token)
            for call in (lambda: list(inference.Generate(request(), timeout=TIMEOUT_S)),
                         lambda: inference.ListModels(pb.ListModelsRequest(), timeout=TIMEOUT_S),
                         lambda: admin.GetStatus(admin_pb2.GetStatusRequest(), timeout=TIMEOUT_S)):
                self.assertEqual(outcome(call), (grpc.StatusCode.UNAUTHENTICATED, message))
            with channel(self.router.address, self.ca.file, token=token) as to:
                self.assertEqual(outcome(lambda to=to: services(to))[0], grpc.StatusCode.UNAUTHENTICATED)

    def test_a_clients_token_does_not_administer(self):
        _, admin = self.client()
        self.assertEqual(outcome(lambda: admin.GetStatus(admin_pb2.GetStatusRequest(), timeout=TIMEOUT_S)),
                         (grpc.StatusCode.PERMISSION_DENIED, "this needs an operator's token"))
        _, admin = self.client(ADMIN_TOKEN)
        self.assertEqual(len(admin.GetStatus(admin_pb2.GetStatusRequest(), timeout=TIMEOUT_S).workers), 1)

    def test_reflection_is_behind_the_token_and_health_is_not(self):
        with channel(self.router.address, self.ca.file, token=CLIENT_TOKEN) as to:
            self.assertIn(b"millrace.v1.InferenceService", services(to))
        with channel(self.router.address, self.ca.file) as to:
            self.assertEqual(health(to), SERVING)

    def test_refusals_are_logged_once_and_counted(self):
        before = self.router.metric("millrace_refused_calls_total")['millrace_refused_calls_total{reason="wrong_token"}']
        inference, _ = self.client("no-such-token-at-all")
        for _ in range(50):
            outcome(lambda: inference.ListModels(pb.ListModelsRequest(), timeout=TIMEOUT_S))
        after = self.router.metric("millrace_refused_calls_total")['millrace_refused_calls_total{reason="wrong_token"}']
        self.assertEqual(after - before, 50)
        lines = self.router.lines(r"call_refused reason=wrong_token service=/millrace.v1.InferenceService ")
        self.assertEqual(len(lines), 1, lines)

    def test_a_router_without_its_certificate_cannot_command_a_worker(self):
        expired = self.ca.issue("expired", uris=[ROUTER], days=-1)
        stranger = self.strangers.issue("stranger", uris=[ROUTER])
        for who, files in (("no certificate", None), ("another authority's", stranger), ("expired", expired)):
            code, message = outcome(lambda files=files: execute(self.worker.address, self.ca.file, files))
            self.assertEqual(code, grpc.StatusCode.UNAVAILABLE, f"{who}: {message}")
        another_role = self.ca.issue("client", uris=["spiffe://millrace/client"], hosts=["router.test"])
        for who, files in (("a client", another_role), ("a worker", self.worker_files)):
            self.assertEqual(outcome(lambda files=files: execute(self.worker.address, self.ca.file, files)),
                             (grpc.StatusCode.PERMISSION_DENIED, "this needs a router's certificate"), who)
        self.assertEqual(len(self.worker.lines("call_refused reason=wrong_role .*peer=.*client")), 1)

    def test_failed_handshakes_do_not_fill_the_log(self):
        for _ in range(20):
            outcome(lambda: execute(self.worker.address, self.ca.file))
        self.assertLessEqual(len(self.worker.lines(r" grpc source=")), 5, self.worker.log)
        self.assertGreaterEqual(len(self.worker.lines(r" grpc source=")), 1, self.worker.log)

    def test_plaintext_is_not_answered(self):
        for address in (self.router.address, self.worker.address):
            with grpc.insecure_channel(address) as to:
                self.assertEqual(outcome(lambda to=to: health(to))[0], grpc.StatusCode.UNAVAILABLE)

    def test_probes_need_no_certificate_and_get_health_alone(self):
        for process, service in ((self.router, "millrace.v1.InferenceService"), (self.worker, "millrace.worker.v1.WorkerService")):
            with grpc.insecure_channel(process.said("probes")) as to:
                for name in ("", service):
                    self.assertEqual(health(to, name), SERVING)
                self.assertEqual(outcome(lambda to=to: health(to, "x"))[0], grpc.StatusCode.NOT_FOUND)
                for method in ("/millrace.v1.InferenceService/ListModels", "/millrace.worker.v1.WorkerService/Execute"):
                    self.assertEqual(outcome(lambda to=to, method=method: to.unary_unary(method)(b"", timeout=TIMEOUT_S))[0],
                                     grpc.StatusCode.UNIMPLEMENTED)

    def test_a_router_does_not_trust_what_only_claims_to_be_a_worker(self):
        for name, authority, uri in (("impostor", self.ca, ROUTER), ("foreigner", self.strangers, WORKER)):
            files = authority.issue(name, uris=[uri])
            worker = Process("millrace-worker", "--threads=1", "--kv_memory=16MiB", *tls_flags(files, with_ca=False),
                             f"--tls_ca={self.ca.file}")
            self.addCleanup(worker.stop)
            router = Process("millrace-router", f"--workers={worker.address}", *tls_flags(self.router_files, "workers_tls"))
            self.addCleanup(router.stop)
            router.wait_for("worker_unreachable")
            self.assertEqual(worker.metric("millrace_engine_streams_total"), {"millrace_engine_streams_total": 0})

    def test_the_tools_get_in_with_the_same_files(self):
        token = self.folder / "token"
        token.write_text(CLIENT_TOKEN + "\n")
        port = self.router.address.rsplit(":", 1)[1]
        done = subprocess.run([BIN / "millrace", "complete", "--router", f"localhost:{port}", "--ca", self.ca.file,
                               "--token_file", token, "--prompt", "Water", "--max_tokens", "4"],
                              capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        for server_name, code in (("worker.test", 0), ("elsewhere.test", 1)):
            done = subprocess.run([BIN / "millrace", "complete", "--router", self.router.address, "--ca", self.ca.file,
                                   "--server_name", server_name, "--token_file", token, "--prompt", "Water"],
                                  capture_output=True, text=True)
            self.assertEqual(done.returncode, code, done.stderr)
        done = subprocess.run([BIN / "millrace", "status", "--router", f"localhost:{port}", "--ca", self.ca.file,
                               "--token_file", token], capture_output=True, text=True)
        self.assertIn("PERMISSION_DENIED", done.stderr)
        with millrace.Client(f"localhost:{port}", ca=self.ca.file, token_file=token) as client:
            answer = client.generate([5, 6, 7], max_tokens=4, ignore_eos=True)
            answer.read()
            self.assertEqual(len(answer.token_ids[0]), 4)

    def test_secrets_are_never_logged(self):
        inference, _ = self.client("no-such-token-at-all")
        outcome(lambda: inference.ListModels(pb.ListModelsRequest(), timeout=TIMEOUT_S))
        self.router.wait_for("call_refused")
        for line in self.router.log + self.worker.log:
            for secret in SECRETS:
                self.assertNotIn(secret, line)


class Rotation(unittest.TestCase):
    def setUp(self):
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory(prefix="millrace-tls-")))
        self.ca = Authority(self.folder)
        self.issue()
        self.tokens = self.folder / "tokens"
        self.tokens.write_text(CLIENT_TOKEN + "\n")
        self.worker = Process("millrace-worker", "--threads=1", "--kv_memory=32MiB", *tls_flags(self.worker_files))
        self.addCleanup(self.worker.stop)
        self.router = Process("millrace-router", f"--workers={self.worker.address}", f"--tokens={self.tokens}",
                              *tls_flags(self.router_files, "workers_tls"), *tls_flags(self.serving, with_ca=False))
        self.addCleanup(self.router.stop)
        self.router.address  # noqa: B018  waits

    def issue(self):
        self.worker_files = self.ca.issue("worker", uris=[WORKER], hosts=["worker.test"])
        self.router_files = self.ca.issue("router", uris=[ROUTER])
        self.serving = self.ca.issue("serving", hosts=["localhost", "worker.test"])

    def shown(self, address):
        """The serial number of the certificate that a new connection to `address` gets."""
        host, port = address.rsplit(":", 1)
        return serial_of(ssl.get_server_certificate((host, int(port)), timeout=TIMEOUT_S).encode())

    def test_new_certificates_come_without_a_stream_lost(self):
        lengths, failures, stop, under_load = [], [], threading.Event(), threading.Barrier(CLIENTS + 1)
        self.addCleanup(stop.set)

        def load(seed):
            with channel(self.router.address, self.ca.file, token=CLIENT_TOKEN) as to:
                stub = inference_pb2_grpc.InferenceServiceStub(to)
                under_load.wait(TIMEOUT_S)
                while not stop.is_set():
                    try:
                        pieces = stub.Generate(request(tokens=STREAM_TOKENS, seed=seed), timeout=TIMEOUT_S)
                        lengths.append(sum(len(piece.token_ids) for piece in pieces))
                    except grpc.RpcError as error:
                        failures.append(error)

        threads = [threading.Thread(target=load, args=(seed,)) for seed in range(CLIENTS)]
        for thread in threads:
            thread.start()
        under_load.wait(TIMEOUT_S)
        old = self.shown(self.router.address), self.shown(self.worker.address)
        before = len(lengths)
        self.issue()
        self.router.wait_for(r" certificate of=serving", 2)
        self.router.wait_for(r" certificate of=workers", 2)
        self.worker.wait_for(r" certificate of=serving", 2)
        wanted = tuple(serial_of(files.certificate.read_bytes()) for files in (self.serving, self.worker_files))
        until = time.monotonic() + TIMEOUT_S
        while (self.shown(self.router.address), self.shown(self.worker.address)) != wanted and time.monotonic() < until:
            time.sleep(0.1)  # gRPC looks at the files by itself
        self.assertEqual((self.shown(self.router.address), self.shown(self.worker.address)), wanted)
        self.assertNotEqual(old, wanted)
        self.assertGreater(len(lengths), before)
        stop.set()
        for thread in threads:
            thread.join()
        self.assertEqual(failures, [])
        self.assertEqual(set(lengths), {STREAM_TOKENS})
        self.assertEqual(self.router.lines("worker_lost|worker_unreachable"), [])
        print(f"certificates of router and worker changed under {CLIENTS} clients: {len(lengths)} streams, {len(failures)} lost")
        # The new ones are good for a connection between the two.
        successor = Process("millrace-router", f"--workers={self.worker.address}", *tls_flags(self.router_files, "workers_tls"))
        self.addCleanup(successor.stop)
        successor.address  # noqa: B018  waits

    def test_a_lost_worker_costs_no_stream(self):
        other = Process("millrace-worker", "--threads=1", "--kv_memory=32MiB", *tls_flags(self.worker_files))
        self.addCleanup(other.stop)
        router = Process("millrace-router", f"--workers={self.worker.address},{other.address}",
                         *tls_flags(self.router_files, "workers_tls"), *tls_flags(self.serving, with_ca=False))
        self.addCleanup(router.stop)
        router.address  # noqa: B018  waits
        router.wait_for("worker_ready", 2)
        with channel(router.address, self.ca.file) as to:
            stub = inference_pb2_grpc.InferenceServiceStub(to)
            streams = [stub.Generate(request(tokens=STREAM_TOKENS, seed=seed), timeout=TIMEOUT_S) for seed in range(2 * CLIENTS)]
            lengths = [len(next(stream).token_ids) for stream in streams]
            other.process.kill()
            for i, stream in enumerate(streams):
                lengths[i] += sum(len(piece.token_ids) for piece in stream)
        self.assertEqual(lengths, [STREAM_TOKENS] * len(streams))
        router.wait_for("worker_lost")

    def test_tokens_rotate(self):
        def code(token):
            with channel(self.router.address, self.ca.file, token=token) as to:
                try:
                    inference_pb2_grpc.InferenceServiceStub(to).ListModels(pb.ListModelsRequest(), timeout=TIMEOUT_S)
                except grpc.RpcError as error:
                    return error.code()
                return grpc.StatusCode.OK

        def replace(text):
            fresh = self.folder / "fresh"
            fresh.write_text(text)
            os.replace(fresh, self.tokens)

        new = "new-" + "d" * 20
        replace(f"{CLIENT_TOKEN}\n{new}\n")
        self.router.wait_for(r" tokens .*count=2")
        self.assertEqual([code(CLIENT_TOKEN), code(new)], [grpc.StatusCode.OK] * 2)
        replace(f"{new}\n")
        self.router.wait_for(r" tokens .*count=1", 2)
        self.assertEqual([code(CLIENT_TOKEN), code(new)], [grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.OK])
        replace("short\n")
        self.assertIn("line 1: the token has 5 bytes", self.router.wait_for("tokens_unusable"))
        self.assertEqual(code(new), grpc.StatusCode.OK)

    def test_a_certificate_and_its_key_may_come_one_after_the_other(self):
        for turn, (first, second) in enumerate((("certificate", "key"), ("key", "certificate")), 1):
            known, fresh = self.shown(self.router.address), self.ca.issue(f"fresh-{first}", hosts=["localhost"])
            expected = serial_of(fresh.certificate.read_bytes())
            os.replace(getattr(fresh, first), getattr(self.serving, first))
            self.router.wait_for("certificate_unusable of=serving .*the private key is not", turn)
            time.sleep(2.5)  # gRPC looks by itself, and would have found half a pair
            self.assertEqual(self.shown(self.router.address), known)
            os.replace(getattr(fresh, second), getattr(self.serving, second))
            self.router.wait_for(r" certificate of=serving", turn + 1)
            deadline = time.monotonic() + TIMEOUT_S
            while self.shown(self.router.address) != expected:
                self.assertLess(time.monotonic(), deadline, "the new pair is not shown")

    def test_a_bad_certificate_is_said_and_changes_nothing(self):
        name = 'millrace_certificate_expiry_timestamp_seconds{certificate="serving"}'
        expiry = self.router.metric(name)[name]
        self.assertAlmostEqual(expiry, time.time() + 7 * 86400, delta=3600)
        good = self.shown(self.router.address)
        self.serving.certificate.write_text("nothing of use")
        self.router.wait_for("certificate_unusable of=serving .*no certificate in PEM form")
        self.ca.issue("serving", hosts=["localhost"], days=-1)
        self.router.wait_for("certificate_unusable of=serving .*has expired")
        self.serving.key.unlink()
        self.router.wait_for("certificate_unusable of=serving .*cannot open")
        time.sleep(2.5)  # gRPC looks by itself, and would have found them
        self.assertEqual(self.shown(self.router.address), good)
        self.assertEqual(self.router.metric(name)[name], expiry)
        self.issue()
        self.router.wait_for(r" certificate of=serving", 2)


class Lone(unittest.TestCase):
    """A router without workers is enough to be refused by."""

    def setUp(self):
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory(prefix="millrace-tls-")))
        self.token, self.wrong = self.folder / "token", self.folder / "wrong"
        self.token.write_text(CLIENT_TOKEN + "\n")
        self.wrong.write_text("no-such-token-at-all\n")

    def router(self, *options):
        router = Process("millrace-router", f"--workers={free_address()}", *options)
        self.addCleanup(router.stop)
        return f"localhost:{router.said('port')}"

    def status(self, address, *options):
        done = subprocess.run([BIN / "millrace", "status", "--router", address, *map(str, options)], capture_output=True, text=True)
        return done.returncode, done.stderr

    def test_clients_can_be_known_by_certificates(self):
        ca, strangers = Authority(self.folder), Authority(self.folder, "strangers")
        serving, client = ca.issue("serving", hosts=["localhost"]), ca.issue("client", uris=["spiffe://millrace/client"])
        stranger = strangers.issue("stranger", uris=["spiffe://millrace/client"])
        address = self.router(*tls_flags(serving))
        self.assertEqual(self.status(address, "--ca", ca.file, "--certificate", client.certificate, "--key", client.key)[0], 0)
        self.assertIn("cannot reach", self.status(address, "--ca", ca.file)[1])
        self.assertIn("cannot reach", self.status(address, "--ca", ca.file, "--certificate", stranger.certificate,
                                                  "--key", stranger.key)[1])
        self.assertIn("cannot reach", self.status(address, "--ca", strangers.file)[1])
        with millrace.Client(address, ca=ca.file, certificate=client.certificate, key=client.key) as known:
            self.assertEqual([model.name for model in known.models(timeout=TIMEOUT_S)], [MODEL.name])
        with millrace.Client(address, ca=ca.file, patience=0.2) as unknown, self.assertRaises(millrace.Unavailable):
            unknown.models(timeout=TIMEOUT_S)

    def test_tokens_guard_a_router_on_loopback_without_tls(self):
        address = self.router(f"--admin_tokens={self.token}")
        self.assertEqual(self.status(address, "--token_file", self.token)[0], 0)
        self.assertIn("UNAUTHENTICATED: a bearer token is required", self.status(address)[1])
        self.assertIn("UNAUTHENTICATED: the bearer token is not valid", self.status(address, "--token_file", self.wrong)[1])
        with millrace.Client(address) as client:  # only administration is guarded
            self.assertEqual(len(client.models(timeout=TIMEOUT_S)), 1)
        address = self.router(f"--tokens={self.token}")
        self.assertIn("PERMISSION_DENIED", self.status(address, "--token_file", self.token)[1])
        with millrace.Client(address, token_file=self.token) as client:
            self.assertEqual(len(client.models(timeout=TIMEOUT_S)), 1)
        with millrace.Client(address, token="no-such-token-at-all") as client, self.assertRaises(millrace.Error) as refusal:
            client.models(timeout=TIMEOUT_S)
        self.assertEqual(refusal.exception.code, grpc.StatusCode.UNAUTHENTICATED)


class Start(unittest.TestCase):
    """What cannot be meant is refused before anything is served."""

    def setUp(self):
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory(prefix="millrace-tls-")))
        self.ca = Authority(self.folder)

    def refusal(self, program, *options):
        done = subprocess.run([str(BIN / program), f"--model={MODEL}", *map(str, options)], capture_output=True, text=True,
                              timeout=TIMEOUT_S)
        self.assertNotEqual(done.returncode, 0)
        return done.stderr

    def test_refused(self):
        good = self.ca.issue("good", uris=[WORKER])
        other = self.ca.issue("other", uris=[WORKER])
        expired = self.ca.issue("expired", uris=[WORKER], days=-1)
        tokens = self.folder / "tokens"
        tokens.write_text("x" * 20)
        workers = "--workers=127.0.0.1:1"
        for said, program, options in (
            ("--unencrypted", "millrace-worker", ["--listen=0.0.0.0:0"]),
            ("--unencrypted", "millrace-router", [workers, "--listen=0.0.0.0:0"]),
            ("--unencrypted_metrics", "millrace-router", [workers, "--metrics_listen=0.0.0.0:0"]),
            ("--workers is 10.0.0.1:1", "millrace-router", ["--workers=10.0.0.1:1", *tls_flags(good)]),
            ("tokens would travel in plaintext", "millrace-router",
             [workers, "--listen=0.0.0.0:0", "--unencrypted", f"--tokens={tokens}"]),
            ("all of them or none", "millrace-worker", tls_flags(good, with_ca=False)),
            ("all of them or none", "millrace-router", [workers, *tls_flags(good, "workers_tls", with_ca=False)]),
            ("has expired", "millrace-worker", tls_flags(expired)),
            ("the private key is not the certificate's", "millrace-worker",
             [f"--tls_certificate={good.certificate}", f"--tls_key={other.key}", f"--tls_ca={good.ca}"]),
            ("no certificate in PEM form", "millrace-worker",
             [f"--tls_certificate={good.key}", f"--tls_key={good.key}", f"--tls_ca={good.ca}"]),
            ("cannot open", "millrace-router", [workers, "--tokens=/nonexistent"]),
        ):
            with self.subTest(said=said, program=program):
                self.assertIn(said, self.refusal(program, *options))


if __name__ == "__main__":
    unittest.main()

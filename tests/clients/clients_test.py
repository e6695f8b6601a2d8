"""Promises to clients in other languages: Go, Java and Ruby, with the gRPC that Debian has of each and stubs made from the protos.

Opt-in: a language whose compiler or packages are missing is skipped, and that is said. MILLRACE_CLIENTS=install installs them (apt).
Every client does the same (client.go, client.rb, Client.java) and says what it saw, one line each; Python says what is expected.
"""
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import unittest
import urllib.request

sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent / "cluster"))
from processes import FIXTURES, ROOT, Fleet, free_address, millrace  # noqa: E402

HERE = pathlib.Path(__file__).resolve().parent
PROTOS = ("millrace/v1/inference.proto", "grpc/health/v1/health.proto")
JARS = ("grpc-api", "grpc-context", "grpc-core", "grpc-netty", "grpc-protobuf", "grpc-protobuf-lite", "grpc-stub", "guava", "perfmark-api",
        "protobuf", "geronimo-annotation-1.3-spec", "netty-buffer", "netty-codec", "netty-codec-http", "netty-codec-http2", "netty-common",
        "netty-handler", "netty-handler-proxy", "netty-codec-socks", "netty-resolver", "netty-transport", "netty-transport-native-epoll",
        "netty-transport-native-unix-common")
PACKAGES = ("golang-1.19-go golang-google-grpc-dev golang-google-protobuf-dev protoc-gen-go-grpc ruby-grpc protobuf-compiler-grpc "
            "default-jdk-headless libgrpc-java libnetty-java libprotobuf-java libperfmark-java libgeronimo-annotation-1.3-spec-java "
            "protobuf-compiler-grpc-java-plugin")
GO = "/usr/lib/go-1.19/bin/go"
KEEPALIVES_S = 25  # two pings of a client that sends one every 10 s
FLIP_S = 0.2
TIMEOUT_S = 120


def run(*command, **options):
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, **options)
    if done.returncode:
        raise AssertionError(f"{' '.join(map(str, command))}:\n{done.stdout}{done.stderr}")


def protoc(*options):
    run("protoc", f"-I{ROOT / 'protos'}", *options)


def build_go(folder):
    """Debian's protoc-gen-go knows no optional fields; the one in its sources does."""
    environment = os.environ | {"GO111MODULE": "off", "GOPATH": f"{folder}:/usr/share/gocode", "GOCACHE": str(folder / "cache"), "GOFLAGS": ""}
    run(GO, "build", "-o", folder / "protoc-gen-go", "google.golang.org/protobuf/cmd/protoc-gen-go", env=environment)
    (folder / "src").mkdir()
    protoc(f"--plugin=protoc-gen-go={folder / 'protoc-gen-go'}", f"--go_out={folder / 'src'}", f"--go-grpc_out={folder / 'src'}",
           f"--go_opt=M{PROTOS[0]}=millrace/v1", f"--go-grpc_opt=M{PROTOS[0]}=millrace/v1", PROTOS[0])
    run(GO, "build", "-o", folder / "client", HERE / "client.go", env=environment)
    return [folder / "client"]


def build_ruby(folder):
    protoc(f"--plugin=protoc-gen-grpc={shutil.which('grpc_ruby_plugin')}", f"--ruby_out={folder}", f"--grpc_out={folder}", *PROTOS)
    return ["ruby", "-I", folder, HERE / "client.rb"]


def build_java(folder):
    protoc(f"--plugin=protoc-gen-grpc-java={shutil.which('grpc_java_plugin')}", f"--java_out={folder}", f"--grpc-java_out={folder}", *PROTOS)
    classes = ":".join([str(folder), *(f"/usr/share/java/{jar}.jar" for jar in JARS)])
    run("javac", "-nowarn", "-cp", classes, "-d", folder, HERE / "Client.java", *folder.rglob("*.java"))
    return ["java", "-cp", classes, "Client"]


def missing(language):
    wanted = {"Go": [GO, "protoc-gen-go-grpc", "/usr/share/gocode/src/google.golang.org/protobuf", "/usr/share/gocode/src/google.golang.org/grpc"],
              "Ruby": ["ruby", "grpc_ruby_plugin"],
              "Java": ["javac", "grpc_java_plugin", *(f"/usr/share/java/{jar}.jar" for jar in JARS)]}[language]
    return [what for what in ["protoc", *wanted] if not (os.path.exists(what) if what.startswith("/") else shutil.which(what))]


BUILDS = {"Go": build_go, "Ruby": build_ruby, "Java": build_java}


class Client:
    """One of them, running. `lines` is what it has said."""

    def __init__(self, command, address):
        self.lines, self._changed, self.ended = [], threading.Condition(), False
        self._process = subprocess.Popen([*map(str, command), address], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self):
        for line in self._process.stdout:
            with self._changed:
                self.lines.append(line.strip())
                self._changed.notify_all()
        with self._changed:
            self.ended = True
            self._changed.notify_all()

    def wait_for(self, condition):
        with self._changed:
            assert self._changed.wait_for(lambda: condition() or self.ended, TIMEOUT_S) and condition(), "\n".join(self.lines)

    def end(self):
        self._process.kill()
        self._process.wait()
        self._reader.join()
        self._process.stdout.close()


class Clients(unittest.TestCase):
    def test_all_of_them_see_what_python_sees(self):
        if os.environ.get("MILLRACE_CLIENTS") == "install":
            run("apt-get", "install", "-y", "-qq", "--no-install-recommends", *PACKAGES.split())
        there = [language for language in BUILDS if not missing(language)]
        for language in BUILDS:
            if missing(language):
                print(f"SKIPPED: {language}; missing: {', '.join(missing(language))}")
        if not there:
            self.skipTest("no compiler of another language is here")
        folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory(prefix="millrace-clients-")))
        commands = {}
        for language in there:
            (folder / language).mkdir()
            commands[language] = BUILDS[language](folder / language)

        fleet = self.enterContext(Fleet(FIXTURES / "qwen3-tiny-untied"))
        fleet.add_workers(1, "--kv_memory=32MiB")
        metrics = free_address()
        router = fleet.start_router("127.0.0.1:0", f"--metrics_listen={metrics}")
        with millrace.Client(router.address) as python:
            answer = python.generate([5, 6, 7, 8], max_tokens=16, temperature=0, ignore_eos=True)
            answer.read()
        tokens = ",".join(map(str, answer.token_ids[0]))
        service = "millrace.v1.InferenceService"
        expected = ["watch SERVING", "health SERVING", f"reflection {service}", f"generate OK {tokens}", "status INVALID_ARGUMENT",
                    "status NOT_FOUND", "status OUT_OF_RANGE", "deadline DEADLINE_EXCEEDED", "cancel CANCELLED", "done"]

        begin = time.monotonic()
        clients = {language: Client(command, router.address) for language, command in commands.items()}
        for client in clients.values():
            self.addCleanup(client.end)
        for language, client in clients.items():
            client.wait_for(lambda client=client: "done" in client.lines)
            self.assertEqual(client.lines, expected, language)

        def page():
            with urllib.request.urlopen(f"http://{metrics}/metrics", timeout=TIMEOUT_S) as answer:
                return answer.read().decode()

        until = time.monotonic() + TIMEOUT_S
        while "\nmillrace_open_calls 0\n" not in page() and time.monotonic() < until:
            pass  # a scrape takes its time
        self.assertIn("\nmillrace_open_calls 0\n", page())  # what was cancelled or too late is gone
        for client in clients.values():  # who pings every 10 s is not sent away
            with client._changed:
                client._changed.wait_for(lambda client=client: client.ended, max(0, begin + KEEPALIVES_S - time.monotonic()))
            self.assertEqual(client.lines, expected)
        told = time.time()
        stopping = threading.Thread(target=router.stop)
        stopping.start()
        for language, client in clients.items():
            client.wait_for(lambda client=client: len(client.lines) > len(expected))
            word, status, when = client.lines[-1].split()
            self.assertEqual((word, status), ("watch", "NOT_SERVING"), language)
            took = int(when) / 1000 - told
            print(f"{language}: {len(expected)} checks; told of the drain after {1000 * took:.0f} ms")
            self.assertLess(took, FLIP_S, language)
        stopping.join()


if __name__ == "__main__":
    unittest.main()

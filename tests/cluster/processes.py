"""Workers and routers as processes of their own, to be killed one by one, and the Python client as pip installs it.

MILLRACE_BIN_DIR names the binaries (default build/cpu/bin). Nothing outlives the `with` block.
"""
import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
BIN = pathlib.Path(os.environ.get("MILLRACE_BIN_DIR", ROOT / "build" / "cpu" / "bin"))
FIXTURES = ROOT / "tests" / "fixtures"


def _install_client():
    target = tempfile.TemporaryDirectory(prefix="millrace-client-")
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-build-isolation", "--no-deps",
                    "--no-index", "--target", target.name, str(ROOT / "clients" / "python")], check=True)
    sys.path.insert(0, target.name)
    return target


_installed = _install_client()
import grpc  # noqa: E402
import millrace  # noqa: E402
from millrace.v1 import admin_pb2, admin_pb2_grpc, inference_pb2  # noqa: E402,F401


def free_address():
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


class Process:
    """One of the binaries; `address` waits until it serves."""

    def __init__(self, binary, *options):
        self._process = subprocess.Popen([str(BIN / binary), *map(str, options)], stdout=subprocess.PIPE, text=True)
        self._address = None

    @property
    def address(self):
        if self._address is None:
            line = self._process.stdout.readline().split()
            if len(line) != 2 or line[0] != "ready":
                raise RuntimeError(f"{self._process.args[0]} said {line} instead of `ready HOST:PORT`")
            self._address = line[1]
        return self._address

    def kill(self):
        self._process.kill()
        self._process.wait()

    def stop(self):
        """Ends it as an operator does; returns the exit code."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        code = self._process.wait(timeout=60)
        self._process.stdout.close()
        return code


class Fleet(contextlib.ExitStack):
    """Workers and routers of one model; all end with it."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.workers = []

    def _start(self, binary, *options):
        process = Process(binary, f"--model={self.model}", *options)
        self.callback(process.stop)
        return process

    def add_workers(self, count, *options):
        started = [self._start("millrace-worker", "--listen=127.0.0.1:0", "--threads=1", *options) for _ in range(count)]
        self.workers += [worker.address for worker in started]
        return started

    def start_router(self, address="127.0.0.1:0", *options):
        """In front of all workers; the later it starts, the higher its epoch."""
        return self._start("millrace-router", f"--listen={address}", f"--workers={','.join(self.workers)}", *options)


def status(address):
    with grpc.insecure_channel(address) as channel:
        return admin_pb2_grpc.AdminServiceStub(channel).GetStatus(admin_pb2.GetStatusRequest(), timeout=10)

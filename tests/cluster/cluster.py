"""A Millrace cluster of this machine's binaries for a test, and client stubs made from the protos alone.

MILLRACE_BIN_DIR names the binaries (default build/cpu/bin). Nothing outlives the `with` block.
"""
import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import tempfile

import grpc
from grpc_tools import protoc

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
BIN = pathlib.Path(os.environ.get("MILLRACE_BIN_DIR", ROOT / "build" / "cpu" / "bin"))
FIXTURES = ROOT / "tests" / "fixtures"


def _make_stubs():
    out = tempfile.TemporaryDirectory(prefix="millrace-stubs-")
    protos = ["millrace/v1/inference.proto", "millrace/v1/admin.proto"]
    if protoc.main(["protoc", f"-I{ROOT / 'protos'}", f"--python_out={out.name}", f"--grpc_python_out={out.name}", *protos]):
        raise RuntimeError("protoc failed")
    sys.path.insert(0, out.name)
    return out


_stubs = _make_stubs()
from millrace.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc  # noqa: E402,F401


class Cluster:
    """`millrace up` in the background. `address` is the router's."""

    def __init__(self, model, *options):
        self.process = subprocess.Popen([str(BIN / "millrace"), "up", "--model", str(model), "--port", "0", *map(str, options)],
                                        stdout=subprocess.PIPE, text=True)
        line = self.process.stdout.readline().split()
        if len(line) != 2 or line[0] != "ready":
            self.process.kill()
            raise RuntimeError(f"`millrace up` said {line} instead of `ready HOST:PORT`")
        self.address = line[1]
        self.channel = grpc.insecure_channel(self.address)
        self.inference = inference_pb2_grpc.InferenceServiceStub(self.channel)
        self.admin = admin_pb2_grpc.AdminServiceStub(self.channel)

    def status(self):
        return self.admin.GetStatus(admin_pb2.GetStatusRequest())

    def stop(self):
        """Ends the cluster as an operator does; returns the exit code."""
        self.channel.close()
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(timeout=60)
        self.process.stdout.close()
        return code


@contextlib.contextmanager
def cluster(model, *options):
    running = Cluster(model, *options)
    try:
        yield running
    finally:
        if running.process.poll() is None:
            running.stop()

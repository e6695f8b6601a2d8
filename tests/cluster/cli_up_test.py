"""Promises of `millrace up` with the real binaries: ready means ready, its end is everybody's end, a lost worker comes back.

MILLRACE_BIN_DIR names the binaries (default build/cpu/bin).
"""
import json
import os
import pathlib
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
MILLRACE = pathlib.Path(os.environ.get("MILLRACE_BIN_DIR", ROOT / "build" / "cpu" / "bin")) / "millrace"
MODEL = ROOT / "tests" / "fixtures" / "qwen3-tiny-untied"
TIMEOUT_S = 120


class Up:
    """`millrace up`; `err` collects its stderr."""

    def __init__(self, *options, model=MODEL):
        command = [str(MILLRACE), "up", "--model", str(model), "--kv_memory", "16MiB", "--threads", "1", *map(str, options)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.err = []
        self.changed = threading.Condition()
        self.reader = threading.Thread(target=self._read)
        self.reader.start()

    def _read(self):
        for line in self.process.stderr:
            with self.changed:
                self.err.append(line)
                self.changed.notify_all()

    def ready(self):
        line = self.process.stdout.readline().split()
        if len(line) != 2 or line[0] != "ready":
            raise AssertionError(f"{line} instead of `ready HOST:PORT`: {''.join(self.err)}")
        return line[1]

    def await_err(self, text):
        with self.changed:
            if not self.changed.wait_for(lambda: any(text in line for line in self.err), TIMEOUT_S):
                raise AssertionError(f"no '{text}' on stderr: {''.join(self.err)}")

    def children(self):
        """Pids by program name."""
        found = {}
        for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
            try:
                name, rest = stat.read_text().split("(", 1)[1].rsplit(")", 1)
            except OSError:
                continue
            if int(rest.split()[1]) == self.process.pid:
                found.setdefault(name, []).append(int(stat.parent.name))
        return found

    def end(self, number=signal.SIGTERM):
        self.process.send_signal(number)
        return self.wait()

    def wait(self):
        code = self.process.wait(timeout=TIMEOUT_S)
        self.reader.join()
        self.process.stdout.close()
        self.process.stderr.close()
        return code


def complete(address, *requests, concurrency=1):
    lines = "".join(json.dumps(request) + "\n" for request in requests)
    done = subprocess.run([str(MILLRACE), "complete", "--router", address, "--jsonl", "--concurrency", str(concurrency)],
                          input=lines, capture_output=True, text=True, timeout=TIMEOUT_S)
    return [json.loads(line) for line in done.stdout.splitlines()]


def await_gone(test, pids):
    """Their ends are awaited through pidfds, since orphans are not ours to wait for."""
    for pid in pids:
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        ended = select.poll()
        ended.register(handle, select.POLLIN)
        left = ended.poll(20000)
        os.close(handle)
        test.assertTrue(left, f"{pid} still runs")


@unittest.skipUnless(MILLRACE.with_name("millrace-worker").exists() and MILLRACE.with_name("millrace-router").exists(), "not built")
class UpTest(unittest.TestCase):
    def test_serves_golden_tokens_and_ends_on_sigterm_without_orphans(self):
        up = Up("--port", 0, "--workers", 2)
        address = up.ready()
        cases = json.loads((MODEL / "golden.json").read_text())["cases"]
        requests = [{"token_ids": case["prompt"], "temperature": 0, "ignore_eos": True, "max_tokens": len(case["greedy"])} for case in cases]
        answers = complete(address, *requests, concurrency=4)
        self.assertEqual([answer.get("token_ids", answer) for answer in answers], [case["greedy"] for case in cases])
        status = json.loads(subprocess.run([str(MILLRACE), "status", "--router", address, "--json"], capture_output=True, text=True).stdout)
        self.assertEqual([worker["state"] for worker in status["workers"]], ["STATE_READY"] * 2)
        children = up.children()
        self.assertEqual({name: len(pids) for name, pids in children.items()}, {"millrace-worker": 2, "millrace-router": 1})
        self.assertEqual(up.end(), 0)
        await_gone(self, sum(children.values(), []))

    def test_leaves_no_orphan_when_it_is_killed(self):
        up = Up("--port", 0)
        up.ready()
        pids = sum(up.children().values(), [])
        self.assertEqual(len(pids), 2)
        self.assertEqual(up.end(signal.SIGKILL), -signal.SIGKILL)
        await_gone(self, pids)

    def test_starts_a_lost_worker_again(self):
        up = Up("--port", 0)
        address = up.ready()
        os.kill(up.children()["millrace-worker"][0], signal.SIGKILL)
        up.await_err("worker-0 ended with signal 9; starting it again")
        deadline = time.monotonic() + TIMEOUT_S
        answer = {"error": "UNAVAILABLE"}
        while answer.get("error") == "UNAVAILABLE":
            self.assertLess(time.monotonic(), deadline)
            answer = complete(address, {"token_ids": [5, 6, 7], "max_tokens": 3, "ignore_eos": True})[0]
        self.assertEqual(len(answer["token_ids"]), 3, answer)
        self.assertEqual(up.end(signal.SIGINT), 0)

    def test_a_model_that_cannot_be_loaded_ends_it_with_the_reason(self):
        with tempfile.TemporaryDirectory() as folder:
            shutil.copy(MODEL / "tokenizer.json", folder)
            (pathlib.Path(folder) / "config.json").write_text("{}")
            up = Up("--port", 0, "--workers", 2, model=folder)
            self.assertEqual(up.wait(), 1)
            self.assertIn("did not start", "".join(up.err))
            self.assertIn("config.json", "".join(up.err))

    def test_a_taken_port_is_named(self):
        with socket.create_server(("127.0.0.1", 0)) as other:
            up = Up("--port", other.getsockname()[1])
            self.assertEqual(up.wait(), 1)
            self.assertIn(f"port {other.getsockname()[1]} of 127.0.0.1 is taken", "".join(up.err))

    def test_logs_go_to_their_folder(self):
        with tempfile.TemporaryDirectory() as folder:
            up = Up("--port", 0, "--log_dir", folder)
            up.ready()
            self.assertEqual(up.end(), 0)
            self.assertEqual(sorted(path.name for path in pathlib.Path(folder).iterdir()), ["router.log", "worker-0.log"])
            self.assertFalse([line for line in up.err if line.startswith("[")])


if __name__ == "__main__":
    unittest.main(verbosity=2)

"""A router and workers on loopback, and a real Prometheus (Debian's) that scrapes them with the chart's rules.

Rules do not wait and look back seconds instead of minutes (10 s for 5 m), so that a test need not last as long as an outage.
Nothing outlives the `with` block. MILLRACE_BIN_DIR names the programs (default build/cpu/bin)."""

import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
import urllib.parse
import urllib.request

import yaml

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
BIN = pathlib.Path(os.environ.get("MILLRACE_BIN_DIR", ROOT / "build" / "cpu" / "bin"))
MODEL = ROOT / "tests" / "fixtures" / "qwen3-tiny-untied"
RULES = ROOT / "deploy" / "helm" / "millrace" / "alerts.yaml"
PROMETHEUS = shutil.which("prometheus")
WINDOW_S, PATIENCE_S = 10, 90


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def quick(rules):
    """The rules with short memories."""
    for group in rules["groups"]:
        for rule in group["rules"]:
            rule["expr"] = re.sub(r"\[(\d+)m\]", lambda found: f"[{2 * int(found.group(1))}s]", rule["expr"])
            if "for" in rule:
                rule["for"] = "0s"
    return rules


class Process:
    """One program until its end; `ready` is its first line on stdout."""

    def __init__(self, *command):
        self.process = subprocess.Popen(
            list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def ready(self):
        line = self.process.stdout.readline()
        if not line.startswith("ready "):
            raise AssertionError(f"{self.process.args}: {line!r} instead of `ready HOST:PORT`")

    def kill(self, number=signal.SIGKILL):
        self.process.send_signal(number)

    def end(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait()
        if self.process.stdout:
            self.process.stdout.close()


class WatchedFleet:
    def __init__(self, workers=2, router_flags=(), worker_flags=("--kv_memory=16MiB", "--max_slots=16")):
        self.folder = tempfile.TemporaryDirectory()
        self.worker_flags = worker_flags
        self.clients = []
        self.ports = [(free_port(), free_port()) for _ in range(workers)]
        self.workers = [self.start_worker(i) for i in range(workers)]
        port, metrics = free_port(), free_port()
        self.address = f"127.0.0.1:{port}"
        self.router = Process(
            BIN / "millrace-router",
            f"--model={MODEL}",
            f"--listen={self.address}",
            f"--metrics_listen=127.0.0.1:{metrics}",
            "--workers=" + ",".join(f"127.0.0.1:{grpc}" for grpc, _ in self.ports),
            "--drain_ms=0",
            *router_flags,
        )
        self.router.ready()
        self.web = f"127.0.0.1:{free_port()}"
        self.prometheus = self.start_prometheus(metrics)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for client in self.clients:
            client.kill()  # its load is meant to outlast the test
        for process in [self.prometheus, self.router, *self.workers]:
            process.end()
        self.folder.cleanup()

    def start_worker(self, i):
        grpc, metrics = self.ports[i]
        worker = Process(
            BIN / "millrace-worker",
            f"--model={MODEL}",
            f"--listen=127.0.0.1:{grpc}",
            f"--metrics_listen=127.0.0.1:{metrics}",
            f"--worker_id=w-{i}",
            "--threads=1",
            *self.worker_flags,
        )
        worker.ready()
        return worker

    def restart_worker(self, i):
        self.workers[i].end()
        self.workers[i] = self.start_worker(i)

    def start_prometheus(self, router_metrics):
        folder = pathlib.Path(self.folder.name)
        (folder / "alerts.yaml").write_text(
            yaml.safe_dump(quick(yaml.safe_load(RULES.read_text(encoding="utf-8")))), encoding="utf-8"
        )

        def job(name, targets):
            return {
                "job_name": name,
                "static_configs": [
                    {"targets": [target], "labels": {"fleet": "local", "namespace": "test", "pod": pod}}
                    for pod, target in targets
                ],
            }

        config = {
            "global": {"scrape_interval": "500ms", "scrape_timeout": "400ms", "evaluation_interval": "500ms"},
            "rule_files": ["alerts.yaml"],
            "scrape_configs": [
                job("millrace-router", [("r", f"127.0.0.1:{router_metrics}")]),
                job(
                    "millrace-worker", [(f"w-{i}", f"127.0.0.1:{metrics}") for i, (_, metrics) in enumerate(self.ports)]
                ),
            ],
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
        return Process(
            PROMETHEUS,
            f"--config.file={folder}/prometheus.yml",
            f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address={self.web}",
            "--log.level=error",
        )

    def api(self, path, **parameters):
        with urllib.request.urlopen(
            f"http://{self.web}/api/v1/{path}?{urllib.parse.urlencode(parameters)}", timeout=20
        ) as answer:
            return json.load(answer)["data"]

    def query(self, expression):
        return self.api("query", query=expression)["result"]

    def value(self, expression):
        return sum(float(sample["value"][1]) for sample in self.query(expression))

    def firing(self):
        """Names of the alerts that fire; what they say must be whole."""
        found = [alert for alert in self.api("alerts")["alerts"] if alert["state"] == "firing"]
        for alert in found:
            for text in alert["annotations"].values():
                if re.search(r"<error|<no value>|\{\{|\(\)", text):
                    raise AssertionError(f"{alert['labels']['alertname']}: {text}")
        return {alert["labels"]["alertname"] for alert in found}

    def wait_for(self, what, condition):
        """Until `condition` holds, by Prometheus' own pace; returns how long it took."""
        start, pause = time.monotonic(), threading.Event()
        while time.monotonic() - start < PATIENCE_S:
            try:
                if condition():
                    return time.monotonic() - start
            except OSError:
                pass
            pause.wait(0.25)  # what is waited for is another process's clock
        raise AssertionError(f"not within {PATIENCE_S} s: {what}")

    def wait_until_scraped(self):
        self.wait_for("a scrape of every process", lambda: self.value("up") == 1 + len(self.workers))

    def bench(self, *options):
        done = subprocess.run(
            [BIN / "millrace", "bench", "--router", self.address, "--json", "-", *map(str, options)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise AssertionError(done.stderr)
        return json.loads(done.stdout)

    def ask(self, *requests, concurrency=1):
        """Answers of `millrace complete --jsonl`, which are errors where the call failed."""
        lines = "".join(json.dumps(request) + "\n" for request in requests)
        client = subprocess.Popen(
            [BIN / "millrace", "complete", "--router", self.address, "--jsonl", "--concurrency", str(concurrency)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.clients.append(client)
        answers, _ = client.communicate(lines)
        return [json.loads(line) for line in answers.splitlines()]

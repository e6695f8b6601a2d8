"""Promises about the chart's pods as they run: a kubelet by hand starts the containers of the rendered chart, as it says.

Image, command, arguments, environment, user, capabilities, read-only root and memory limit are taken from the manifests;
probes are made as a kubelet makes them. Pods share one network without a way out, in which a name server knows what a
cluster's would. Needs root, buildah, podman and runc; skipped, and said, without them. MILLRACE_BIN_DIR names the
programs (default build/cpu/bin)."""

import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

from chart import CHART, FLEET, NAMESPACE, of_kind, pod_of, render
sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent / "cluster"))
from authority import Authority  # noqa: E402
from container_test import BIN, IMAGE, MISSING, MODEL, ROOT, podman, run

PROBE = """
import sys, grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
stub = health_pb2_grpc.HealthStub(grpc.insecure_channel(sys.argv[1]))
try:
    print(stub.Check(health_pb2.HealthCheckRequest(service=sys.argv[2]), timeout=float(sys.argv[3])).status)
except grpc.RpcError as error:
    print(error.code().name)
"""
# Answers A with 127.0.0.1 for the names in argv, nothing for AAAA, NXDOMAIN for other names.
NAMES = """
import socket, sys
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind(("127.0.0.1", 53))
print("listening", flush=True)
while True:
    query, sender = server.recvfrom(512)
    end, labels = 12, []
    while query[end]:
        labels.append(query[end + 1 : end + 1 + query[end]].decode().lower())
        end += 1 + query[end]
    known, is_a = ".".join(labels) in sys.argv[1:], query[end + 2] == 1
    answer = b"\\xc0\\x0c\\0\\1\\0\\1\\0\\0\\0\\5\\0\\4\\x7f\\0\\0\\1" if known and is_a else b""
    flags = b"\\x81\\x80" if known else b"\\x81\\x83"
    header = query[:2] + flags + b"\\0\\1\\0" + bytes([len(answer) > 0]) + b"\\0\\0\\0\\0"
    server.sendto(header + query[12 : end + 5] + answer, sender)
"""
SERVING = "1"
FETCH = """
import sys, urllib.request
print(urllib.request.urlopen(f"http://127.0.0.1:{sys.argv[1]}/metrics", timeout=5).read().decode())
"""
GRACE = 12  # drainSeconds and 10
BYTES = {"Ki": "k", "Mi": "m", "Gi": "g"}


@unittest.skipIf(MISSING, f"not here: {', '.join(MISSING)}")
class Pods(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        run(ROOT / "deploy" / "container" / "build.sh", BIN, IMAGE)

    def render(self, values, discovery):
        repository, tag = IMAGE.rsplit(":", 1)
        options = [f"image.repository={repository},image.tag={tag},router.drainSeconds=2,worker.drainSeconds=2"]
        options.append(f"worker.flags.kv_memory=16MiB,worker.flags.threads=1,worker.discovery={discovery}")
        # In one network the two cannot have the same ports.
        self.objects = {
            component: render(
                CHART / "values" / values, "--set", ",".join([*options, f"metrics.port={port},probes.port={port + 1}"])
            )
            for component, port in (("router", 9464), ("worker", 9564), ("test", 9464))
        }

    def start(self, component, name, *network):
        _, spec = pod_of(self.objects[component], component)
        container = spec["containers"][0]
        security = spec["securityContext"] | container["securityContext"]
        environment = {}
        for variable in container.get("env", []):
            source = variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
            environment[variable["name"]] = name if source == "metadata.name" else variable["value"]

        def filled(text):
            return re.sub(r"\$\((\w+)\)", lambda found: environment[found.group(1)], text)

        number, unit = re.fullmatch(r"(\d+)(\w+)", container["resources"]["limits"]["memory"]).groups()
        options = ["--detach", "--name", name, *network, "--memory", number + BYTES[unit], "--pids-limit", "200"]
        options += ["--ulimit", "nofile=1024:1024", "--ulimit", "nproc=4096:4096"]
        options += ["--user", f"{security['runAsUser']}:{security['runAsGroup']}"]
        options += ["--cap-drop", *security["capabilities"]["drop"], "--security-opt", "no-new-privileges"]
        options += ["--read-only", "--read-only-tmpfs=false"] if security["readOnlyRootFilesystem"] else []
        volumes = {volume["name"]: volume for volume in spec.get("volumes", [])}
        for mount in container.get("volumeMounts", []):
            secret = volumes[mount["name"]].get("secret", {}).get("secretName")
            options += ["--volume", f"{self.secrets / secret if secret else MODEL}:{mount['mountPath']}:ro"]
        for key, value in environment.items():
            options += ["--env", f"{key}={value}"]
        command, arguments = container["command"], [filled(argument) for argument in container.get("args", [])]
        podman("run", *options, "--entrypoint", command[0], container["image"], *command[1:], *arguments)
        self.addCleanup(podman, "rm", "--force", "--time", "0", name, check=False)
        return container

    def inside(self, name, *command):
        """A command of this machine in the network of a container."""
        pid = podman("inspect", "--format", "{{.State.Pid}}", name).stdout.strip()
        return run("nsenter", "--net", "--target", pid, *command, check=False).stdout.strip()

    def probe(self, name, container, kind):
        wanted = container[kind]["grpc"]
        address = f"127.0.0.1:{wanted['port']}"
        return self.inside(
            name,
            sys.executable,
            "-c",
            PROBE,
            address,
            wanted.get("service", ""),
            str(container[kind]["timeoutSeconds"]),
        )

    def await_probe(self, name, container, kind):
        answer = None
        for _ in range(60):  # each is a new process that waits for its answer
            answer = self.probe(name, container, kind)
            if answer == SERVING:
                return
        raise AssertionError(f"{name}: {kind} says {answer}: {podman('logs', name, check=False).stderr[-2000:]}")

    def start_names(self, name, *names):
        """A cluster's name server in the network of a container."""
        pid = podman("inspect", "--format", "{{.State.Pid}}", name).stdout.strip()
        domain = f"{NAMESPACE}.svc.cluster.local"
        command = [
            "nsenter",
            "--net",
            "--target",
            pid,
            sys.executable,
            "-c",
            NAMES,
            *(f"{one}.{domain}" for one in names),
        ]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.addCleanup(server.stdout.close)
        self.addCleanup(server.wait)
        self.addCleanup(server.kill)
        self.assertEqual(server.stdout.readline(), "listening\n")

    def issue(self):
        """The Secrets that values/secured.yaml names, as the kubelet would mount them."""
        authority = Authority(self.secrets)
        service = f"{FLEET}-router"
        for secret, names in (
            ("millrace-router-tls", {"hosts": [service]}),
            ("millrace-workers-tls", {"uris": ["spiffe://millrace/router"]}),
            ("millrace-worker-tls", {"uris": ["spiffe://millrace/worker"]}),
        ):
            files = authority.issue(secret, **names)
            for key, path in (("tls.crt", files.certificate), ("tls.key", files.key), ("ca.crt", files.ca)):
                self.write(secret, key, path.read_bytes())
        self.write("millrace-tokens", "tokens", b"0123456789abcdef a-tenant\n")
        self.write("millrace-tokens", "admin_tokens", b"fedcba9876543210\n")

    def write(self, secret, key, content):
        path = self.secrets / secret / key
        path.parent.mkdir(exist_ok=True)
        path.parent.chmod(0o755)
        path.write_bytes(content)
        path.chmod(0o444)

    def test_they_start_become_ready_answer_show_metrics_and_end(self):
        for values, discovery in (("laptop.yaml", "static"), ("laptop.yaml", "dns"), ("secured.yaml", "dns")):
            with self.subTest(values, discovery=discovery):
                self.render(values, discovery)
                self.live()
            self.doCleanups()

    def live(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        resolver = pathlib.Path(folder.name) / "resolv.conf"
        search = f"search {NAMESPACE}.svc.cluster.local svc.cluster.local cluster.local"
        resolver.write_text(f"{search}\nnameserver 127.0.0.1\noptions ndots:5\n", encoding="utf-8")
        resolver.chmod(0o644)
        pathlib.Path(folder.name).chmod(0o755)
        self.secrets = pathlib.Path(folder.name)
        self.issue()
        names = ["--volume", f"{resolver}:/etc/resolv.conf:ro"]
        workers = of_kind(self.objects["worker"], "StatefulSet")[0]
        worker_name = workers["metadata"]["name"] + "-0"
        router_name = of_kind(self.objects["router"], "Deployment")[0]["metadata"]["name"] + "-1"
        test = pod_of(self.objects["test"], "test")[1]["containers"][0]
        router_service = test["args"][2].split(":")[0]

        worker = self.start("worker", worker_name, "--network", "none", *names)
        service = workers["spec"]["serviceName"]
        self.start_names(worker_name, service, f"{worker_name}.{service}", router_service)
        router = self.start("router", router_name, "--network", f"container:{worker_name}", *names)
        for name, container in ((worker_name, worker), (router_name, router)):
            for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
                self.await_probe(name, container, kind)
        self.start("test", "helm-test", "--network", f"container:{worker_name}", *names)
        self.assertEqual(podman("wait", "helm-test").stdout.strip(), "0", podman("logs", "helm-test").stderr)

        for container in (router, worker):
            metrics = self.inside(worker_name, sys.executable, "-c", FETCH, str(container["ports"][1]["containerPort"]))
            self.assertIn("millrace_build_info", metrics)
        podman("stop", "--time", str(GRACE), router_name)
        self.assertEqual(self.probe(worker_name, worker, "livenessProbe"), SERVING)
        podman("stop", "--time", str(GRACE), worker_name)
        for name in (router_name, worker_name):
            self.assertEqual(podman("inspect", "--format", "{{.State.ExitCode}}", name).stdout.strip(), "0", name)


if __name__ == "__main__":
    if MISSING:
        print(f"SKIPPED: no pod was started here; missing: {', '.join(MISSING)}")
    unittest.main()

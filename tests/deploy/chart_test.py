"""Promises of the Helm chart, rendered by the real helm for every values file and Kubernetes version."""

import re
import unittest

import kubernetes_validate
import yaml

from chart import (
    CHART,
    FLEET,
    NAMESPACE,
    NEWEST,
    OLDEST,
    ROOT,
    VALUES,
    containers,
    helm,
    of_kind,
    pod_of,
    pods,
    refusal,
    render,
    selects,
)

VERSIONS = ["1.27.0", "1.30.0", "1.33.0", "1.37.0"]
OPERATOR = ("--api-versions", "monitoring.coreos.com/v1")
BY_NAME = {path.stem: path for path in VALUES}
# Of the Prometheus operator's kinds: what must be there, by path. Their full schemas are in no package.
MONITORING = {"ServiceMonitor": ("spec.selector.matchLabels", "spec.endpoints"), "PrometheusRule": ("spec.groups",)}


def flags_of(path):
    return set(re.findall(r"ABSL_FLAG\([^,]+, (\w+)", (ROOT / path).read_text(encoding="utf-8")))


class Chart(unittest.TestCase):
    def test_lints(self):
        for values in VALUES:
            done = helm("lint", "--strict", CHART, "--values", values)
            self.assertEqual(done.returncode, 0, f"{values.name}: {done.stdout}{done.stderr}")

    def test_every_object_keeps_the_schema_of_every_version(self):
        validated = 0
        for values in VALUES:
            for version in VERSIONS:
                for found in render(values, *OPERATOR, kubernetes=version):
                    if found["kind"] in MONITORING:
                        continue
                    kubernetes_validate.validate(found, version, strict=True)
                    validated += 1
        for found in yaml.safe_load_all((CHART.parent / "namespace.yaml").read_text(encoding="utf-8")):
            kubernetes_validate.validate(found, NEWEST, strict=True)
            validated += 1
        print(f"{validated} objects validated: {len(VALUES)} values files, Kubernetes {' '.join(VERSIONS)}")

    def test_the_validation_can_fail(self):
        found = of_kind(render(VALUES[0]), "StatefulSet")[0] | {"spec": {"replicaz": 1}}
        with self.assertRaises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(found, NEWEST, strict=True)

    def test_monitoring_objects_have_what_the_operator_requires(self):
        for values in VALUES:
            objects = render(values, *OPERATOR)
            for kind, paths in MONITORING.items():
                found = of_kind(objects, kind)
                self.assertTrue(found, f"{values.name}: no {kind}")
                for one in found:
                    for path in paths:
                        value = one
                        for key in path.split("."):
                            value = value[key]
                        self.assertTrue(value, f"{kind}: {path}")

    def test_three_state_values_follow_the_cluster_only_when_auto(self):
        values = BY_NAME["laptop"]
        for setting, kind in (("serviceMonitor", "ServiceMonitor"), ("prometheusRule", "PrometheusRule")):
            option = f"monitoring.{setting}="
            self.assertFalse(of_kind(render(values), kind))
            self.assertTrue(of_kind(render(values, *OPERATOR), kind))
            self.assertTrue(of_kind(render(values, "--set", option + "true"), kind))
            self.assertFalse(of_kind(render(values, *OPERATOR, "--set", option + "false"), kind))

    def test_plaintext_must_be_said(self):
        for missing in ("router", "workers", "worker"):
            said = refusal("--set", f"tls.{missing}.existingSecret=", values=BY_NAME["secured"])
            self.assertTrue("whoever reaches their ports" in said or "both must name a Secret" in said, said)
        for values in VALUES:
            for component in ("router", "worker"):
                arguments = pod_of(render(values), component)[1]["containers"][0]["args"]
                self.assertEqual("--unencrypted" in arguments, values.stem != "secured")

    def test_secrets_are_mounted_whole_where_the_flags_look_for_them(self):
        objects = render(BY_NAME["secured"])
        for component in ("router", "worker", "test"):
            _, spec = pod_of(objects, component)
            container = spec["containers"][0]
            folders = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
            secrets = {volume["name"] for volume in spec["volumes"] if "secret" in volume}
            used = set()
            for argument in container["args"]:
                path = argument.split("=")[-1]
                if path.startswith("/run/"):
                    mount = folders[path.rsplit("/", 1)[0]]
                    self.assertTrue(mount["readOnly"] and "subPath" not in mount, argument)
                    used.add(mount["name"])
            self.assertEqual(used, secrets)
        self.assertEqual(len(secrets), 2)
        keys = [volume["secret"].get("items") for volume in pod_of(objects, "test")[1]["volumes"]]
        self.assertNotIn("tls.key", str(keys))
        self.assertTrue(all(keys), "the test sees more than it needs")

    def test_values_out_of_range_are_refused(self):
        for wrong in (
            "worker.replicas=0",
            "worker.gpus=2",
            "router.port=80",
            "worker.device=tpu",
            "worker.flags.listen=x",
            "router.drainSeconds=-1",
            "image.digest=sha256:1",
            "monitoring.serviceMonitor=maybe",
            "worker.resources.limits.memory=lots",
            "model.name=",
            "model.init.image=x",
            "model.claim.name=",
            "tokens.existingSecret=x",
            "tls.worker.existingSecret=x",
            "tls.workers.existingSecret=X_",
            "tls.workerIdentity=",
            "router.flags.unencrypted=true",
            "router.flags.otlp_endpoint=x:1",
            "tracing.endpoint=http://otel",
            "worker.flags.tls_key=x",
            "worker.autoscaling.enabled=true",
        ):
            self.assertTrue(refusal("--set", wrong, values=BY_NAME["laptop"]), f"{wrong} was taken")

    def test_every_argument_is_a_flag_of_the_program(self):
        known = {
            "/usr/bin/millrace-router": flags_of("router/main.cc"),
            "/usr/bin/millrace-worker": flags_of("worker/main.cc"),
        }
        for values in VALUES:
            for component in ("router", "worker"):
                container = pod_of(render(values), component)[1]["containers"][0]
                for argument in container["args"]:
                    flag = re.fullmatch(r"--(\w+)(=.*)?", argument)
                    self.assertIn(flag.group(1), known[container["command"][0]], f"{values.name}: {component}")

    def test_numbers_reach_the_programs_as_written(self):
        objects = render(
            BY_NAME["laptop"],
            "--set-json",
            'router.flags={"max_queued_tokens":67108864}',
            "--set-json",
            'worker.flags={"step_target_ms":0.5}',
        )
        self.assertIn("--max_queued_tokens=67108864", pod_of(objects, "router")[1]["containers"][0]["args"])
        self.assertIn("--step_target_ms=0.5", pod_of(objects, "worker")[1]["containers"][0]["args"])

    def test_the_router_is_told_exactly_the_workers_there_are(self):
        for replicas in (1, 3, 12):
            objects = render(BY_NAME["laptop"], "--set", f"worker.replicas={replicas}")
            workers = of_kind(objects, "StatefulSet")[0]
            service = workers["spec"]["serviceName"]
            self.assertIn(
                service,
                [
                    found["metadata"]["name"]
                    for found in of_kind(objects, "Service")
                    if found["spec"].get("clusterIP") == "None"
                ],
            )
            expected = ",".join(
                f"{workers['metadata']['name']}-{i}.{service}:50061" for i in range(workers["spec"]["replicas"])
            )
            self.assertIn("--workers=" + expected, pod_of(objects, "router")[1]["containers"][0]["args"])
        self.assertIn(
            f"--workers=dns:///{FLEET}-worker:50061",
            pod_of(render(BY_NAME["multi-node"]), "router")[1]["containers"][0]["args"],
        )

    def test_services_monitors_and_policies_find_their_pods_and_ports(self):
        for values in VALUES:
            objects = render(values, *OPERATOR)
            labels = {
                metadata["labels"]["app.kubernetes.io/component"]: metadata["labels"]
                for _, metadata, _ in pods(objects)
            }
            ports = {
                component: {port["name"] for port in pod_of(objects, component)[1]["containers"][0]["ports"]}
                for component in ("router", "worker")
            }
            for service in of_kind(objects, "Service"):
                found = [name for name, have in labels.items() if selects(service["spec"]["selector"], have)]
                self.assertEqual(len(found), 1, service["metadata"]["name"])
                for port in service["spec"]["ports"]:
                    self.assertIn(port["targetPort"], ports[found[0]])
                    self.assertEqual(port["protocol"], "TCP")
            for monitor in of_kind(objects, "ServiceMonitor"):
                found = [
                    service
                    for service in of_kind(objects, "Service")
                    if selects(monitor["spec"]["selector"]["matchLabels"], service["metadata"]["labels"])
                ]
                self.assertEqual(len(found), 1, monitor["metadata"]["name"])
                self.assertIn(
                    monitor["spec"]["endpoints"][0]["port"], [port["name"] for port in found[0]["spec"]["ports"]]
                )
                self.assertEqual(monitor["spec"]["namespaceSelector"], {"matchNames": [NAMESPACE]})

    def test_spans_go_to_the_collector_that_is_named_and_nowhere_else(self):
        def egress(*options):
            for found in of_kind(render(BY_NAME["secured"], *options), "NetworkPolicy"):
                component = found["spec"]["podSelector"]["matchLabels"].get("app.kubernetes.io/component")
                yield component, [port["port"] for rule in found["spec"].get("egress") or [] for port in rule["ports"]]

        self.assertEqual(dict(egress())["worker"], [])
        named = ("--set", "tracing.endpoint=otel.monitoring:4317")
        self.assertEqual(dict(egress(*named))["worker"], [4317, 53, 53])
        self.assertIn(4317, dict(egress(*named))["router"])
        for component in ("router", "worker"):
            with_it = pod_of(render(BY_NAME["secured"], *named), component)[1]["containers"][0]["args"]
            without = pod_of(render(BY_NAME["secured"]), component)[1]["containers"][0]["args"]
            self.assertEqual(
                [one for one in with_it if one not in without],
                ["--otlp_endpoint=otel.monitoring:4317", "--unencrypted_spans"],
            )

    def test_probes_from_elsewhere_than_the_node_are_let_in_only_when_asked_for(self):
        def open_ports(*options):
            for found in of_kind(render(BY_NAME["secured"], *options), "NetworkPolicy"):
                for rule in found["spec"].get("ingress") or []:
                    yield rule["ports"][0]["port"], rule["from"]

        self.assertNotIn("probes", dict(open_ports()))
        nodes = '[{"ipBlock":{"cidr":"10.0.0.0/24"}}]'
        opened = [peers for port, peers in open_ports("--set-json", f"networkPolicy.probes={nodes}") if port == "probes"]
        self.assertEqual(opened, [[{"ipBlock": {"cidr": "10.0.0.0/24"}}]] * 2)

    def test_gpus_are_whole_and_equal_in_requests_and_limits(self):
        for values in VALUES:
            resources = pod_of(render(values), "worker")[1]["containers"][0]["resources"]
            wanted = None if values.stem in ("laptop", "secured") else "1"
            self.assertEqual(resources["limits"].get("nvidia.com/gpu"), wanted)
            self.assertEqual(resources["requests"].get("nvidia.com/gpu"), wanted)

    def test_autoscaling_leaves_the_number_of_workers_alone(self):
        objects = render(BY_NAME["multi-node"])
        scaler, workers = of_kind(objects, "HorizontalPodAutoscaler")[0], of_kind(objects, "StatefulSet")[0]
        self.assertNotIn("replicas", workers["spec"])
        self.assertEqual(
            scaler["spec"]["scaleTargetRef"],
            {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": workers["metadata"]["name"]},
        )
        self.assertEqual(scaler["spec"]["metrics"][0]["external"]["metric"]["name"], "vllm:num_requests_waiting")

    def test_the_model_comes_from_one_place_and_is_read_only(self):
        for values in VALUES:
            for component in ("router", "worker"):
                _, spec = pod_of(render(values), component)
                mount = next(mount for mount in spec["containers"][0]["volumeMounts"] if mount["mountPath"] == "/model")
                self.assertTrue(mount["readOnly"])
                volume = next(volume for volume in spec["volumes"] if volume["name"] == mount["name"])
                self.assertEqual("initContainers" in spec, "emptyDir" in volume)

    def test_the_test_pod_asks_the_router(self):
        objects = render(BY_NAME["laptop"])
        metadata, spec = pod_of(objects, "test")
        self.assertEqual(metadata["annotations"]["helm.sh/hook"], "test")
        address = spec["containers"][0]["args"][2]
        service = next(
            found for found in of_kind(objects, "Service") if found["metadata"]["name"] == address.split(":")[0]
        )
        self.assertEqual(int(address.split(":")[1]), service["spec"]["ports"][0]["port"])

    def test_notes_name_what_serves_and_what_is_given_up(self):
        for values in VALUES:
            done = helm("install", "demo", CHART, "--namespace", NAMESPACE, "--dry-run=client", "--values", values)
            self.assertEqual(done.returncode, 0, done.stderr)
            notes = done.stdout.split("NOTES:")[1]
            self.assertIn(f"{FLEET}-router.{NAMESPACE}.svc:50051", notes)
            self.assertEqual("neither encrypted nor authenticated" in notes, values.stem != "secured", notes)
            self.assertEqual("TLS" in notes, values.stem == "secured", notes)

    def test_two_releases_share_no_name_and_no_pod(self):
        def names(release):
            done = helm("template", release, CHART, "--values", VALUES[0])
            return {(found["kind"], found["metadata"]["name"]) for found in yaml.safe_load_all(done.stdout) if found}

        self.assertFalse(names("a") & names("b"))

    def test_older_kubernetes_is_refused(self):
        self.assertIn(
            "incompatible", helm("template", "x", CHART, "--values", VALUES[0], "--kube-version", "1.26.0").stderr
        )
        self.assertTrue(render(VALUES[0], kubernetes=OLDEST))

    def test_images_go_by_digest_when_one_is_given(self):
        digest = "sha256:" + "a" * 64
        for _, _, spec in pods(render(BY_NAME["laptop"], "--set", f"image.digest={digest}")):
            for container in containers(spec):
                self.assertEqual(container["image"], f"millrace@{digest}")


if __name__ == "__main__":
    unittest.main()

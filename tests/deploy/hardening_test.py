"""What every pod and object of the chart must keep: the rows of the hardening baseline, one test a row."""

import copy
import re
import sys
import unittest
from unittest import mock

import yaml

from chart import CHART, NEWEST, OLDEST, ROOT, VALUES, containers, of_kind, pod_of, pods, render, selects

UID = 10001
UNITS = {"": 1, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def quantity(text):
    number, unit = re.fullmatch(r"([0-9.]+)([KMGT]i)?", text).groups()
    return float(number) * UNITS[unit or ""]


class Hardening(unittest.TestCase):
    def every(self):
        """(where, objects) for every values file and the oldest and newest Kubernetes."""
        for values in VALUES:
            for kubernetes in (OLDEST, NEWEST):
                yield f"{values.name} on {kubernetes}", render(values, kubernetes=kubernetes)

    def every_pod(self):
        for where, objects in self.every():
            for name, metadata, spec in pods(objects):
                yield f"{where}: {name}", metadata, spec

    def every_container(self):
        for where, _, spec in self.every_pod():
            for container in containers(spec):
                yield f'{where}/{container["name"]}', container

    def test_admission_enforces_the_restricted_profile(self):
        namespace = next(yaml.safe_load_all((CHART.parent / "namespace.yaml").read_text(encoding="utf-8")))
        for mode in ("enforce", "audit", "warn"):
            self.assertEqual(namespace["metadata"]["labels"][f"pod-security.kubernetes.io/{mode}"], "restricted")

    def test_pods_run_as_nobody_in_particular_and_share_nothing_with_the_node(self):
        for where, _, spec in self.every_pod():
            security = spec["securityContext"]
            self.assertIs(security["runAsNonRoot"], True, where)
            self.assertEqual((security["runAsUser"], security["runAsGroup"]), (UID, UID), where)
            self.assertEqual(security["seccompProfile"], {"type": "RuntimeDefault"}, where)
            for shared in ("hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace"):
                self.assertNotIn(shared, spec, where)

    def test_containers_have_no_privilege(self):
        for where, container in self.every_container():
            security = container["securityContext"]
            self.assertIs(security["allowPrivilegeEscalation"], False, where)
            self.assertEqual(security["capabilities"], {"drop": ["ALL"]}, where)
            self.assertFalse({"privileged", "runAsUser", "procMount"} & set(security), where)

    def test_file_systems_are_read_only_and_what_can_be_written_is_bounded(self):
        for where, container in self.every_container():
            self.assertIs(container["securityContext"]["readOnlyRootFilesystem"], True, where)
        for where, _, spec in self.every_pod():
            for volume in spec.get("volumes", []):
                kind = next(key for key in volume if key != "name")
                self.assertIn(kind, ("emptyDir", "persistentVolumeClaim", "secret"), where)
                if kind == "secret":
                    self.assertEqual(volume[kind]["defaultMode"] & 0o222, 0, where)
                elif kind == "emptyDir":
                    self.assertIn("sizeLimit", volume[kind], where)
                    self.assertTrue(volume["name"] == "model" or volume[kind]["medium"] == "Memory", where)
                else:
                    self.assertIs(volume[kind]["readOnly"], True, where)
            for mount in spec["containers"][0].get("volumeMounts", []):
                self.assertTrue(mount["mountPath"] == "/tmp" or mount["readOnly"], where)

    def test_gpus_come_from_the_device_plugin_alone(self):
        for where, container in self.every_container():
            self.assertNotIn("volumeDevices", container, where)
            self.assertNotIn(
                "NVIDIA_VISIBLE_DEVICES", [variable["name"] for variable in container.get("env", [])], where
            )

    def test_each_role_has_an_identity_without_a_token_or_a_right(self):
        for where, objects in self.every():
            accounts = {found["metadata"]["name"]: found for found in of_kind(objects, "ServiceAccount")}
            used = [pod_of(objects, component)[1]["serviceAccountName"] for component in ("router", "worker")]
            self.assertEqual(sorted(accounts), sorted(used), where)
            self.assertEqual(len(set(used)), 2, where)
            for account in accounts.values():
                self.assertIs(account["automountServiceAccountToken"], False, where)
            for kind in ("Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding"):
                self.assertFalse(of_kind(objects, kind), where)
        for where, _, spec in self.every_pod():
            self.assertIs(spec["automountServiceAccountToken"], False, where)

    def test_networks_deny_by_default_and_only_the_router_reaches_workers(self):
        for where, objects in self.every():
            policies = [found["spec"] for found in of_kind(objects, "NetworkPolicy")]
            deny = [
                policy
                for policy in policies
                if not policy.get("ingress")
                and not policy.get("egress")
                and policy["policyTypes"] == ["Ingress", "Egress"]
            ]
            labels = {
                metadata["labels"]["app.kubernetes.io/component"]: metadata["labels"]
                for _, metadata, _ in pods(objects)
            }
            for have in labels.values():
                self.assertTrue(any(selects(policy["podSelector"]["matchLabels"], have) for policy in deny), where)

            def of(component):
                return [
                    policy for policy in policies if selects(policy["podSelector"]["matchLabels"], labels[component])
                ]

            def rules(component, direction):
                return [rule for policy in of(component) for rule in policy.get(direction) or []]

            for component in ("router", "worker"):
                for rule in rules(component, "ingress"):
                    self.assertTrue(rule["from"], f"{where}: {component} is open to all")
                    self.assertEqual(len(rule["ports"]), 1, where)
            grpc = [rule["from"] for rule in rules("worker", "ingress") if rule["ports"][0]["port"] == "grpc"]
            self.assertEqual(len(grpc), 1, where)
            self.assertEqual(len(grpc[0]), 1, where)
            self.assertTrue(selects(grpc[0][0]["podSelector"]["matchLabels"], labels["router"]), where)
            self.assertFalse(selects(grpc[0][0]["podSelector"]["matchLabels"], labels["worker"]), where)
            self.assertEqual(rules("worker", "egress"), [], where)
            for rule in rules("router", "egress"):
                self.assertTrue(rule["to"] and rule["ports"], where)
                self.assertTrue(
                    all("ipBlock" not in peer for peer in rule["to"]), f"{where}: egress beyond the cluster"
                )

    def test_probes_are_explicit(self):
        ready = {"router": "millrace.v1.InferenceService", "worker": "millrace.worker.v1.WorkerService"}
        for where, objects in self.every():
            for component, service in ready.items():
                container = pod_of(objects, component)[1]["containers"][0]
                port = next(port["containerPort"] for port in container["ports"] if port["name"] == "probes")
                for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                    self.assertEqual(container[probe]["grpc"]["port"], port, where)
                    for field in ("periodSeconds", "timeoutSeconds", "failureThreshold"):
                        self.assertIn(field, container[probe], where)
                self.assertEqual(container["readinessProbe"]["grpc"]["service"], service, where)
                self.assertNotIn("service", container["livenessProbe"]["grpc"], where)
                self.assertEqual(
                    [
                        container["readinessProbe"][field]
                        for field in ("periodSeconds", "timeoutSeconds", "failureThreshold")
                    ],
                    [1, 1, 2],
                )
                self.assertEqual(
                    [
                        container["livenessProbe"][field]
                        for field in ("periodSeconds", "timeoutSeconds", "failureThreshold")
                    ],
                    [5, 2, 6],
                )
            startup = pod_of(objects, "worker")[1]["containers"][0]["startupProbe"]
            self.assertGreaterEqual(startup["periodSeconds"] * startup["failureThreshold"], 1800, where)

    def test_what_runs_may_end_before_it_is_killed(self):
        for where, objects in self.every():
            for component in ("router", "worker"):
                _, spec = pod_of(objects, component)
                arguments = dict(
                    argument.split("=", 1) for argument in spec["containers"][0]["args"] if "=" in argument
                )
                pause = spec["containers"][0].get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
                self.assertGreaterEqual(
                    spec["terminationGracePeriodSeconds"], pause + int(arguments["--drain_ms"]) / 1000 + 10, where
                )
                self.assertEqual(pause, 5 if component == "router" and NEWEST in where else 0, where)

    def test_disruptions_take_one_pod_at_a_time(self):
        for where, objects in self.every():
            budgets = [found["spec"] for found in of_kind(objects, "PodDisruptionBudget")]
            for component in ("router", "worker"):
                metadata, _ = pod_of(objects, component)
                mine = [budget for budget in budgets if selects(budget["selector"]["matchLabels"], metadata["labels"])]
                self.assertEqual([budget["maxUnavailable"] for budget in mine], [1], where)
            # A worker obeys one router, so that two at once would fight for them; the old one ends first.
            router = of_kind(objects, "Deployment")[0]["spec"]
            self.assertEqual((router["replicas"], router["strategy"]), (1, {"type": "Recreate"}), where)

    def test_workers_are_spread_over_nodes(self):
        for where, objects in self.every():
            metadata, spec = pod_of(objects, "worker")
            spread = spec["topologySpreadConstraints"][0]
            self.assertEqual((spread["topologyKey"], spread["maxSkew"]), ("kubernetes.io/hostname", 1), where)
            self.assertTrue(selects(spread["labelSelector"]["matchLabels"], metadata["labels"]), where)

    def test_every_container_is_bounded(self):
        for where, container in self.every_container():
            requests, limits = container["resources"]["requests"], container["resources"]["limits"]
            self.assertIn("cpu", requests, where)
            for resource in ("memory", "ephemeral-storage"):
                self.assertEqual(requests[resource], limits[resource], where)
        for where, _, spec in self.every_pod():
            for volume in spec.get("volumes", []):
                if volume["name"] == "model" and "emptyDir" in volume:
                    self.assertGreaterEqual(
                        quantity(spec["initContainers"][0]["resources"]["limits"]["ephemeral-storage"]),
                        quantity(volume["emptyDir"]["sizeLimit"]),
                        where,
                    )
        kinds = [
            found["kind"] for found in yaml.safe_load_all((CHART.parent / "namespace.yaml").read_text(encoding="utf-8"))
        ]
        self.assertTrue({"LimitRange", "ResourceQuota"} <= set(kinds))

    def test_no_secret_is_in_the_environment_or_the_arguments(self):
        for where, container in self.every_container():
            for variable in container.get("env", []):
                self.assertNotIn("secretKeyRef", variable.get("valueFrom", {}), where)
            self.assertNotIn("envFrom", container, where)
        for where, objects in self.every():
            self.assertFalse(of_kind(objects, "Secret"), where)

    def test_images_can_be_pinned_and_hold_no_shell(self):
        for where, container in self.every_container():
            self.assertFalse(container["image"].endswith(":latest") or ":" not in container["image"], where)
            if container["name"] != "model":
                self.assertTrue(container["command"][0].startswith("/usr/bin/millrace"), where)
        last_stage = (ROOT / "deploy" / "container" / "Dockerfile").read_text(encoding="utf-8").split("FROM ")[-1]
        self.assertTrue(last_stage.startswith("scratch\n"))
        self.assertIn(f"USER {UID}:{UID}", last_stage)
        self.assertNotIn("RUN", last_stage)


def _worker(change):
    return lambda objects: change(pod_of(objects, "worker")[1])


def _container(change):
    return _worker(lambda spec: change(spec["containers"][0]))


def _policy(change):
    return lambda objects: change(
        next(
            found["spec"]
            for found in of_kind(objects, "NetworkPolicy")
            if found["metadata"]["name"].endswith("-worker")
        )
    )


# For each row ways to break it: that row must see each.
BREACHES = {
    "pods_run_as_nobody_in_particular_and_share_nothing_with_the_node": [
        _worker(lambda spec: spec.update(hostNetwork=True)),
        _worker(lambda spec: spec["securityContext"].update(runAsUser=0)),
        _worker(lambda spec: spec["securityContext"].update(seccompProfile={"type": "Unconfined"})),
    ],
    "containers_have_no_privilege": [
        _container(lambda container: container["securityContext"].update(privileged=True)),
        _container(
            lambda container: container["securityContext"].update(capabilities={"drop": ["ALL"], "add": ["SYS_ADMIN"]})
        ),
        _container(lambda container: container["securityContext"].update(allowPrivilegeEscalation=True)),
    ],
    "file_systems_are_read_only_and_what_can_be_written_is_bounded": [
        _container(lambda container: container["securityContext"].update(readOnlyRootFilesystem=False)),
        _worker(lambda spec: spec["volumes"].append({"name": "x", "emptyDir": {}})),
        _worker(lambda spec: spec["volumes"].append({"name": "x", "hostPath": {"path": "/"}})),
    ],
    "gpus_come_from_the_device_plugin_alone": [
        _container(lambda container: container["env"].append({"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}))
    ],
    "each_role_has_an_identity_without_a_token_or_a_right": [
        _worker(lambda spec: spec.update(automountServiceAccountToken=True)),
        _worker(lambda spec: spec.update(serviceAccountName="default")),
        lambda objects: objects.append({"kind": "ClusterRole"}),
    ],
    "networks_deny_by_default_and_only_the_router_reaches_workers": [
        _policy(lambda policy: policy["ingress"][0].update({"from": []})),
        _policy(lambda policy: policy["ingress"][0]["from"].append({"podSelector": {}})),
        _policy(lambda policy: policy.update(egress=[{}])),
        lambda objects: objects.remove(
            next(found for found in of_kind(objects, "NetworkPolicy") if found["metadata"]["name"].endswith("deny"))
        ),
    ],
    "probes_are_explicit": [
        _container(lambda container: container.pop("livenessProbe")),
        _container(lambda container: container["readinessProbe"]["grpc"].pop("service")),
        _container(lambda container: container["startupProbe"].update(failureThreshold=10)),
    ],
    "what_runs_may_end_before_it_is_killed": [_worker(lambda spec: spec.update(terminationGracePeriodSeconds=10))],
    "disruptions_take_one_pod_at_a_time": [
        lambda objects: of_kind(objects, "PodDisruptionBudget")[0]["spec"].update(maxUnavailable=2),
        lambda objects: of_kind(objects, "Deployment")[0]["spec"].update(replicas=2),
    ],
    "workers_are_spread_over_nodes": [
        _worker(lambda spec: spec["topologySpreadConstraints"][0].update(topologyKey="zone"))
    ],
    "every_container_is_bounded": [
        _container(lambda container: container["resources"]["limits"].update(memory="1Ti")),
        _container(lambda container: container["resources"].pop("requests")),
    ],
    "no_secret_is_in_the_environment_or_the_arguments": [
        _container(
            lambda container: container["env"].append(
                {"name": "X", "valueFrom": {"secretKeyRef": {"name": "x", "key": "y"}}}
            )
        )
    ],
    "images_can_be_pinned_and_hold_no_shell": [
        _container(lambda container: container.update(image="millrace:latest")),
        _container(lambda container: container.update(command=["/bin/sh"])),
    ],
}


class EveryRowCanFail(unittest.TestCase):
    def test_each_breach_is_seen(self):
        for row, breaches in BREACHES.items():
            for number, breach in enumerate(breaches):

                def broken(*arguments, breach=breach, real=render, **options):
                    objects = copy.deepcopy(real(*arguments, **options))
                    breach(objects)
                    return objects

                result = unittest.TestResult()
                with mock.patch.object(sys.modules[__name__], "render", broken):
                    Hardening("test_" + row).run(result)
                self.assertTrue(result.failures or result.errors, f"{row} did not see breach {number}")


if __name__ == "__main__":
    print(
        "not covered, for there is nothing to check: signatures and provenance of images"
    )
    unittest.main()

"""The chart as its tests see it: rendered by the real helm, as Python objects."""

import functools
import pathlib
import subprocess

import yaml

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
CHART = ROOT / "deploy" / "helm" / "millrace"
HELM = ROOT / "build" / "tools" / "helm"
VALUES = sorted((CHART / "values").glob("*.yaml"))
OLDEST, NEWEST = "1.27.0", "1.37.0"
RELEASE, NAMESPACE = "demo", "serving"
FLEET = "demo-millrace"


def helm(*arguments):
    return subprocess.run([HELM, *map(str, arguments)], capture_output=True, text=True, check=False)


@functools.lru_cache(maxsize=None)
def render(values, *options, kubernetes=NEWEST):
    """The objects of the chart with a values file, as a list."""
    done = helm(
        "template", RELEASE, CHART, "--namespace", NAMESPACE, "--kube-version", kubernetes, "--values", values, *options
    )
    if done.returncode:
        raise AssertionError(f"{values.name} {options}: {done.stderr}")
    return [found for found in yaml.safe_load_all(done.stdout) if found]


def refusal(*options, values=VALUES[0]):
    """What helm says to values that it does not take."""
    done = helm("template", RELEASE, CHART, "--values", values, *options)
    return done.stderr if done.returncode else ""


def of_kind(objects, kind):
    return [found for found in objects if found["kind"] == kind]


def pods(objects):
    """(name, metadata, spec) of everything that makes pods, and of bare pods."""
    for found in objects:
        if found["kind"] in ("Deployment", "StatefulSet"):
            template = found["spec"]["template"]
            yield f'{found["kind"]}/{found["metadata"]["name"]}', template["metadata"], template["spec"]
        elif found["kind"] == "Pod":
            yield f'Pod/{found["metadata"]["name"]}', found["metadata"], found["spec"]


def containers(spec):
    return spec.get("initContainers", []) + spec["containers"]


def pod_of(objects, component):
    """(metadata, spec) of the pods of a component."""
    return next(
        (metadata, spec)
        for _, metadata, spec in pods(objects)
        if metadata["labels"]["app.kubernetes.io/component"] == component
    )


def selects(selector, labels):
    return all(labels.get(key) == value for key, value in selector.items())

"""The table of metrics, deploy/metrics.md, as data, and what a PromQL expression asks of it."""

import functools
import pathlib
import re

import promql_parser

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
TABLE = ROOT / "deploy" / "metrics.md"
CODES = {
    "OK",
    "CANCELLED",
    "UNKNOWN",
    "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "ABORTED",
    "OUT_OF_RANGE",
    "UNIMPLEMENTED",
    "INTERNAL",
    "UNAVAILABLE",
    "DATA_LOSS",
    "UNAUTHENTICATED",
}
# What Prometheus itself and the scrape's configuration add.
TARGET_LABELS = {"job", "instance", "fleet", "namespace", "pod"}
OF_PROMETHEUS = {"up": {}, "ALERTS": {"alertname": None, "alertstate": None}}
NAME = r"(?:vllm:|millrace_|process_|exposer_)[a-z0-9_]+"


@functools.lru_cache(maxsize=None)
def metrics():
    """Name as scraped -> {label: the values it may have, or None where they are not a closed list}."""
    found = {name: dict(labels) for name, labels in OF_PROMETHEUS.items()}
    text = TABLE.read_text(encoding="utf-8")
    for line in text.splitlines():
        cells = [cell.strip().replace("`", "") for cell in line.strip().strip("|").split("|")]
        if len(cells) < 4 or not re.match(NAME, cells[0]):
            continue
        labels = {}
        for label, values in re.findall(r"(\b[a-z_]+)(=[\w,…]+)?", re.sub(r"\(.*?\)", "", cells[2])):
            closed = {value for value in values.lstrip("=").split(",") if value and value != "…"}
            labels[label] = CODES if label == "code" else closed or None
            for name in re.findall(NAME, cells[0]):  # router and worker may share a name
                labels[label] = labels[label] and labels[label] | (found.get(name, {}).get(label) or set())
        for name in re.findall(NAME, cells[0]):
            if "histogram" in cells[1]:
                found[name + "_bucket"] = labels | {"le": None}
                found[name + "_sum"] = found[name + "_count"] = labels
            else:
                found[name] = labels
    for name in re.findall(r"\b(?:process|exposer)_[a-z_]+\b", text):
        found.setdefault(name, {})
    return found


def selectors(node):
    """Every vector selector of a parsed expression."""
    if isinstance(node, promql_parser.VectorSelector):
        yield node
        return
    for attribute in ("expr", "lhs", "rhs", "param", "vs", "vector_selector", "args"):
        child = getattr(node, attribute, None)
        for one in child if isinstance(child, list) else [child]:
            if one is not None and not isinstance(one, (str, bool, int, float)):
                yield from selectors(one)


def faults(expression):
    """What an expression asks for that is not in the table; raises ValueError if it does not parse."""
    found = list(selectors(promql_parser.parse(expression)))
    if not found:
        yield "it selects no metric"
    for selector in found:
        if selector.name not in metrics():
            yield f"{selector.name} is not in the table"
            continue
        known = metrics()[selector.name]
        for matcher in selector.matchers.matchers:
            if matcher.name in TARGET_LABELS:
                continue
            if matcher.name not in known:
                yield f"{selector.name} has no label {matcher.name}"
            elif known[matcher.name] is not None:
                for value in matcher.value.split("|"):
                    if value not in known[matcher.name] and not re.search(r"[.*$]", value):
                        yield f"{selector.name}{{{matcher.name}}} is never {value}"

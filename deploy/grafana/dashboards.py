#!/usr/bin/env python3
"""Writes the Grafana dashboards into the chart (deploy/helm/millrace/dashboards).

`--check` only says whether they are current."""

import json
import pathlib
import sys

OUT = pathlib.Path(__file__).resolve().parent.parent / "helm" / "millrace" / "dashboards"
HERE = 'namespace=~"$namespace",fleet=~"$fleet"'
WORKER = HERE + ',worker=~"$worker"'
POD = HERE + ',job="millrace-worker",pod=~"$worker"'
SECONDS, RATIO, PER_SECOND, TOKENS, BYTES, COUNT = "s", "percentunit", "ops", "none", "bytes", "short"


def quantiles(metric, where=HERE, wanted=(0.5, 0.95, 0.99)):
    return [
        (f"histogram_quantile({q}, sum by (le) (rate({metric}_bucket{{{where}}}[$__rate_interval])))", f"p{q * 100:g}")
        for q in wanted
    ]


def rate(metric, labels="", by="", legend=None):
    grouped = f" by ({by})" if by else ""
    return f"sum{grouped} (rate({metric}{{{HERE}{labels}}}[$__rate_interval]))", legend or f"{{{{{by}}}}}"


def total(metric, labels="", by="", legend=None, where=HERE):
    grouped = f" by ({by})" if by else ""
    return f"sum{grouped} ({metric}{{{where}{labels}}})", legend or f"{{{{{by}}}}}"


def each(metric, what=""):
    """A rate of every worker process."""
    return f"rate({metric}{{{POD}}}[$__rate_interval])", "{{pod}} {{instance}}" + what


def ratio(above, below, legend):
    return f"{above} / {below}", legend


FAULTS = rate("millrace_requests_total", ',code=~"UNKNOWN|INTERNAL|UNAVAILABLE|DATA_LOSS|ABORTED"')[0]
CALLS = rate("millrace_requests_total")[0]
HIT_RATE = ratio(rate("vllm:prefix_cache_hits_total")[0], rate("vllm:prefix_cache_queries_total")[0], "hit rate")
# Panels: (type, title, unit, what it says, [(expression, legend)]). Four stats or two graphs stand in a row.
BOARDS = {
    "fleet": (
        "Millrace: fleet",
        [
            ("stat", "Ready workers", COUNT, "", [total("millrace_workers", ',state="ready"', legend="ready")]),
            ("stat", "Running", COUNT, "Sequences on workers", [total("vllm:num_requests_running", legend="running")]),
            (
                "stat",
                "Waiting",
                COUNT,
                "Sequences in the router's queue",
                [total("vllm:num_requests_waiting", legend="waiting")],
            ),
            ("stat", "Output tokens per second", TOKENS, "", [rate("vllm:generation_tokens_total", legend="tokens/s")]),
            ("stat", "Calls that failed through our fault", RATIO, "", [ratio(FAULTS, CALLS, "of the calls")]),
            (
                "stat",
                "KV blocks in use by running sequences",
                RATIO,
                "",
                [(f"max (vllm:kv_cache_usage_perc{{{HERE}}})", "in use")],
            ),
            ("stat", "Prefix cache hit rate", RATIO, "Prompt tokens that need not be computed", [HIT_RATE]),
            (
                "stat",
                "Stuck processes",
                COUNT,
                "Work and no step within the progress deadline",
                [total("millrace_stuck", legend="stuck")],
            ),
            ("graph", "Calls by status", PER_SECOND, "", [rate("millrace_requests_total", by="code")]),
            (
                "graph",
                "Tokens per second",
                TOKENS,
                "",
                [
                    rate("vllm:generation_tokens_total", legend="output"),
                    rate("vllm:prompt_tokens_total", legend="prompt, cached ones included"),
                ],
            ),
            (
                "graph",
                "Time to first token",
                SECONDS,
                "From the arrival of the call",
                quantiles("vllm:time_to_first_token_seconds"),
            ),
            (
                "graph",
                "Between tokens",
                SECONDS,
                "Two outputs of one sequence",
                quantiles("millrace_token_gap_seconds"),
            ),
            ("graph", "From call to end", SECONDS, "", quantiles("vllm:e2e_request_latency_seconds")),
            (
                "graph",
                "Ended sequences by reason",
                PER_SECOND,
                "",
                [rate("vllm:request_success_total", by="finished_reason")],
            ),
            (
                "graph",
                "Running and waiting",
                COUNT,
                "",
                [
                    total("vllm:num_requests_running", legend="running"),
                    total("vllm:num_requests_waiting", legend="waiting"),
                ],
            ),
            ("graph", "Workers by state", COUNT, "", [total("millrace_workers", by="state")]),
            (
                "graph",
                "Preemptions and moves",
                PER_SECOND,
                "A preempted sequence is computed again; a moved one went on at another worker",
                [
                    rate("vllm:num_preemptions_total", legend="preemptions"),
                    rate("millrace_sequence_moves_total", legend="moves"),
                ],
            ),
            ("graph", "Open calls", COUNT, "", [total("millrace_open_calls", legend="open")]),
            ("graph", "Cores in use", COUNT, "", [rate("process_cpu_seconds_total", by="job")]),
            ("graph", "Resident memory", BYTES, "", [total("process_resident_memory_bytes", by="job")]),
        ],
    ),
    "worker": (
        "Millrace: workers",
        [
            (
                "graph",
                "Slots in use",
                COUNT,
                "As the router sees them",
                [
                    total("millrace_worker_used_slots", by="worker", where=WORKER),
                    total("millrace_worker_slots", by="worker", where=WORKER, legend="{{worker}} limit"),
                ],
            ),
            (
                "graph",
                "Taking sequences",
                COUNT,
                "1: the router gives it work",
                [
                    total("millrace_worker_ready", by="worker", where=WORKER),
                    total("millrace_worker_draining", by="worker", where=WORKER, legend="{{worker}} draining"),
                ],
            ),
            (
                "graph",
                "KV blocks by state",
                COUNT,
                "",
                [total("millrace_worker_kv_blocks", by="worker, state", where=WORKER, legend="{{worker}} {{state}}")],
            ),
            ("graph", "Steps per second", PER_SECOND, "", [each("millrace_engine_steps_total")]),
            ("graph", "Step time, all workers shown", SECONDS, "", quantiles("millrace_engine_step_seconds", POD)),
            (
                "heatmap",
                "Step time",
                SECONDS,
                "",
                [(f"sum by (le) (rate(millrace_engine_step_seconds_bucket{{{POD}}}[$__rate_interval]))", "{{le}}")],
            ),
            (
                "graph",
                "Decoding rows of a step, mean",
                COUNT,
                "",
                [
                    ratio(
                        each("millrace_engine_decode_rows_sum")[0],
                        each("millrace_engine_decode_rows_count")[0],
                        "{{pod}} {{instance}}",
                    )
                ],
            ),
            (
                "graph",
                "Tokens per second",
                TOKENS,
                "",
                [
                    each("millrace_engine_generated_tokens_total", " sampled"),
                    each("millrace_engine_prefill_tokens_total", " prefill"),
                ],
            ),
            (
                "graph",
                "Slots waiting for a block",
                RATIO,
                "Of their turns; the router keeps leases ahead, so that this is 0",
                [
                    ratio(
                        each("millrace_engine_stalls_total")[0],
                        each("millrace_engine_decode_rows_sum")[0],
                        "{{pod}} {{instance}}",
                    )
                ],
            ),
            (
                "graph",
                "Sequences in and out",
                PER_SECOND,
                "Released: cancelled, preempted or moved by the router",
                [
                    each("millrace_engine_admissions_total", " admitted"),
                    each("millrace_engine_released_total", " released"),
                    each("millrace_engine_finished_total", " {{reason}}"),
                ],
            ),
            (
                "graph",
                "Since the last step, with work",
                SECONDS,
                "",
                [(f"millrace_engine_progress_age_seconds{{{POD}}}", "{{pod}} {{instance}}")],
            ),
            (
                "graph",
                "A router is connected",
                COUNT,
                "",
                [(f"millrace_engine_router_connected{{{POD}}}", "{{pod}} {{instance}}")],
            ),
            (
                "graph",
                "Resident memory",
                BYTES,
                "",
                [(f"process_resident_memory_bytes{{{POD}}}", "{{pod}} {{instance}}")],
            ),
            ("graph", "Cores in use", COUNT, "", [each("process_cpu_seconds_total")]),
        ],
    ),
    "prefix-cache": (
        "Millrace: prefix cache",
        [
            ("stat", "Hit rate", RATIO, "Prompt tokens found in the cache, of those of admitted sequences", [HIT_RATE]),
            (
                "stat",
                "Mismatches in the time shown",
                COUNT,
                "Sequences that found another number of cached tokens than predicted: 0 by design",
                [(f"sum (increase(millrace_prefix_mismatches_total{{{HERE}}}[$__range]))", "mismatches")],
            ),
            (
                "stat",
                "Cached blocks",
                COUNT,
                "Full blocks that no sequence holds and any may find",
                [total("millrace_worker_kv_blocks", ',state="cached"', legend="blocks")],
            ),
            ("stat", "Free blocks", COUNT, "", [total("millrace_worker_kv_blocks", ',state="free"', legend="blocks")]),
            ("graph", "Hit rate", RATIO, "", [HIT_RATE]),
            (
                "graph",
                "Prompt tokens per second",
                TOKENS,
                "",
                [
                    rate("vllm:prefix_cache_queries_total", legend="asked for"),
                    rate("vllm:prefix_cache_hits_total", legend="found"),
                ],
            ),
            (
                "graph",
                "Predicted and real",
                TOKENS,
                "Cached tokens per second; the lines lie on each other",
                [
                    rate("millrace_predicted_cached_tokens_total", legend="predicted"),
                    rate("millrace_real_cached_tokens_total", legend="found"),
                ],
            ),
            ("graph", "Mismatches", PER_SECOND, "", [rate("millrace_prefix_mismatches_total", legend="mismatches")]),
            (
                "graph",
                "Cached blocks by worker",
                COUNT,
                "",
                [total("millrace_worker_kv_blocks", ',state="cached"', by="worker")],
            ),
            ("graph", "Blocks by state", COUNT, "", [total("millrace_worker_kv_blocks", by="state")]),
            (
                "graph",
                "Prefill tokens computed",
                TOKENS,
                "What the cache did not save",
                [rate("millrace_engine_prefill_tokens_total", by="pod", legend="{{pod}}")],
            ),
            ("graph", "Prompt length", TOKENS, "", quantiles("vllm:request_prompt_tokens")),
        ],
    ),
    "queue": (
        "Millrace: queue",
        [
            ("stat", "Waiting sequences", COUNT, "", [total("vllm:num_requests_waiting", legend="waiting")]),
            ("stat", "Waiting prompt tokens", COUNT, "", [total("millrace_queue_tokens", legend="tokens")]),
            (
                "stat",
                "Queue in use",
                RATIO,
                "Of --max_queued_sequences",
                [ratio(total("vllm:num_requests_waiting")[0], total("millrace_queue_limit_sequences")[0], "in use")],
            ),
            (
                "stat",
                "Refused calls",
                RATIO,
                "RESOURCE_EXHAUSTED",
                [ratio(rate("millrace_requests_total", ',code="RESOURCE_EXHAUSTED"')[0], CALLS, "of the calls")],
            ),
            (
                "graph",
                "Time in the queue",
                SECONDS,
                "Submission to first admission",
                quantiles("vllm:request_queue_time_seconds"),
            ),
            (
                "heatmap",
                "Time in the queue",
                SECONDS,
                "",
                [(f"sum by (le) (rate(vllm:request_queue_time_seconds_bucket{{{HERE}}}[$__rate_interval]))", "{{le}}")],
            ),
            ("graph", "Waiting sequences", COUNT, "", [total("vllm:num_requests_waiting", legend="waiting")]),
            ("graph", "Waiting prompt tokens", COUNT, "", [total("millrace_queue_tokens", legend="waiting")]),
            (
                "graph",
                "Prefill",
                SECONDS,
                "First admission to first token",
                quantiles("vllm:request_prefill_time_seconds"),
            ),
            ("graph", "Decode", SECONDS, "First token to last token", quantiles("vllm:request_decode_time_seconds")),
            (
                "graph",
                "Refused and late calls",
                PER_SECOND,
                "",
                [rate("millrace_requests_total", ',code=~"RESOURCE_EXHAUSTED|DEADLINE_EXCEEDED"', by="code")],
            ),
            ("graph", "Output length", TOKENS, "", quantiles("vllm:request_generation_tokens")),
        ],
    ),
}
SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def variable(name, query, label):
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
        "sort": 1,
    }


def panel(number, kind, title, unit, description, targets, place):
    types = {"stat": "stat", "graph": "timeseries", "heatmap": "heatmap"}
    made = {
        "id": number,
        "type": types[kind],
        "title": title,
        "description": description,
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(65 + i), "datasource": SOURCE, "expr": expression, "legendFormat": legend, "range": True}
            for i, (expression, legend) in enumerate(targets)
        ],
    }
    if kind == "stat":
        made["options"] = {
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
            "colorMode": "none",
            "graphMode": "area",
        }
    if kind == "heatmap":
        made["options"] = {"calculate": False, "yAxis": {"unit": unit}}
        for target in made["targets"]:
            target["format"] = "heatmap"
    return made


def board(name):
    title, panels = BOARDS[name]
    variables = [
        {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
        variable("namespace", "label_values(millrace_build_info, namespace)", "Namespace"),
        variable("fleet", 'label_values(millrace_build_info{namespace=~"$namespace"}, fleet)', "Fleet"),
    ]
    if name == "worker":
        variables.append(variable("worker", f"label_values(millrace_worker_ready{{{HERE}}}, worker)", "Worker"))
    made, x, y, height = [], 0, 0, 0
    for number, (kind, panel_title, unit, description, targets) in enumerate(panels, 1):
        width, tall = (6, 4) if kind == "stat" else (12, 8)
        if x + width > 24 or (height and tall != height):
            x, y = 0, y + height
        height = tall
        made.append(
            panel(number, kind, panel_title, unit, description, targets, {"x": x, "y": y, "w": width, "h": tall})
        )
        x += width
    return {
        "uid": f"millrace-{name}",
        "title": title,
        "tags": ["millrace"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "graphTooltip": 1,
        "templating": {"list": variables},
        "panels": made,
        "links": [
            {
                "type": "dashboards",
                "title": "Millrace",
                "tags": ["millrace"],
                "asDropdown": True,
                "includeVars": True,
                "keepTime": True,
            }
        ],
    }


def main():
    stale = []
    for name in BOARDS:
        path, text = OUT / f"{name}.json", json.dumps(board(name), indent=1) + "\n"
        if "--check" in sys.argv:
            stale += [path.name] if not path.exists() or path.read_text(encoding="utf-8") != text else []
        else:
            path.write_text(text, encoding="utf-8")
    if stale:
        sys.exit(f"not what dashboards.py writes: {', '.join(stale)}")


if __name__ == "__main__":
    main()

"""Promises of the alert rules: each fires when it should and stays quiet just below, by promtool's own evaluation."""

import pathlib
import re
import shutil
import subprocess
import tempfile
import unittest

import yaml

import metrics_table
from chart import CHART, ROOT, VALUES, of_kind, render

RULES_FILE = CHART / "alerts.yaml"
RULES = [rule for group in yaml.safe_load(RULES_FILE.read_text(encoding="utf-8"))["groups"] for rule in group["rules"]]
PROMTOOL = shutil.which("promtool")
MINUTES = 45
ROUTER = 'job="millrace-router",namespace="n",fleet="f",instance="r:1",pod="r"'
WORKER = 'job="millrace-worker",namespace="n",fleet="f",instance="w:1",pod="w-0"'


def router(name, values, labels=""):
    return f"{name}{{{ROUTER}{labels}}}", values


def worker(name, values, labels=""):
    return f"{name}{{{WORKER}{labels}}}", values


def steady(value):
    return f"{value}x{MINUTES}"


def growing(step, start=0):
    """A counter that grows by `step` a minute."""
    return f"{start}+{step}x{MINUTES}"


def calls(code, share):
    """1,000 calls a minute of which `share` end with `code`."""
    return [
        router("millrace_requests_total", growing(1000 * share), f',code="{code}"'),
        router("millrace_requests_total", growing(1000 - 1000 * share), ',code="OK"'),
    ]


def queue_times(slow):
    """100 sequences a minute; `slow` of them waited 15 to 20 s, the others less than 0.3 s."""
    name = "vllm:request_queue_time_seconds_bucket"
    return [
        router(name, growing(100 - slow), ',model_name="m",le="0.3"'),
        router(name, growing(100 - slow), ',model_name="m",le="15"'),
        router(name, growing(100), ',model_name="m",le="20"'),
        router(name, growing(100), ',model_name="m",le="+Inf"'),
    ]


def queue(waiting, running):
    return [
        router("vllm:num_requests_waiting", steady(waiting), ',model_name="m"'),
        router("vllm:num_requests_running", steady(running), ',model_name="m"'),
    ]


def workers(state, number):
    return [router("millrace_workers", steady(number), f',state="{state}"')]


# Alert -> (series at which it fires, series just below, where it must not, nor any other).
CASES = {
    "MillraceRouterDown": ([router("up", steady(0))], [router("up", f"1x10 0 1x{MINUTES}")]),
    "MillraceRouterAbsent": ([worker("up", steady(1))], [router("up", steady(1))]),
    "MillraceWorkerDown": ([worker("up", steady(0))], [worker("up", f"1x30 0 0 1x{MINUTES}")]),
    "MillraceNoReadyWorker": (workers("ready", 0), workers("ready", 1)),
    "MillraceWorkerLost": (workers("lost", 1), workers("lost", 0) + workers("ready", 1) + workers("draining", 1)),
    "MillraceWorkerWithoutRouter": (
        [worker("millrace_engine_router_connected", steady(0))],
        [worker("millrace_engine_router_connected", f"0x3 1x{MINUTES}")],
    ),
    "MillraceRestarting": (
        [worker("process_start_time_seconds", f"1x20 2x4 3x4 4x{MINUTES}")],
        [worker("process_start_time_seconds", f"1x20 2x8 3x{MINUTES}")],
    ),
    "MillraceCertificateExpires": (  # the tests' clock starts at 0
        [worker("millrace_certificate_expiry_timestamp_seconds", steady(6 * 86400), ',certificate="serving"')],
        [worker("millrace_certificate_expiry_timestamp_seconds", steady(7 * 86400 + 3600), ',certificate="serving"')],
    ),
    "MillraceStuck": ([worker("millrace_stuck", steady(1))], [worker("millrace_stuck", f"0x30 1 0x{MINUTES}")]),
    "MillraceQueueNotServed": (queue(5, 0), queue(5, 1)),
    "MillraceQueueTimeHigh": (queue_times(10), queue_times(4)),
    "MillraceQueueNearlyFull": (
        [router("millrace_queue_tokens", steady(81)), router("millrace_queue_limit_tokens", steady(100))],
        queue(79, 9)
        + [
            router("millrace_queue_limit_sequences", steady(100)),
            router("millrace_queue_tokens", steady(79)),
            router("millrace_queue_limit_tokens", steady(100)),
        ],
    ),
    "MillraceCallsNearLimit": (
        [router("millrace_open_calls", steady(81)), router("millrace_calls_limit", steady(100))],
        [router("millrace_open_calls", steady(79)), router("millrace_calls_limit", steady(100))],
    ),
    "MillraceDrainOverTime": (
        [router("millrace_worker_draining", steady(1), ',worker="w-0"')],
        [router("millrace_worker_draining", f"0x30 1x7 0x{MINUTES}", ',worker="w-0"')],
    ),
    "MillraceErrorRatioHigh": (calls("INTERNAL", 0.03), calls("INTERNAL", 0.01) + calls("INVALID_ARGUMENT", 0.5)),
    "MillraceRefusing": (calls("RESOURCE_EXHAUSTED", 0.06), calls("RESOURCE_EXHAUSTED", 0.04)),
    "MillraceDeadlinesMissed": (calls("DEADLINE_EXCEEDED", 0.06), calls("DEADLINE_EXCEEDED", 0.04)),
    "MillraceNonFiniteLogits": (
        [worker("millrace_engine_finished_total", f"0x35 1x{MINUTES}", ',reason="non_finite"')],
        [
            worker("millrace_engine_finished_total", growing(9), ',reason="stop"'),
            worker("millrace_engine_finished_total", f"0x5 1x{MINUTES}", ',reason="non_finite"'),
        ],
    ),
    "MillracePrefixMismatch": (
        [router("millrace_prefix_mismatches_total", f"0x35 1x{MINUTES}")],
        [router("millrace_prefix_mismatches_total", steady(7))],
    ),
    "MillraceKvSaturated": (
        [router("vllm:kv_cache_usage_perc", steady(0.96), ',model_name="m"')],
        [router("vllm:kv_cache_usage_perc", steady(0.94), ',model_name="m"')],
    ),
    "MillracePreemptionStorm": (
        [
            router("vllm:num_preemptions_total", growing(30), ',model_name="m"'),
            router("vllm:request_success_total", growing(100), ',model_name="m",finished_reason="stop"'),
        ],
        [
            router("vllm:num_preemptions_total", growing(10), ',model_name="m"'),
            router("vllm:request_success_total", growing(100), ',model_name="m",finished_reason="stop"'),
        ],
    ),
    "MillraceLeaseStalls": (
        [worker("millrace_engine_stalls_total", growing(3)), worker("millrace_engine_decode_rows_sum", growing(100))],
        [worker("millrace_engine_stalls_total", growing(1)), worker("millrace_engine_decode_rows_sum", growing(100))],
    ),
}


def case(series, expression, samples):
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series],
        "promql_expr_test": [{"expr": expression, "eval_time": "40m", "exp_samples": samples}],
    }


def cases():
    for alert, (firing, quiet) in CASES.items():
        yield case(firing, f'count(ALERTS{{alertname="{alert}",alertstate="firing"}})', [{"labels": "{}", "value": 1}])
        # A series of another metric does not say that there is a router.
        but = "" if alert == "MillraceRouterAbsent" else "MillraceRouterAbsent"
        yield case(quiet, f'count by (alertname) (ALERTS{{alertstate="firing",alertname!="{but}"}})', [])


def promtool(rules, tests):
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "rules.yaml").write_text(rules, encoding="utf-8")
        path = pathlib.Path(folder) / "tests.yaml"
        path.write_text(
            yaml.safe_dump({"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": tests}),
            encoding="utf-8",
        )
        return subprocess.run([PROMTOOL, "test", "rules", path], capture_output=True, text=True, check=False)


class Alerts(unittest.TestCase):
    def test_every_alert_has_a_case(self):
        self.assertEqual(sorted(CASES), sorted(rule["alert"] for rule in RULES))

    @unittest.skipUnless(PROMTOOL, "no promtool")
    def test_rules_are_well_formed(self):
        done = subprocess.run(
            [PROMTOOL, "check", "rules", "--lint-fatal", RULES_FILE], capture_output=True, text=True, check=False
        )
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    @unittest.skipUnless(PROMTOOL, "no promtool")
    def test_each_fires_when_it_should_and_is_quiet_just_below(self):
        tests = list(cases())
        done = promtool(RULES_FILE.read_text(encoding="utf-8"), tests)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        print(f"{len(tests)} cases of {len(CASES)} alerts")

    @unittest.skipUnless(PROMTOOL, "no promtool")
    def test_a_rule_that_never_fires_and_one_that_always_does_are_found(self):
        rules = yaml.safe_load(RULES_FILE.read_text(encoding="utf-8"))
        for wrong in ("vector(1) < 0", "vector(1)"):
            rules["groups"][0]["rules"][0]["expr"] = wrong
            self.assertNotEqual(promtool(yaml.safe_dump(rules), list(cases())[:2]).returncode, 0, wrong)

    def test_every_expression_asks_for_metrics_that_exist(self):
        for rule in RULES:
            self.assertEqual(list(metrics_table.faults(rule["expr"])), [], rule["alert"])

    def test_the_check_of_metrics_can_fail(self):
        self.assertTrue(list(metrics_table.faults("millrace_no_such_thing > 1")))
        self.assertTrue(list(metrics_table.faults('millrace_workers{state="asleep"} > 1')))
        self.assertTrue(list(metrics_table.faults('sum(rate(millrace_queue_tokens{tenant="a"}[1m]))')))

    def test_every_alert_says_what_it_means_and_what_to_do(self):
        readme = (ROOT / "deploy" / "README.md").read_text(encoding="utf-8")
        for rule in RULES:
            for field in ("summary", "description", "runbook"):
                self.assertGreater(len(rule["annotations"][field]), 20, rule["alert"])
            self.assertIn(rule["labels"]["severity"], ("warning", "critical"))
            self.assertIn(f"`{rule['alert']}`", readme)
        for name in re.findall(r"`(Millrace\w+)`", readme):
            self.assertIn(name, CASES, "the README names an alert that is not there")

    def test_the_chart_ships_the_rules_whole(self):
        shipped = of_kind(render(VALUES[0], "--set", "monitoring.prometheusRule=true"), "PrometheusRule")[0]["spec"]
        self.assertEqual(shipped, yaml.safe_load(RULES_FILE.read_text(encoding="utf-8")))


if __name__ == "__main__":
    unittest.main()

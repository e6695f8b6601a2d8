"""Promises about a real cluster and a real Prometheus: every panel shows something, and alerts fire for their faults.

`--draw FOLDER` also draws every panel into FOLDER, by matplotlib: there is no Grafana in a package."""

import pathlib
import signal
import sys
import tempfile
import threading
import time
import unittest

import dashboards_test
from watched_fleet import PROMETHEUS, WINDOW_S, WatchedFleet

DRAW = pathlib.Path(sys.argv.pop(sys.argv.index("--draw") + 1)) if "--draw" in sys.argv else None
if DRAW:
    sys.argv.remove("--draw")
REQUESTS = 60


def shown(expression):
    return expression.replace("[1m]", f"[{WINDOW_S}s]")


@unittest.skipUnless(PROMETHEUS, "no prometheus")
class Panels(unittest.TestCase):
    def test_every_panel_shows_something_under_load_and_no_alert_fires(self):
        with WatchedFleet() as fleet:
            fleet.wait_until_scraped()
            done = {}
            load = threading.Thread(
                target=lambda: done.update(
                    fleet.bench(
                        "--workload",
                        "shared_prefix",
                        "--max_requests",
                        REQUESTS,
                        "--concurrency",
                        6,
                        "--output_tokens",
                        48,
                    )
                )
            )
            load.start()
            load.join()
            fleet.wait_for(
                "the end of the load in the counters", lambda: fleet.value("vllm:request_success_total") >= REQUESTS
            )
            now = time.time()
            empty, asked = [], 0
            for board, title, expression in dashboards_test.expressions():
                ranges = fleet.api("query_range", query=shown(expression), start=now - 60, end=now, step=1)["result"]
                asked += 1
                if not any(sample[1] != "NaN" for series in ranges for sample in series["values"]):
                    empty.append(f"{board}: {title}: {expression}")
            self.assertEqual(empty, [])
            rules = [rule for group in fleet.api("rules")["groups"] for rule in group["rules"]]
            self.assertEqual([rule["name"] for rule in rules if rule["health"] != "ok"], [])
            self.assertEqual(fleet.firing(), set())
            self.assertEqual(fleet.value('millrace_requests_total{code="OK"}'), REQUESTS)
            self.assertEqual(fleet.value("millrace_prefix_mismatches_total"), 0)
            self.assertGreater(fleet.value("vllm:prefix_cache_hits_total"), 0)
            print(f"{asked} expressions have samples; {len(rules)} rules evaluate")
            if DRAW:
                draw(fleet, now)


@unittest.skipUnless(PROMETHEUS, "no prometheus")
class Faults(unittest.TestCase):
    def expect(self, fleet, *alerts):
        for alert in alerts:
            print(f"{alert} fired after {fleet.wait_for(alert, lambda alert=alert: alert in fleet.firing()):.1f} s")

    def later(self, fleet, *requests, concurrency=1):
        thread = threading.Thread(target=lambda: fleet.ask(*requests, concurrency=concurrency), daemon=True)
        thread.start()
        return thread

    def test_lost_workers_and_routers(self):
        with WatchedFleet() as fleet:
            fleet.wait_until_scraped()
            fleet.workers[1].kill()
            self.expect(fleet, "MillraceWorkerDown", "MillraceWorkerLost")
            fleet.workers[0].kill(signal.SIGSTOP)
            self.expect(fleet, "MillraceNoReadyWorker")
            waiting = self.later(fleet, {"prompt": "Water", "max_tokens": 4})
            self.expect(fleet, "MillraceQueueNotServed")
            fleet.wait_for(
                "12 s in the queue",
                lambda: fleet.value("sum_over_time((vllm:num_requests_waiting > bool 0)[30s:1s])") > 12,
            )
            fleet.restart_worker(1)
            self.expect(fleet, "MillraceQueueTimeHigh")
            for _ in range(3):
                before = fleet.value('last_over_time(process_start_time_seconds{pod="w-1"}[5m])')
                fleet.restart_worker(1)
                fleet.wait_for(
                    "a scrape", lambda before=before: fleet.value('process_start_time_seconds{pod="w-1"}') > before
                )
            self.expect(fleet, "MillraceRestarting")
            waiting.join()
            fleet.router.kill()
            self.expect(fleet, "MillraceRouterDown", "MillraceWorkerWithoutRouter")

    def test_drained_worker(self):
        with WatchedFleet() as fleet:
            import grpc
            from grpc_tools import protoc  # noqa: F401

            sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "cluster"))
            from cluster import admin_pb2, admin_pb2_grpc

            fleet.wait_until_scraped()
            with grpc.insecure_channel(fleet.address) as channel:
                admin_pb2_grpc.AdminServiceStub(channel).DrainWorker(admin_pb2.DrainWorkerRequest(worker_id="w-0"))
            self.expect(fleet, "MillraceDrainOverTime")

    def test_a_certificate_that_ends_soon_and_its_renewal(self):
        sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "cluster"))
        from authority import Authority

        with tempfile.TemporaryDirectory() as folder:
            ca = Authority(folder)
            files = ca.issue("serving", hosts=["localhost"], days=7.1)
            flags = (f"--tls_certificate={files.certificate}", f"--tls_key={files.key}")
            with WatchedFleet(workers=1, router_flags=flags) as fleet:
                fleet.wait_until_scraped()
                name = "millrace_certificate_expiry_timestamp_seconds"
                fleet.wait_for("its end in a scrape", lambda: fleet.value(f"{name} - time()") > 7 * 86400)
                fleet.wait_for("quiet above a week", lambda: not fleet.firing())
                ca.issue("serving", hosts=["localhost"], days=6.9)
                self.expect(fleet, "MillraceCertificateExpires")
                ca.issue("serving", hosts=["localhost"], days=30)
                fleet.wait_for("quiet after a renewal", lambda: not fleet.firing())

    def test_too_much_work(self):
        flags = ("--max_queued_sequences=20", "--max_calls=24")
        with WatchedFleet(workers=1, router_flags=flags, worker_flags=("--kv_memory=1MiB", "--max_slots=16")) as fleet:
            fleet.wait_until_scraped()
            # More than the test takes, however fast this machine is: nine in ten are refused at once.
            long = [{"prompt": f"{i} Water over the wheel", "max_tokens": 480, "temperature": 0} for i in range(60000)]
            self.later(fleet, *long, concurrency=60)
            self.expect(
                fleet,
                "MillraceQueueNearlyFull",
                "MillraceRefusing",
                "MillraceCallsNearLimit",
                "MillraceKvSaturated",
                "MillracePreemptionStorm",
            )

    def test_missed_deadlines(self):
        with WatchedFleet(workers=1) as fleet:
            fleet.wait_until_scraped()
            self.later(
                fleet, *[{"prompt": "Water", "max_tokens": 400, "deadline_ms": 20} for _ in range(30000)], concurrency=4
            )
            self.expect(fleet, "MillraceDeadlinesMissed")


def draw(fleet, now):
    """Every panel at its place, one PNG a dashboard."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    DRAW.mkdir(parents=True, exist_ok=True)
    for name, board in dashboards_test.BOARDS.items():
        height = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in board["panels"])
        figure = pyplot.figure(figsize=(16, height * 0.4))
        for panel in board["panels"]:
            place = panel["gridPos"]
            axes = figure.add_axes(
                (
                    place["x"] / 24 + 0.03,
                    1 - (place["y"] + place["h"]) / height + 0.012,
                    place["w"] / 24 - 0.045,
                    place["h"] / height - 0.035,
                )
            )
            axes.set_title(f'{panel["title"]} ({panel["fieldConfig"]["defaults"]["unit"]})', fontsize=8)
            axes.tick_params(labelsize=6)
            for target in panel["targets"]:
                for series in fleet.api(
                    "query_range", query=shown(dashboards_test.plain(target["expr"])), start=now - 60, end=now, step=1
                )["result"]:
                    legend = target["legendFormat"]
                    for label, value in series["metric"].items():
                        legend = legend.replace("{{" + label + "}}", value)
                    points = [(at - now, float(value)) for at, value in series["values"]]
                    axes.plot(*zip(*points), label=legend, linewidth=1)
            axes.set_ylim(bottom=0)
            axes.legend(fontsize=5, loc="upper left")
        figure.savefig(DRAW / f"{name.removesuffix('.json')}.png", dpi=80)
        pyplot.close(figure)


if __name__ == "__main__":
    if not PROMETHEUS:
        print("SKIPPED: no prometheus here")
    unittest.main()

"""Promises of the Grafana dashboards. They were never opened in a Grafana: there is none in a package."""

import json
import re
import subprocess
import sys
import unittest

import metrics_table
from chart import CHART, FLEET, ROOT, VALUES, of_kind, render

FOLDER = CHART / "dashboards"
BOARDS = {path.name: json.loads(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.json"))}


def plain(expression, values=".*"):
    """An expression as Grafana sends it."""
    expression = re.sub(r"\$__(rate_interval|range)", "1m", expression)
    return re.sub(r"\$\w+", values, expression)


def expressions(boards=None):
    """(board, panel's title, expression), variables filled in."""
    for name, board in (boards or BOARDS).items():
        for panel in board["panels"]:
            for target in panel["targets"]:
                yield name, panel["title"], plain(target["expr"])


class Dashboards(unittest.TestCase):
    def test_they_are_what_their_source_writes(self):
        done = subprocess.run(
            [sys.executable, ROOT / "deploy" / "grafana" / "dashboards.py", "--check"],
            capture_output=True,
            text=True,
            check=False,
        )
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_every_expression_asks_for_metrics_that_exist(self):
        asked = 0
        for board, title, expression in expressions():
            self.assertEqual(list(metrics_table.faults(expression)), [], f"{board}: {title}: {expression}")
            asked += 1
        print(f"{asked} expressions in {len(BOARDS)} dashboards")

    def test_every_variable_is_known_and_its_query_too(self):
        for name, board in BOARDS.items():
            known = {"datasource", "__rate_interval", "__range"} | {
                variable["name"] for variable in board["templating"]["list"]
            }
            used = set(re.findall(r"\$\{?(\w+)", json.dumps(board)))
            self.assertLessEqual(used - {"__all"}, known, name)
            for variable in board["templating"]["list"]:
                if variable["type"] == "query":
                    inner = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"])
                    self.assertEqual(list(metrics_table.faults(plain(inner.group(1)))), [], name)

    def test_panels_have_their_own_place_and_number(self):
        for name, board in BOARDS.items():
            taken = set()
            for panel in board["panels"]:
                place = panel["gridPos"]
                cells = {
                    (x, y)
                    for x in range(place["x"], place["x"] + place["w"])
                    for y in range(place["y"], place["y"] + place["h"])
                }
                self.assertFalse(cells & taken, f"{name}: {panel['title']}")
                self.assertLessEqual(place["x"] + place["w"], 24)
                taken |= cells
            self.assertEqual(len({panel["id"] for panel in board["panels"]}), len(board["panels"]))
            self.assertEqual(board["uid"], "millrace-" + name.removesuffix(".json"))

    def test_the_chart_ships_them_whole(self):
        data = of_kind(render(VALUES[0]), "ConfigMap")[0]["data"]
        self.assertEqual(
            {name: json.loads(text) for name, text in data.items()},
            {"millrace-" + name: board for name, board in BOARDS.items()},
        )
        self.assertLess(sum(map(len, data.values())), 1 << 20, f"{FLEET}: a ConfigMap holds 1 MiB")


if __name__ == "__main__":
    unittest.main()

"""Promises of the image: what is in it, and that its programs run as the chart runs them.

Needs root, buildah, podman and runc; without them every test here is skipped, and says so. MILLRACE_BIN_DIR names the
programs (default build/cpu/bin)."""

import json
import os
import pathlib
import shutil
import stat
import subprocess
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
BIN = pathlib.Path(os.environ.get("MILLRACE_BIN_DIR", ROOT / "build" / "cpu" / "bin"))
MODEL = ROOT / "tests" / "fixtures" / "qwen3-tiny-untied"
IMAGE = "localhost/millrace:test"
ENVIRONMENT = os.environ | {"STORAGE_DRIVER": "vfs", "BUILDAH_ISOLATION": "chroot"}
PODMAN = ["podman", "--cgroup-manager", "cgroupfs", "--runtime", "runc"]
# As the chart's security contexts, and no network but loopback.
CONFINED = [
    "--read-only",
    "--read-only-tmpfs=false",
    "--cap-drop",
    "all",
    "--security-opt",
    "no-new-privileges",
    "--network",
    "none",
    "--memory",
    "256m",
    "--pids-limit",
    "200",
    "--ulimit",
    "nofile=1024:1024",
    "--ulimit",
    "nproc=4096:4096",
    "--volume",
    f"{MODEL}:/model:ro",
]
PROGRAMS = {"usr/bin/millrace", "usr/bin/millrace-router", "usr/bin/millrace-worker"}
DATA = {"etc/passwd", "etc/group", "etc/nsswitch.conf", "usr/share/millrace/packages"}
LIMIT_MB = 80
MISSING = [tool for tool in ("buildah", "podman", "runc") if shutil.which(tool) is None] + (
    [] if os.geteuid() == 0 else ["root"]
)


def run(*command, check=True):
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=ENVIRONMENT, check=False)
    if check and done.returncode:
        raise AssertionError(f"{command}: {done.stderr}")
    return done


def podman(*arguments, check=True):
    return run(*PODMAN, *arguments, check=check)


@unittest.skipIf(MISSING, f"not here: {', '.join(MISSING)}")
class Container(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        run(ROOT / "deploy" / "container" / "build.sh", BIN, IMAGE)

    def start(self, *command):
        container = podman("run", "--detach", *CONFINED, IMAGE, *command).stdout.strip()
        self.addCleanup(podman, "rm", "--force", "--time", "0", container)
        return container

    def end(self, container):
        podman("stop", "--time", "20", container)
        return int(podman("inspect", "--format", "{{.State.ExitCode}}", container).stdout)

    def await_answer(self, container):
        """An answer of the router in a container, which may still be starting."""
        for _ in range(50):
            done = podman(
                "exec",
                container,
                "/usr/bin/millrace",
                "complete",
                "--router",
                "127.0.0.1:50051",
                "--prompt",
                "Water",
                "--max_tokens",
                "4",
                check=False,
            )
            if done.returncode == 0:
                return done.stdout
        raise AssertionError(podman("logs", container, check=False).stderr)

    def test_it_holds_programs_and_their_libraries_alone(self):
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder) / "root"
            run(ROOT / "deploy" / "container" / "image_root.sh", BIN, root)
            files = {
                str(path.relative_to(root)): path
                for path in root.rglob("*")
                if path.is_file() and not path.is_symlink()
            }
            libraries = {name for name in files if ".so" in name}
            self.assertEqual(set(files), PROGRAMS | DATA | libraries)
            for name, path in files.items():
                mode = path.stat().st_mode
                self.assertFalse(mode & (stat.S_ISUID | stat.S_ISGID | stat.S_IWOTH), name)
                if name not in DATA:
                    self.assertEqual(path.read_bytes()[:4], b"\x7fELF", name)
            packages = (root / "usr/share/millrace/packages").read_text(encoding="utf-8").splitlines()
            size = sum(path.stat().st_size for path in files.values()) / 1e6
            print(
                f"image: {size:.1f} MB; "
                + "; ".join(f"{name} {path.stat().st_size / 1e6:.1f}" for name, path in sorted(files.items()))
            )
            print("libraries of: " + ", ".join(packages))
            self.assertLess(size, LIMIT_MB)
            self.assertEqual(
                {line.split()[0] for line in packages} & {"bash", "dash", "coreutils", "perl-base", "apt"}, set()
            )
        mounted = json.loads(podman("image", "inspect", IMAGE).stdout)[0]
        self.assertEqual(mounted["Config"]["User"], "10001:10001")

    def test_two_builds_are_the_same_image(self):
        def layers():
            return json.loads(podman("image", "inspect", IMAGE).stdout)[0]["RootFS"]["Layers"]

        first = layers()
        run(ROOT / "deploy" / "container" / "build.sh", BIN, IMAGE)
        self.assertEqual(layers(), first)

    def test_there_is_no_shell(self):
        self.assertNotEqual(podman("run", "--rm", *CONFINED, IMAGE, "/bin/sh", "-c", "true", check=False).returncode, 0)

    def test_a_worker_runs_confined_and_ends_at_sigterm_as_the_first_process(self):
        container = self.start(
            "/usr/bin/millrace-worker",
            "--model",
            "/model",
            "--kv_memory",
            "16MiB",
            "--threads",
            "1",
            "--listen",
            "127.0.0.1:50061",
        )
        self.await_log(container, "ready")
        pid = podman("inspect", "--format", "{{.State.Pid}}", container).stdout.strip()
        status = dict(
            line.split(":\t", 1)
            for line in pathlib.Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
            if ":\t" in line
        )
        self.assertEqual(status["Uid"].split(), ["10001"] * 4)
        self.assertEqual(int(status["CapEff"], 16), 0)
        self.assertEqual((status["NoNewPrivs"], status["Seccomp"], status["NSpid"].split()[-1]), ("1", "2", "1"))
        self.assertEqual(self.end(container), 0)

    def await_log(self, container, word):
        for _ in range(100):
            logs = podman("logs", container).stdout
            if word in logs:
                return logs
        raise AssertionError(f"no '{word}': {logs}")

    def test_router_and_worker_answer_without_writing_anything(self):
        container = self.start(
            "/usr/bin/millrace", "up", "--model", "/model", "--kv_memory", "16MiB", "--threads", "1", "--port", "50051"
        )
        self.assertTrue(self.await_answer(container))
        # podman puts its own hosts and resolv.conf into /etc.
        self.assertLessEqual(set(podman("diff", container).stdout.splitlines()), {"C /etc"})
        self.assertEqual(self.end(container), 0)


if __name__ == "__main__":
    if MISSING:
        print(f"SKIPPED: the image was neither built nor started here; missing: {', '.join(MISSING)}")
    unittest.main()

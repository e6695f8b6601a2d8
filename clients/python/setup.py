"""Makes the message classes, millrace.v1, from the protos of the source tree as part of every build."""
import pathlib

from setuptools import setup
from setuptools.command.build_py import build_py

PROTOS = pathlib.Path(__file__).resolve().parent.parent.parent / "protos"


class BuildWithMessages(build_py):
    def run(self):
        super().run()
        from grpc_tools import protoc

        out = pathlib.Path(self.build_lib)
        names = sorted(str(path.relative_to(PROTOS)) for path in (PROTOS / "millrace" / "v1").glob("*.proto"))
        outputs = [f"--{kind}_out={out}" for kind in ("python", "pyi", "grpc_python")]
        if not names or protoc.main(["protoc", f"-I{PROTOS}", *outputs, *names]):
            raise SystemExit(f"cannot make message classes of {names} in {PROTOS}")
        (out / "millrace" / "v1" / "__init__.py").touch()


setup(cmdclass={"build_py": BuildWithMessages})

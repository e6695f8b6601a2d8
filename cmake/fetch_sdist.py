"""Downloads one source distribution with pip's own index and proxy settings, without building its metadata.

fetch_sdist.py NAME VERSION FILE
"""
import os
import sys

from pip._internal.commands import create_command
from pip._vendor.packaging.specifiers import SpecifierSet

name, version, path = sys.argv[1:]
command = create_command("download")
options, _ = command.parse_args(["--no-deps", "--no-binary", name, name])
with command.main_context():
    session = command.get_default_session(options)
    finder = command._build_package_finder(options, session)
    candidate = finder.find_best_candidate(name, SpecifierSet("==" + version)).best_candidate
    if candidate is None:
        sys.exit(f"the package index has no source of {name} {version}")
    reply = session.get(candidate.link.url_without_fragment, headers={"Accept-Encoding": "identity"}, stream=True)
    reply.raise_for_status()
    with open(path + ".part", "wb") as out:
        for chunk in reply.iter_content(1 << 20):
            out.write(chunk)
os.replace(path + ".part", path)

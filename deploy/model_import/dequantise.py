"""GGUF block formats to float32 and float32 to bfloat16, on numpy arrays of whole rows.

A row is a sequence of blocks; q is an element's integer, d its block's fp16 scale, m its block's fp16 minimum.
"""

import numpy as np


def _f16(blocks, start):
    return np.ascontiguousarray(blocks[:, start : start + 2]).view("<f2").astype(np.float32)


def _nibbles(qs):
    """Low nibbles are the first half of a block, high nibbles the second."""
    return np.concatenate([qs & 15, qs >> 4], axis=1)


def _fifth_bits(blocks, start):
    return np.unpackbits(np.ascontiguousarray(blocks[:, start : start + 4]), axis=1, bitorder="little") << 4


def _q4_0(b):
    return _f16(b, 0) * (_nibbles(b[:, 2:]).astype(np.float32) - 8)


def _q4_1(b):
    return _f16(b, 0) * _nibbles(b[:, 4:]).astype(np.float32) + _f16(b, 2)


def _q5_0(b):
    return _f16(b, 0) * ((_nibbles(b[:, 6:]) | _fifth_bits(b, 2)).astype(np.float32) - 16)


def _q5_1(b):
    return _f16(b, 0) * (_nibbles(b[:, 8:]) | _fifth_bits(b, 4)).astype(np.float32) + _f16(b, 2)


def _q8_0(b):
    return _f16(b, 0) * np.ascontiguousarray(b[:, 2:]).view(np.int8).astype(np.float32)


def _k_scales_and_minima(b):
    """Eight 6-bit scales and eight 6-bit minima in 12 bytes: four whole ones each, then four split into 4 + 2 bits."""
    low, middle, high = b[:, 4:8], b[:, 8:12], b[:, 12:16]
    scales = np.concatenate([low & 63, (high & 15) | (low >> 6) << 4], axis=1)
    minima = np.concatenate([middle & 63, (high >> 4) | (middle >> 6) << 4], axis=1)
    return (_f16(b, 0) * scales.astype(np.float32))[:, :, None], (_f16(b, 2) * minima.astype(np.float32))[:, :, None]


def _k_nibbles(qs):
    """128 bytes to [8, 32]: each 32 bytes hold two sub-blocks, low nibbles first."""
    groups = qs.reshape(-1, 4, 1, 32)
    return np.concatenate([groups & 15, groups >> 4], axis=2).reshape(-1, 8, 32)


def _q4_k(b):
    scales, minima = _k_scales_and_minima(b)
    return scales * _k_nibbles(b[:, 16:]).astype(np.float32) - minima


def _q5_k(b):
    scales, minima = _k_scales_and_minima(b)
    fifth = (b[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[None, :, None] & 1) << 4
    return scales * (_k_nibbles(b[:, 48:]) | fifth).astype(np.float32) - minima


def _q6_k(b):
    """Two halves of 128: [low nibbles of 64, high nibbles of 64], with two bits more in 32 bytes; a scale per 16."""
    low = b[:, :128].reshape(-1, 2, 1, 64)
    low = np.concatenate([low & 15, low >> 4], axis=2).reshape(-1, 2, 4, 32)
    high = b[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[None, None, :, None] & 3
    q = (low | high << 4).astype(np.float32).reshape(-1, 16, 16) - 32
    scales = _f16(b, 208) * np.ascontiguousarray(b[:, 192:208]).view(np.int8).astype(np.float32)
    return scales[:, :, None] * q


def _f32(b):
    return b.view("<f4")


def _half(b):
    return b.view("<f2").astype(np.float32)


def _bf16(b):
    return (b.view("<u2").astype(np.uint32) << 16).view(np.float32)


# GGUF type id: name, elements per block, bytes per block, blocks (uint8 [n, bytes]) to float32 [n, elements].
FORMATS = {
    0: ("F32", 1, 4, _f32),
    1: ("F16", 1, 2, _half),
    2: ("Q4_0", 32, 18, _q4_0),
    3: ("Q4_1", 32, 20, _q4_1),
    6: ("Q5_0", 32, 22, _q5_0),
    7: ("Q5_1", 32, 24, _q5_1),
    8: ("Q8_0", 32, 34, _q8_0),
    12: ("Q4_K", 256, 144, _q4_k),
    13: ("Q5_K", 256, 176, _q5_k),
    14: ("Q6_K", 256, 210, _q6_k),
    30: ("BF16", 1, 2, _bf16),
}


def dequantise(type_id, rows):
    """uint8 [rows, row bytes] to float32 [rows, elements]."""
    _, _, block_bytes, convert = FORMATS[type_id]
    blocks = np.ascontiguousarray(rows).reshape(-1, block_bytes)
    with np.errstate(invalid="ignore", over="ignore"):
        return np.asarray(convert(blocks), np.float32).reshape(rows.shape[0], -1)


def to_bf16(values):
    """Rounds to nearest even. None when a value is not finite or leaves the range."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = ((bits + (0x7FFF + (bits >> 16 & 1))) >> 16).astype("<u2")
    infinite = 0x7F80
    if np.any((bits >> 16 & infinite) == infinite) or np.any((rounded & infinite) == infinite):
        return None
    return rounded

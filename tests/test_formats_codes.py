"""Codes in words: every format, width and shape against packing as it is written down, one code at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swiftkit.formats import awq, compressed, gptq
from swiftkit.formats.codes import Codes, pack, unpack

SIZES = st.integers(1, 3)
GROUPS = st.sampled_from([8, 16, 32, -1])


def drawn(
    rows: int, width: int, bits: int, group: int, seed: int, *, symmetric: bool, least: int = 0
) -> Codes:
    """Random codes, scales and zero points."""
    rng = np.random.default_rng(seed)
    size = width if group == -1 else group
    values = torch.from_numpy(rng.integers(0, 1 << bits, (rows, width), dtype=np.uint8))
    scales = torch.from_numpy(rng.uniform(1e-3, 1, (rows, width // size))).half()
    middle = torch.full(scales.shape, 1 << (bits - 1), dtype=torch.uint8)
    zeros = torch.from_numpy(rng.integers(least, 1 << bits, tuple(scales.shape), dtype=np.uint8))
    return Codes(values, scales, middle if symmetric else zeros, bits, size)


def same(one: Codes, other: Codes) -> None:
    for name in ("values", "scales", "zeros"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name
    assert torch.equal(one.dequantize(), other.dequantize())


def word(number: int) -> int:
    """As a signed number of 32 bits."""
    return number - (1 << 32) if number >> 31 else number


def stream(codes: list[int], bits: int) -> list[int]:
    """auto-gptq's order for any bits: one long number, the first code lowest, cut into words."""
    whole = sum(code << place * bits for place, code in enumerate(codes))
    return [word(whole >> 32 * at & 0xFFFFFFFF) for at in range(len(codes) * bits // 32)]


def three_bits_as_auto_gptq_writes_them(codes: list[int]) -> list[int]:
    """Its 3-bit packing, case by case: 10 codes, one over the edge, 10, one over the edge, 10."""
    words = []
    for at in range(0, len(codes), 32):
        part = codes[at : at + 32]
        one = sum(part[j] << 3 * j for j in range(10)) | part[10] << 30
        two = part[10] >> 2 & 1 | sum(part[11 + j] << 3 * j + 1 for j in range(10)) | part[21] << 31
        three = part[21] >> 1 & 3 | sum(part[22 + j] << 3 * j + 2 for j in range(10))
        words += [word(number & 0xFFFFFFFF) for number in (one, two, three)]
    return words


@settings(max_examples=25, deadline=None)
@given(bits=st.sampled_from([1, 2, 3, 4, 8]), rows=SIZES, blocks=SIZES, seed=st.integers(0, 2**31))
def test_words_are_one_stream_of_bits(bits: int, rows: int, blocks: int, seed: int) -> None:
    values = drawn(rows, 32 * blocks, bits, -1, seed, symmetric=True).values
    packed = pack(values, bits)
    assert packed.tolist() == [stream(row, bits) for row in values.tolist()]
    if bits == 3:
        assert packed.tolist() == [three_bits_as_auto_gptq_writes_them(row) for row in values.tolist()]
    assert torch.equal(unpack(packed, bits), values)


@settings(max_examples=25, deadline=None)
@given(
    bits=st.sampled_from([3, 4, 8]), rows=SIZES, blocks=SIZES, group=GROUPS, version=st.sampled_from([1, 2]),
    symmetric=st.booleans(), seed=st.integers(0, 2**31),
)  # fmt: skip
def test_gptq(
    bits: int, rows: int, blocks: int, group: int, version: int, symmetric: bool, seed: int
) -> None:
    codes = drawn(32 * rows, 32 * blocks, bits, group, seed, symmetric=symmetric, least=2 - version)
    packed = gptq.pack_linear(codes, version=version)
    for column, written in zip(codes.values.tolist(), packed["qweight"].T.tolist(), strict=True):
        assert written == stream(column, bits)
    for zeros, written in zip(codes.zeros.T.tolist(), packed["qzeros"].tolist(), strict=True):
        assert written == stream([zero - (version == 1) for zero in zeros], bits)
    assert packed["g_idx"].tolist() == [column // codes.group_size for column in range(32 * blocks)]
    assert {name: tensor.dtype for name, tensor in packed.items()} == {
        "qweight": torch.int32, "qzeros": torch.int32, "scales": torch.float16, "g_idx": torch.int32,
    }  # fmt: skip
    same(gptq.unpack_linear(packed, bits=bits, version=version), codes)


@settings(max_examples=25, deadline=None)
@given(rows=SIZES, blocks=SIZES, group=GROUPS, symmetric=st.booleans(), seed=st.integers(0, 2**31))
def test_awq(rows: int, blocks: int, group: int, symmetric: bool, seed: int) -> None:
    codes = drawn(8 * rows, 32 * blocks, 4, group, seed, symmetric=symmetric)
    packed = awq.pack_linear(codes)
    for name, written in (("qweight", codes.values.T.tolist()), ("qzeros", codes.zeros.T.tolist())):
        for row, words in zip(written, packed[name].tolist(), strict=True):
            for at, found in enumerate(words):
                eight = row[8 * at : 8 * at + 8]
                assert found == word(sum(eight[(0, 2, 4, 6, 1, 3, 5, 7)[j]] << 4 * j for j in range(8)))
    same(awq.unpack_linear(packed), codes)


@settings(max_examples=25, deadline=None)
@given(bits=st.sampled_from([4, 8]), rows=SIZES, blocks=SIZES, group=GROUPS, seed=st.integers(0, 2**31))
def test_compressed_tensors(bits: int, rows: int, blocks: int, group: int, seed: int) -> None:
    codes = drawn(rows, 32 * blocks, bits, group, seed, symmetric=True)
    packed = compressed.pack_linear(codes)
    per_word = 32 // bits
    for row, words in zip(codes.values.tolist(), packed["weight_packed"].tolist(), strict=True):
        for at, found in enumerate(words):
            own = row[per_word * at : per_word * (at + 1)]
            assert found == word(sum(code << bits * j for j, code in enumerate(own)))
    assert packed["weight_shape"].tolist() == [rows, 32 * blocks]
    same(compressed.unpack_linear(packed, bits=bits), codes)


@pytest.mark.parametrize(
    ("check", "shape", "words"),
    [
        (gptq.shape_faults, (96, 80), ["80 columns", "32"]),
        (gptq.shape_faults, (90, 64), ["90 rows", "32"]),
        (awq.shape_faults, (90, 64), ["90 rows", "8"]),
        (compressed.shape_faults, (90, 60), ["60 columns", "8"]),
    ],
)
def test_shapes_that_cannot_be_packed_are_said(check: Any, shape: tuple[int, int], words: list[str]) -> None:
    (fault,) = check(*shape, bits=4)
    assert all(part in fault for part in words)
    assert check(96, 64, bits=4) == []

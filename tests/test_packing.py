"""packing: every width against an independent bit-by-bit oracle."""

import numpy as np
import pytest
import torch

from edkm_cli.packing import Packed, as_kept, as_numbers, check, fault, pack, packed_width, to_stored, unpack


def oracle(indices: np.ndarray, bits: int) -> np.ndarray:
    """Little-endian bit stream by numpy's packbits, one bit at a time."""
    stream = ((indices[:, :, None] >> np.arange(bits)) & 1).reshape(len(indices), -1).astype(np.uint8)
    return np.packbits(stream, axis=1, bitorder="little")


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("columns", [1, 2, 3, 7, 8, 9, 13, 64, 101])
def test_pack_is_the_documented_bit_stream_and_unpack_its_inverse(bits, columns):
    indices = torch.randint(0, 2**bits, (5, columns), dtype=torch.uint8, generator=torch.Generator().manual_seed(bits))
    packed = pack(indices, bits)
    assert packed.shape == (5, packed_width(columns, bits))
    np.testing.assert_array_equal(packed.numpy(), oracle(indices.numpy(), bits))
    assert torch.equal(unpack(packed, bits, columns), indices)


def test_the_first_three_bytes_of_eight_3_bit_indices():
    assert pack(torch.arange(8, dtype=torch.uint8)[None], 3).tolist() == [[0b10001000, 0b11000110, 0b11111010]]


def test_out_of_range_indices_and_wrong_widths_are_refused():
    with pytest.raises(ValueError, match="below 2"):
        pack(torch.tensor([[8]], dtype=torch.uint8), 3)
    with pytest.raises(ValueError, match="need 3 uint8 bytes"):
        unpack(torch.zeros(1, 4, dtype=torch.uint8), 3, 8)
    with pytest.raises(ValueError, match="1 to 8"):
        pack(torch.zeros(1, 4, dtype=torch.uint8), 9)


@pytest.mark.parametrize(
    "stored", [torch.arange(0, 112, 3, dtype=torch.uint8), torch.arange(9).to(torch.float8_e4m3fn)]
)
def test_a_table_of_eight_bits_is_kept_in_float16_unless_that_would_round_it(stored):
    for power, dtype in ((0, torch.float16), (-14, torch.float16), (-30, torch.float32), (20, torch.float32)):
        kept = as_kept(stored, torch.tensor([2.0**power]))
        assert kept.dtype == dtype
        assert torch.equal(kept.double(), as_numbers(stored).double() * 2.0**power)
    assert torch.equal(as_kept(stored, None).float(), as_numbers(stored))


def test_a_table_that_is_not_finite_and_factors_that_are_not_positive_are_faults():
    stored = to_stored(torch.tensor([float("nan"), float("inf"), -float("inf")]), "float8_e3m4")
    assert bool(as_numbers(stored).isnan().all())
    assert fault("lut", stored) == "finite, but holds NaN or Inf"
    assert fault("factors", torch.tensor([1.0, 0.0])) == "positive"


def test_a_table_in_float64_and_a_tile_without_rows_are_refused():
    packed = Packed(torch.zeros(12, 15, dtype=torch.uint8), torch.zeros(12, 1, dtype=torch.float64), None, 3, None)
    with pytest.raises(ValueError, match="the table must be"):
        check(40, packed)
    with pytest.raises(ValueError, match="must divide"):
        check(40, packed._replace(tile=(0, 40)))

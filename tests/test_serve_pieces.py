"""Pieces of packed matrices: what processes hold, decoded, is what the whole matrix holds there."""

import itertools

import pytest
import torch

from edkm_cli.errors import UserError
from edkm_cli.granularity import Granularity
from edkm_cli.packing import Packed, pack
from edkm_cli.runtime import lut_linear_torch
from edkm_cli.serve.pieces import piece_of, stacked_table, stacked_tile, stacks


def matrix(rows, columns, bits, granularity, seed=0):
    """(indices, tables, the dense matrix they stand for)."""
    generator = torch.Generator().manual_seed(seed)
    tile = Granularity.parse(granularity).tile(rows, columns)
    groups = rows // tile[0] * (columns // tile[1])
    indices = pack(torch.randint(2**bits, (rows, columns), generator=generator).to(torch.uint8), bits)
    table = torch.randn(groups, 2**bits, generator=generator).sort(1).values
    return indices, table, lut_linear_torch.dense(Packed(indices, table, None, bits, tile), columns, torch.float32)


def decoded(indices, table, bits, tile, columns):
    return lut_linear_torch.dense(Packed(indices, table, None, bits, tile), columns, torch.float32)


def piece(shape, bits, granularity, rows, columns, name="m"):
    return piece_of(name, shape, bits, Granularity.parse(granularity), rows=rows, columns=columns)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("granularity", ["tensor", "row:1", "row:4", "block:4x6"])
def test_pieces_decode_to_their_part_of_the_matrix(bits, granularity):
    shape = (24, 42)  # halves of 21 columns end inside a byte
    indices, table, dense = matrix(*shape, bits, granularity)
    blocks = granularity.startswith("block")
    spans = [range(42), range(18), range(18, 42)] if blocks else [range(42), range(21), range(21, 42), range(5, 8)]
    for rows, columns in itertools.product([range(24), range(12), range(12, 24), range(6, 9)], spans):
        part = piece(shape, bits, granularity, rows, columns)
        cut, own = part.cut_indices(indices), part.cut_table(table)
        assert cut.shape == (len(rows), part.bytes_a_row)
        assert own.shape == (part.groups, 2**bits)
        wanted = dense[rows.start : rows.stop, columns.start : columns.stop]
        assert torch.equal(decoded(cut, own, bits, part.tile, len(columns)), wanted)


def test_bits_behind_the_last_column_of_a_piece_are_zero():
    indices, _, _ = matrix(4, 42, 3, "row:1")
    cut = piece((4, 42), 3, "row:1", range(4), range(21)).cut_indices(indices | 0xFF)
    assert not bool((cut[:, -1] >> (63 % 8)).any())  # 63 bits of indices in 8 bytes


@pytest.mark.parametrize(("granularity", "tile_rows"), [("tensor", 8), ("row:1", 1), ("row:2", 2), ("block:4x6", 4)])
def test_matrices_with_one_input_are_one_packed_matrix(granularity, tile_rows):
    heights, bits = (24, 8, 8), 3
    parts = [matrix(height, 12, bits, granularity, seed) for seed, height in enumerate(heights)]
    pieces = [
        piece((h, 12), bits, granularity, range(h), range(12), name=str(h) + n)
        for h, n in zip(heights, "qkv", strict=True)
    ]
    tile = stacked_tile(pieces)
    assert tile[0] == tile_rows
    table = torch.cat(stacked_table(pieces, [table for _, table, _ in parts]))
    joined = decoded(torch.cat([indices for indices, _, _ in parts]), table, bits, tile, 12)
    assert torch.equal(joined, torch.cat([dense for _, _, dense in parts]))


def test_matrices_are_joined_where_bits_agree_and_tables_stay_small():
    def of(rows, bits=3, columns=512, granularity="tensor"):
        return piece((rows, columns), bits, granularity, range(rows), range(columns))

    sizes = [[len(p.rows) for p in stack] for stack in stacks([of(576), of(192), of(192)])]
    assert sizes == [[576, 192, 192]]
    assert [len(stack) for stack in stacks([of(64), of(64, bits=4), of(64, bits=4)])] == [1, 2]
    assert [len(stack) for stack in stacks([of(64, columns=16), of(63, columns=16)])] == [1, 1]  # a table for each row


def test_blocks_that_a_border_cuts_are_refused_by_name():
    with pytest.raises(UserError, match=r"layers\.0\.down_proj: blocks of 8 columns must divide the 20 columns"):
        piece((16, 40), 3, "block:4x8", range(16), range(20, 40), name="layers.0.down_proj")


def test_tensors_of_another_shape_are_refused_by_name():
    part = piece((16, 40), 3, "row:1", range(16), range(40), name="q")
    with pytest.raises(UserError, match=r"q\.indices must be \(16, 15\), got \(16, 16\)"):
        part.cut_indices(torch.zeros(16, 16, dtype=torch.uint8))
    with pytest.raises(UserError, match=r"q\.lut must be \(16, 8\), got \(8, 8\)"):
        part.cut_table(torch.zeros(8, 8))

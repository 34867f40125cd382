"""Uniquify and Shard: exact, verified, composable; refusals are clear."""

import math

import pytest
import torch
import torch.distributed as dist

from edkm_cli.errors import UserError
from edkm_cli.memory import MarshalSavedTensors, Shard, Uniquify
from edkm_cli.memory.mover import Mover, Statistics
from edkm_cli.memory.shard import _checksum


def keep_as_is():
    return Mover(Statistics(), prefetch=0)


def attention_layer(weight, centroids):
    difference = weight.unsqueeze(-1) - centroids
    attention = torch.softmax(difference * difference * -2000, -1)
    return attention @ ((attention * difference).sum((0, 1)) / attention.sum((0, 1)) + centroids)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("map_dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.bool])
@pytest.mark.parametrize("columns", [1, 3, 8])
def test_a_map_that_is_a_function_of_its_key_comes_back_bit_for_bit(dtype, map_dtype, columns):
    key = (torch.randn(40, 50) * 0.02).to(dtype)
    table = torch.randn(65536, columns).to(map_dtype)
    rows = table[key.view(-1).view(torch.int16).int() & 0xFFFF]
    mover, codec = keep_as_is(), Uniquify([key])
    stored = codec.pack(rows.reshape(-1), mover.store)
    distinct = key.unique().numel()
    assert torch.equal(stored.load(), rows.reshape(-1))
    assert mover.statistics.moved_bytes == 2 * key.numel() + distinct * columns * rows.itemsize
    assert (codec.index_bytes, codec.table_bytes) == (2 * key.numel(), distinct * columns * rows.itemsize)


def test_all_65536_bit_patterns_nan_and_negative_zero_included():
    key = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    key = torch.cat((key, key.flip(0)))
    rows = key.repeat_interleave(2)
    stored = Uniquify([key]).pack(rows, keep_as_is().store)
    assert torch.equal(stored.load().view(torch.int16), rows.view(torch.int16))


def test_maps_of_one_weight_share_one_index_list_as_long_as_it_lives():
    key = torch.randn(1000).to(torch.bfloat16)
    mover, codec = keep_as_is(), Uniquify([key])
    first, second = codec.pack(key * 2, mover.store), codec.pack(key.repeat_interleave(4) * 3, mover.store)
    distinct = key.unique().numel()
    assert mover.statistics.stored_bytes == 2000 + distinct * 2 * (1 + 4)
    del first
    assert mover.statistics.stored_bytes == 2000 + distinct * 2 * 4
    assert torch.equal(second.load(), key.repeat_interleave(4) * 3)
    del second
    assert mover.statistics.stored_bytes == 0


def test_a_key_that_was_written_to_gets_a_new_index_list():
    key = torch.randn(1000).to(torch.bfloat16)
    mover, codec = keep_as_is(), Uniquify([key])
    old_values = key.clone()
    before = codec.pack(key * 2, mover.store)
    key.copy_(torch.randn(1000))
    after = codec.pack(key * 2, mover.store)
    assert torch.equal(before.load(), old_values * 2)
    assert torch.equal(after.load(), key * 2)


@pytest.mark.parametrize("position", [0, 5000, 9999])
def test_a_tensor_that_is_not_a_function_of_the_key_falls_back(position):
    key = torch.zeros(10000, dtype=torch.bfloat16)
    values = torch.ones(10000)
    values[position] = math.nextafter(1.0, 2.0) + 1e-7
    codec = Uniquify([key])
    assert codec.pack(values, keep_as_is().store) is None
    assert codec.refused == 1


def test_a_tensor_of_another_length_is_not_looked_at():
    codec = Uniquify([torch.zeros(10, dtype=torch.float16)])
    assert codec.pack(torch.zeros(15), keep_as_is().store) is None
    assert codec.refused == 0


def test_a_float32_key_is_refused_with_a_remedy():
    with pytest.raises(UserError, match=r"float16 or int16, got torch.float32; cast"):
        Uniquify([torch.zeros(4)])


def test_gradients_under_uniquify_are_bit_identical_and_activations_fall_back():
    torch.manual_seed(0)
    weight = (torch.randn(64, 64) * 0.02).bfloat16().requires_grad_()
    centroids = torch.linspace(-0.04, 0.04, 8).bfloat16()
    x = torch.randn(64, 64).bfloat16().requires_grad_()  # as long as the weight, and no function of it

    def gradients():
        loss = torch.nn.functional.linear(x * 1, attention_layer(weight, centroids)).float().square().sum()
        return torch.autograd.grad(loss, (weight, x))

    expected = gradients()
    codec = Uniquify([weight])
    marshal = MarshalSavedTensors(force=True, codecs=(codec,), min_bytes=0)
    with marshal:
        found = gradients()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert codec.packed >= 2
    assert codec.refused >= 1
    assert marshal.statistics.stored_bytes == 0


def test_shard_alone_changes_nothing():
    assert Shard().pack(torch.ones(8), keep_as_is().store) is None


def test_checksums_tell_content_and_order_apart():
    data = torch.randint(0, 256, (100_003,), dtype=torch.uint8)
    swapped = data.clone()
    swapped[:8], swapped[8:16] = data[8:16], data[:8]
    flipped = data.clone()
    flipped[-1] ^= 1
    high = data.clone()
    high[7] ^= 128
    assert len({_checksum(each) for each in (data, data.clone(), swapped, flipped, high)}) == 4


def _learner(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=3)
    try:
        mover = keep_as_is()
        for elements in (1, 2, 3, 10, 1001):  # fewer bytes than learners, uneven slices
            for dtype in (torch.uint8, torch.bfloat16, torch.float64):
                flat = torch.arange(elements).to(dtype)
                before = mover.statistics.stored_bytes
                stored = Shard().pack(flat, mover.store)
                share = -(-elements * flat.itemsize // 3)
                assert mover.statistics.stored_bytes - before <= share
                assert torch.equal(stored.load(), flat)
                del stored

        torch.manual_seed(0)
        weight = (torch.randn(32, 48) * 0.02).bfloat16().requires_grad_()
        centroids = torch.linspace(-0.04, 0.04, 8).bfloat16()
        x = (torch.randn(5, 48) + rank).bfloat16()  # activations differ, and stay outside the sharded block
        probe = torch.randn(32, 48).bfloat16()

        def gradient(sharded=None, outer=None):
            clustered = attention_layer(weight, centroids)
            return torch.autograd.grad((clustered * probe).float().square().sum() + (x @ clustered.t()).sum(), weight)[
                0
            ]

        expected = gradient()
        stored_bytes = {}
        for name, codecs in (("M", ()), ("S", (Shard(),)), ("US", (Uniquify([weight]), Shard()))):
            marshal = MarshalSavedTensors(force=True, codecs=codecs, min_bytes=0)
            with MarshalSavedTensors(force=True, min_bytes=0):
                with marshal:
                    clustered = attention_layer(weight, centroids)
                stored_bytes[name] = marshal.statistics.stored_bytes
                loss = (clustered * probe).float().square().sum() + (x @ clustered.t()).sum()
            assert torch.equal(torch.autograd.grad(loss, weight)[0], expected), name
            assert marshal.statistics.stored_bytes == 0
        assert stored_bytes["S"] <= stored_bytes["M"] / 3 + 64
        assert stored_bytes["US"] < stored_bytes["S"]

        with pytest.raises(UserError, match=r"same tensors on all 3 learners, .* learner 2 differs"):
            Shard().pack(torch.full((64,), float(rank == 2)), mover.store)
        dist.barrier()
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.usefixtures("fork_server")
def test_three_learners_hold_a_third_each_gather_exactly_and_refuse_differences(tmp_path):
    torch.multiprocessing.start_processes(_learner, (str(tmp_path),), nprocs=3, start_method="forkserver")

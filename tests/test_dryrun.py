"""Dry runs: what they count is what runs hold; what they propose fits by the same count."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import forked
from edkm_cli.cli import main
from edkm_cli.compress import compress
from edkm_cli.config import CompressConfig
from edkm_cli.data import load_documents, parse_source
from edkm_cli.distributed import World
from edkm_cli.dryrun.ledger import DEVICE, HOST, Ledger, Peak
from edkm_cli.dryrun.need import Machine, Need, choose_memory, memory_of, parse_bytes, with_heap
from edkm_cli.dryrun.plan import dry_run
from edkm_cli.dryrun.rehearsal import Rehearsal
from edkm_cli.errors import UserError
from edkm_cli.precision import multiplies_bfloat16
from edkm_cli.preflight import plan_run
from edkm_cli.summaries import summary
from families import family
from helpers import byte_tokenizer, tiny_llama, tiny_qwen
from processes import PATIENCE_SECONDS

SHORT = {
    "sequence_length": 96,
    "context": 64,
    "calibration_tokens": 128,
    "start_tokens": 128,
    "eval_windows": 2,
    "steps": 3,
    "save_every": 0,
    "allocation": "uniform",
    "mixed_precision": "no",
}
FEW_TOKENS = {"calibration_tokens": 64, "start_tokens": 64}  # each sequence is rehearsed
GPU = World(device="cuda")
RUNTIME = 600_000_000  # of CUDA
WIDE_CLUSTERED = 4 * (2 * 512 * 512 + 2 * 256 * 512 + 3 * 1408 * 512)
WIDE_PARAMETERS = WIDE_CLUSTERED + 1024 * 512 + 9 * 512


def mid_sized(**changes):
    shape = {"hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8, "num_key_value_heads": 4}
    tokens = {"max_position_embeddings": 4096, "tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": 256}
    return LlamaConfig(**{**shape, **tokens, **changes})


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Directories of two families, large enough that activations outweigh bookkeeping."""
    directories = {}
    wide = LlamaForCausalLM(mid_sized(num_hidden_layers=4, vocab_size=1024))
    for name, model in (("llama", tiny_llama(hidden=64, inner=176)), ("qwen", tiny_qwen()), ("wide", wide)):
        directories[name] = tmp_path_factory.mktemp("models") / name
        model.save_pretrained(directories[name])
        byte_tokenizer().save_pretrained(directories[name])
    return directories


def rehearse(config, setting=None):
    return Rehearsal(plan_run(config, setting or World()), stored_bytes=0).run()


CASES = [
    {},
    {"label_weight": 0.0},  # held: the start has one decoder layer in memory
    {"gradient_checkpointing": True},
    {"assignments": "held"},
    {"steps": 0},
    {"start_tokens": 4096},
    {"distill": False, "batch_size": 3},
    {"granularity": "tensor", "mode": "soft"},
    {"mixed_precision": "bf16"},
    {"mixed_precision": "bf16", "assignments": "held", "gradient_checkpointing": False, "batch_size": 4},
]
MORE_CASES = [
    {"dtype": "bfloat16"},
    {"gradient_accumulation": 2, "mode": "hard"},
    {"method": "dkm"},
    {"granularity": "block:8x8", "embedding_bits": 16},
    {"importance": "activation"},
    {"assignments": "held", "gradient_checkpointing": False},
    {"context": 128, "sequence_length": 16},
    {"steps": 1},
]


def check_against_a_run(model, changes, text_file, tmp_path, *, within=0.03, empty_models=1):
    values = {"model": str(model), "data": (str(text_file),), "output": str(tmp_path / "out"), "device": "cpu"}
    config = CompressConfig(**{**values, **SHORT, **changes})
    with Ledger() as ledger:
        compress(config)
    # The text that is measured, a byte a token, is not part of the estimate; what is trained on is no tensor.
    token_ids = 8 * len("".join(load_documents(parse_source(str(text_file)), "test")))
    skeleton = plan_run(config, World()).skeleton  # the plan's, and that which layers are read into: without memory
    shapes = sum(tensor.numel() * tensor.element_size() for tensor in (*skeleton.parameters(), *skeleton.buffers()))
    held = ledger.accounts[DEVICE].totals["start"] - token_ids - empty_models * shapes
    assert rehearse(config)[DEVICE].total == pytest.approx(held, rel=within)


@pytest.mark.parametrize("changes", CASES, ids=str)
def test_a_rehearsal_holds_what_a_run_holds(changes, models, text_file, tmp_path):
    # Where the start needs the most: what its passes keep in bfloat16, if the processor has instructions for it, is
    # rehearsed in float32.
    starts = {
        "start_tokens",
        "gradient_checkpointing",
        "label_weight",
        "assignments",
        "mixed_precision",
    } & changes.keys()
    within = 0.1 if starts or changes.get("steps") == 0 else 0.03
    check_against_a_run(models["llama"], changes, text_file, tmp_path, within=within)


def test_bits_by_sensitivity_are_rehearsed_with_one_bit_more(models, text_file, tmp_path):
    changes = {"allocation": "sensitivity", "embedding_bits": 8, "lut_dtype": "float16", "steps": 0}
    check_against_a_run(models["llama"], changes, text_file, tmp_path, within=0.1)


def test_a_plan_predicts_the_file_and_writes_nothing(models, text_file, tmp_path):
    values = {"model": str(models["llama"]), "data": (str(text_file),), "output": str(tmp_path / "out")}
    config = CompressConfig(**{**values, **SHORT, "device": "cpu", "steps": 0})
    planned = dry_run(config)
    assert not (tmp_path / "out").exists()
    result = compress(config)
    header = 12_000  # the safetensors header of so small a model is not small
    assert planned["weights_bytes"] <= result["weights_bytes"] <= planned["weights_bytes"] + header
    assert planned["decoder_bits_per_weight"] == result["decoder_bits_per_weight"]


@pytest.mark.slow
@pytest.mark.parametrize("changes", MORE_CASES, ids=str)
def test_a_rehearsal_holds_what_a_run_holds_in_more_settings(changes, models, text_file, tmp_path):
    within = 0.1 if "assignments" in changes else 0.03
    check_against_a_run(models["llama"], changes, text_file, tmp_path, within=within)


@pytest.mark.slow
def test_another_family_is_rehearsed_as_well(models, text_file, tmp_path):
    check_against_a_run(
        models["qwen"], {"sequence_length": 256, "assignments": "held"}, text_file, tmp_path, within=0.1
    )


@pytest.mark.parametrize("changes", [{}, {"assignments": "held"}, {"steps": 0}], ids=str)
def test_one_expert_that_is_rehearsed_stands_for_all(changes, text_file, tmp_path):
    sizes = {"num_local_experts": 12, "hidden_size": 64, "intermediate_size": 96}
    family("mixtral", **sizes).save_pretrained(tmp_path / "moe")
    byte_tokenizer().save_pretrained(tmp_path / "moe")
    check_against_a_run(tmp_path / "moe", changes, text_file, tmp_path, within=0.15, empty_models=2 if changes else 1)


@pytest.fixture
def peak_of(start, tmp_path):
    """The peak of resident memory of a command in a process of its own."""

    def measure(*arguments):
        child = start(forked.edkm, arguments, tmp_path / "peak.json")
        child.join(PATIENCE_SECONDS)
        assert child.exitcode == 0
        return json.loads((tmp_path / "peak.json").read_text())

    return measure


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["--assignments held", "--dtype bfloat16 --batch-size 2"])
def test_the_estimate_is_within_a_tenth_of_a_process(peak_of, flags, text_file, tmp_path):
    if "bfloat16" in flags and not multiplies_bfloat16("cpu"):
        pytest.skip("training in bfloat16 takes minutes on this processor")
    config = mid_sized(num_hidden_layers=6 if "held" in flags else 3, vocab_size=8192)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    common = ["--model", tmp_path / "model", "--data", text_file, "--device", "cpu", "--json", tmp_path / "result.json"]
    sizes = "--calibration-tokens 256 --start-tokens 256 --sequence-length 512 --context 128 --eval-windows 1"
    common += shlex.split(f"--memory small --steps 2 --start compensated {sizes} {flags}")
    peak_of("compress", *common, "--dry-run")
    planned = json.loads((tmp_path / "result.json").read_text())["peak_memory_bytes"]["total"]
    peak = peak_of("compress", *common, "-o", tmp_path / "out", "--save-every", 0)
    assert planned == pytest.approx(peak, rel=0.1)
    assert json.loads((tmp_path / "result.json").read_text())["peak_memory_bytes"] == pytest.approx(peak, rel=0.01)


def test_llama_7b_needs_no_hub_and_little_memory(peak_of, tmp_path):
    flags = ["--model", "llama-7b", "--gpu-memory", "141GB", "--sequence-length", 2048]
    assert peak_of("compress", "--dry-run", *flags, "--json", tmp_path / "plan.json") < 2e9
    found = json.loads((tmp_path / "plan.json").read_text())
    assert found["fits"]
    assert found["proposals"] == []
    assert found["original_weights_bytes"] == 2 * 6_738_415_616
    assert 2.5e9 < found["weights_bytes"] < 2.9e9
    assert found["decoder_bits_per_weight"] == pytest.approx(3.16, abs=0.01)  # 3.03, and what 5+ saves
    assert found["peak_memory_bytes"]["total"] == sum(found["peak_memory_bytes"].values()) / 2


@pytest.mark.slow
def test_llama_7b_trains_on_24_gib():
    config = CompressConfig(model="llama-7b", data=("builtin",), sequence_length=1024, assignments="held")
    assert dry_run(config, gpu_memory="24GiB")["fits"]


@pytest.fixture(scope="module")
def too_small(models):
    """(configuration, memory, plan) where each of two GPUs has half of what the run needs."""
    shape = {"sequence_length": 1024, "batch_size": 4, "context": 64, "calibration_tokens": 256, "start_tokens": 256}
    config = CompressConfig(model=str(models["wide"]), data=("builtin",), allocation="uniform", **shape)
    needed = dry_run(config, gpu_memory="80GB")["peak_memory_bytes"]["total"] - RUNTIME
    memory = f"{(RUNTIME + 0.5 * needed) / 0.95:.0f}"
    return config, memory, dry_run(config, gpu_memory=memory, gpus=2)


def test_what_is_proposed_fits(too_small):
    config, memory, found = too_small
    assert not found["fits"]
    assert len(found["proposals"]) >= 2
    for proposal in found["proposals"]:
        words = shlex.split(proposal["flags"])
        values: dict = {"gradient_checkpointing": True} if "--gradient-checkpointing" in words else {}
        for flag in ("--batch-size", "--gradient-accumulation", "--offload", "--sharding", "--assignments"):
            if flag in words:
                value = words[words.index(flag) + 1]
                values[flag[2:].replace("-", "_")] = int(value) if value.isdigit() else value
        again = dry_run(replace(config, **values), gpu_memory=memory, gpus=proposal["processes"])
        assert again["fits"]
        assert again["peak_memory_bytes"]["total"] == proposal["total_bytes"]


class TestParts:
    """What settings change, on a GPU."""

    @pytest.fixture
    def peaks(self, models):
        def of(setting=GPU, **changes):
            values = {"sequence_length": 256, "context": 64, "calibration_tokens": 64, "start": "kmeans", "steps": 2}
            values["data"] = ("builtin",)
            found = rehearse(CompressConfig(**{"model": str(models["wide"]), **values, **changes}), setting)
            return found[DEVICE], found[HOST]

        return of

    def test_held_assignments_have_no_moments_of_weight_size(self, peaks):
        full, held = peaks()[0].parts, peaks(assignments="held")[0].parts
        assert full["teacher"] == 2 * 1024 * 512  # its head
        assert held.get("optimizer", 0) < 0.2 * full["optimizer"]

    def test_checkpointing_and_offloading_take_activations_off_the_device(self, peaks):
        long = {"assignments": "held", "sequence_length": 2048}
        plain, checkpointed = (peaks(**long, gradient_checkpointing=again)[0] for again in (False, True))
        offloaded, host = peaks(**long, gradient_checkpointing=False, offload="cpu")
        assert checkpointed.phases["training"] < 0.6 * plain.phases["training"]
        assert offloaded.phases["training"] < 0.6 * plain.phases["training"]
        assert host.phases["training"] > 0.9 * (plain.phases["training"] - offloaded.phases["training"])

    def test_attention_keeps_no_matrix_of_tokens_by_tokens(self, peaks):
        short = peaks(sequence_length=512, distill=False)[0].parts["activations"]
        long = peaks(sequence_length=2048, distill=False)[0].parts["activations"]
        assert long == pytest.approx(4 * short, rel=0.02)

    def test_data_parallel_processes_keep_gradients_in_buckets(self, peaks):
        alone, many = peaks()[0].parts, peaks(World(device="cuda", size=2))[0].parts
        assert many["weights"] == alone["weights"]
        assert many["gradients"] == pytest.approx(2 * WIDE_CLUSTERED, rel=0.05)
        assert many["optimizer"] == alone["optimizer"] > 3 * many["gradients"]  # moments, and halves of masters

    def test_sharding_divides_what_parameters_need(self, peaks):
        two, eight = (peaks(World(device="cuda", size=n, sharded=True))[0].parts for n in (2, 8))
        assert eight["optimizer"] == pytest.approx(two["optimizer"] / 4, rel=0.01)
        assert eight["teacher"] == two["teacher"]  # the head is whole
        assert eight["sharding"] == two["sharding"] > 0  # layers are gathered whole

    def test_importances_are_in_host_memory_beside_a_gpu(self, peaks):
        device, host = peaks(steps=0)
        assert host.phases["calibration"] >= 4 * WIDE_CLUSTERED
        assert device.total < 4 * WIDE_CLUSTERED + 2 * WIDE_PARAMETERS

    def test_a_model_is_left_as_it_was(self, models):
        tokens = {"sequence_length": 64, "context": 64, "calibration_tokens": 64, "start_tokens": 64}
        config = CompressConfig(model=str(models["wide"]), **tokens)
        plan = plan_run(config, GPU)
        first, again = (Rehearsal(plan, stored_bytes=0).run() for _ in range(2))
        assert first == again


class TestMachine:
    def test_sizes(self):
        assert parse_bytes("24GiB") == 24 * 2**30
        assert parse_bytes(" 80 gb ") == 80 * 10**9
        assert parse_bytes("1000") == 1000
        assert parse_bytes("1.5MiB") == 3 * 2**19

    @pytest.mark.parametrize("text", ["", "24G", "GiB", "-1GB", "24 GiB each"])
    def test_no_sizes(self, text):
        with pytest.raises(UserError, match="24GiB"):
            parse_bytes(text)

    def test_contradictions(self, model_directory):
        config = CompressConfig(model=str(model_directory))
        with pytest.raises(UserError, match="at least 1"):
            dry_run(config, gpu_memory="24GiB", gpus=0)
        with pytest.raises(UserError, match="--device is cpu"):
            dry_run(replace(config, device="cpu"), gpu_memory="24GiB")

    @pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
    def test_gpus_that_are_not_here_need_a_size(self, model_directory):
        with pytest.raises(UserError, match="--gpu-memory"):
            dry_run(CompressConfig(model=str(model_directory)), gpus=2)

    def test_flags_of_planning_need_a_dry_run(self, model_directory, capsys):
        with pytest.raises(SystemExit) as stop:
            main(["compress", "--model", str(model_directory), "--gpus", "2"])
        assert stop.value.code == 2
        assert "for --dry-run, which is not given" in capsys.readouterr().err

    def test_tokens_are_those_of_all_processes(self, model_directory):
        config = CompressConfig(
            model=str(model_directory),
            steps=10,
            batch_size=2,
            gradient_accumulation=3,
            sequence_length=16,
            context=16,
            **FEW_TOKENS,
        )
        found = dry_run(config, gpu_memory="24GiB", gpus=4)
        assert found["sequences_per_step"] == 24
        assert found["training_tokens"] == 10 * 24 * 16
        assert found["processes"] == 4
        assert not found["sharded"]

    def test_pages_of_files_count_in_the_peak_and_not_against_the_fit(self):
        peak = Peak("load", {"weights": 10, "files": 5}, {"load": 15, "training": 12}, files=5)
        assert peak.total == 15
        assert Need(peak, None).fits(Machine(World(), 12, None))
        assert not Need(peak, None).fits(Machine(World(), 11, None))
        assert not Need(peak, None).fits(Machine(World(size=2), 12, None))

    def test_memory_goes_to_speed_where_the_machine_has_room_for_freed_blocks(self):
        need = Need(Peak("training", {"weights": 1000, "runtime": 500}, {"training": 1000}), None)
        heap = with_heap(need).device.total - need.device.total
        assert 100 < heap < 1000
        enough, tight = (Machine(World(), 1500 + room, None) for room in (heap, heap - 1))
        auto, speed, small = (CompressConfig(memory=memory) for memory in ("auto", "speed", "small"))
        assert [memory_of(config, need, enough) for config in (auto, speed, small)] == ["speed", "speed", "small"]
        assert [memory_of(config, need, tight) for config in (auto, speed, small)] == ["small", "speed", "small"]
        assert need.fits(tight)
        assert not with_heap(need).fits(tight)
        on_a_gpu = Need(need.device, need.device)
        assert memory_of(auto, on_a_gpu, Machine(GPU, 1, 1)) == "speed"
        assert with_heap(on_a_gpu) == on_a_gpu

    def test_a_plan_counts_freed_blocks_where_they_are_kept(self, model_directory):
        tokens = {"sequence_length": 16, "context": 16, "calibration_tokens": 16, "start_tokens": 16}
        config = CompressConfig(model=str(model_directory), device="cpu", **tokens)
        speed, small = dry_run(config), dry_run(replace(config, memory="small"))
        assert (speed["memory"], small["memory"]) == ("speed", "small")
        for held in (speed, small):
            assert held["peak_memory_bytes"]["heap"] == 0  # nothing waits at this peak
        free = replace(config, assignments="free")
        assert dry_run(free)["peak_memory_bytes"]["heap"] > 0
        assert dry_run(replace(free, memory="small"))["peak_memory_bytes"]["heap"] == 0
        assert choose_memory(plan_run(config, World())) == "speed"
        assert choose_memory(plan_run(replace(config, memory="small"), World())) == "small"

    def test_a_run_that_fits_only_without_freed_blocks_gives_them_back(self, model_directory, monkeypatch):
        config = CompressConfig(model=str(model_directory), device="cpu", sequence_length=16, context=16)
        for room_bytes, memory in ((10**12, "speed"), (10**6, "small")):
            monkeypatch.setattr("edkm_cli.dryrun.need.physical_bytes", lambda size=room_bytes: size)
            assert choose_memory(plan_run(config, World())) == memory

    def test_a_gpu_is_not_used_to_the_last_byte(self, model_directory):
        config = CompressConfig(model=str(model_directory), sequence_length=16, context=16, **FEW_TOKENS)
        total = dry_run(config, gpu_memory="24GiB")["peak_memory_bytes"]["total"]
        assert not dry_run(config, gpu_memory=f"{total}")["fits"]
        assert dry_run(config, gpu_memory=f"{total / 0.94}")["fits"]


def test_experts_are_planned_as_all_linears_are(tmp_path):
    family("mixtral").save_pretrained(tmp_path)
    found = dry_run(CompressConfig(model=str(tmp_path), device="cpu"))
    assert "not_counted" not in found
    assert found["peak_memory_bytes"]["activations"] > 0


def test_the_summary_shows_device_and_host_and_what_would_fit(too_small):
    _, _, found = too_small
    text = summary("plan", found)
    assert "each of 2 processes on cuda" in text
    assert "device" in text
    assert "host" in text
    assert "fits      no" in text
    assert all(proposal["flags"] in text for proposal in found["proposals"])
    assert found["proposals"]

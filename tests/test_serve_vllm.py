"""vLLM's layers with packed weights, and whole models served by it. scripts/check_vllm.sh runs this where vLLM is."""

import json
import os
from importlib.util import find_spec

import pytest
import torch
from safetensors.torch import load_file, save_file

from edkm_cli.errors import UserError
from edkm_cli.format import QuantizationSpec
from edkm_cli.generate import Manner, generate_text, load_writer
from edkm_cli.granularity import Granularity
from edkm_cli.hf import load
from edkm_cli.models import resolve
from edkm_cli.packing import Packed, pack, parts_of, row_parts
from edkm_cli.runtime import lut_linear_torch
from families import family
from helpers import byte_tokenizer, cluster, export, tiny_llama

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM has an environment of its own: scripts/check_vllm.sh"),
]
PROMPTS = [list(range(1 + 7 * i, 9 + 9 * i)) for i in range(4)]


@pytest.fixture
def process(monkeypatch, tmp_path):
    """process(rank, size): vLLM's layers are then built as that one of `size` tensor-parallel processes builds them."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor import parameter
    from vllm.model_executor.layers import linear, vocab_parallel_embedding

    def become(rank, size):
        for module in (linear, vocab_parallel_embedding, parameter):
            monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda: rank)
            monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: size)

    with set_current_vllm_config(VllmConfig()):
        yield become


def config(bits=3, granularity="row:1", lut_dtype="float32", skipped=(), **more):
    from edkm_cli.serve.vllm_config import EdkmVllmConfig

    more = {"embedding_bits": 8, "skipped": list(skipped)} | more
    made = EdkmVllmConfig(QuantizationSpec(bits, granularity, lut_dtype, **more))
    made.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
    return made


def stored(rows, columns, bits, granularity, seed):
    """(the tensors of a linear, the dense matrix they stand for)."""
    generator = torch.Generator().manual_seed(seed)
    tile = Granularity.parse(granularity).tile(rows, columns)
    indices = pack(torch.randint(2**bits, (rows, columns), generator=generator).to(torch.uint8), bits)
    lut = torch.randn(rows // tile[0] * (columns // tile[1]), 2**bits, generator=generator).sort(1).values
    dense = lut_linear_torch.dense(Packed(indices, lut, None, bits, tile), columns, torch.float32)
    return {"indices": indices, "lut": lut}, dense


def fill(layer, tensors, *shard):
    for leaf, tensor in tensors.items():
        parameter = getattr(layer, leaf)
        parameter.weight_loader(parameter, tensor, *shard)


def finished(layer):
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def assert_product(layer, x, weight, bias=None):
    wanted = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(layer.quant_method.apply(layer, x, bias).double(), wanted, rtol=1e-5, atol=1e-4)


MIXTURES = ("mixtral", "qwen3_moe", "olmoe")
GRANULARITIES = ["tensor", "row:1", "row:3", "block:4x6"]


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_each_process_computes_with_its_rows_and_columns(process, granularity, bits):
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear

    x, made = torch.randn(5, 36), config(bits, granularity)
    parts = [stored(rows, 36, bits, granularity, i) for i, rows in enumerate((72, 36, 36))]  # 6 and 3 heads of 12
    ups = [stored(60, 36, bits, granularity, i) for i in (5, 6)]
    down, dense_down = stored(24, 60, bits, granularity, 7)
    sums, y = torch.zeros(5, 24), torch.randn(5, 60)
    blocks = granularity.startswith("block")
    for size in (1, 3):  # thirds of 60 columns end inside a byte
        sums.zero_()
        for rank in range(size):
            process(rank, size)
            qkv = QKVParallelLinear(
                36, 12, 6, 3, bias=False, quant_config=made, prefix="l.qkv_proj", params_dtype=x.dtype
            )
            for shard, (tensors, _) in zip("qkv", parts, strict=True):
                fill(qkv, tensors, shard)
            own = [dense.chunk(size)[rank] for _, dense in parts]
            assert_product(finished(qkv), x, torch.cat(own))
            gate_up = MergedColumnParallelLinear(
                36, [60, 60], bias=False, quant_config=made, prefix="l.gate_up_proj", params_dtype=x.dtype
            )
            for shard, (tensors, _) in enumerate(ups):
                fill(gate_up, tensors, shard)
            assert_product(finished(gate_up), x, torch.cat([dense.chunk(size)[rank] for _, dense in ups]))
            if blocks and size == 3:
                with pytest.raises(UserError, match=r"l\.down_proj: blocks of 6 columns must divide the 20 columns"):
                    RowParallelLinear(60, 24, quant_config=made, prefix="l.down_proj", params_dtype=x.dtype)
                continue
            row = RowParallelLinear(60, 24, bias=False, quant_config=made, prefix="l.down_proj", params_dtype=x.dtype)
            fill(row, down)
            sums += finished(row).quant_method.apply(row, y.chunk(size, dim=1)[rank].contiguous())
        if not (blocks and size == 3):
            torch.testing.assert_close(sums, y @ dense_down.T, rtol=1e-5, atol=1e-4)


def test_key_heads_are_held_by_several_processes_where_there_are_fewer(process):
    from vllm.model_executor.layers.linear import QKVParallelLinear

    parts = [stored(rows, 36, 3, "row:2", i) for i, rows in enumerate((48, 24, 24))]  # 4 and 2 heads of 12
    for rank in range(4):
        process(rank, 4)
        qkv = QKVParallelLinear(
            36,
            12,
            4,
            2,
            bias=False,
            quant_config=config(granularity="row:2"),
            prefix="l.qkv_proj",
            params_dtype=torch.float32,
        )
        for shard, (tensors, _) in zip("qkv", parts, strict=True):
            fill(qkv, tensors, shard)
        own = [parts[0][1].chunk(4)[rank], *(dense.chunk(2)[rank // 2] for _, dense in parts[1:])]
        assert_product(finished(qkv), torch.randn(3, 36), torch.cat(own))


def test_modules_of_one_layer_may_differ_in_bits_or_have_stayed_dense(process):
    from vllm.model_executor.layers.linear import QKVParallelLinear

    process(0, 1)
    made = config(skipped=["l.k_proj"], module_bits={"l.v_proj": 5})
    qkv = QKVParallelLinear(36, 12, 4, 2, bias=True, quant_config=made, prefix="l.qkv_proj", params_dtype=torch.float32)
    q, dense_q = stored(48, 36, 3, "row:1", 0)
    v, dense_v = stored(24, 36, 5, "row:1", 1)
    k = torch.randn(24, 36)
    fill(qkv, q, "q")
    fill(qkv, {"weight": k}, "k")
    fill(qkv, v, "v")
    assert_product(finished(qkv), torch.randn(3, 36), torch.cat([dense_q, k, dense_v]), torch.randn(96))


def test_a_matrix_that_is_stored_as_one_is_cut_into_its_parts(process):
    from vllm.model_executor.layers.linear import QKVParallelLinear

    tensors, dense = stored(96, 36, 3, "tensor", 0)
    made = config(granularity="tensor")
    made.packed_modules_mapping = {"qkv_proj": ["qkv_proj"]}
    for rank in range(2):
        process(rank, 2)
        qkv = QKVParallelLinear(
            36, 12, 4, 2, bias=False, quant_config=made, prefix="l.qkv_proj", params_dtype=torch.float32
        )
        fill(qkv, tensors)
        own = [part.chunk(2)[rank] for part in dense.split((48, 24, 24))]
        assert_product(finished(qkv), torch.randn(3, 36), torch.cat(own))


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"embedding_group": 12},
        {"embedding_bits": 4, "embedding_factors": True},
        {"embedding_rows": [[64, 6], [120, 4]]},
    ],
    ids=["row", "group", "factors", "rows"],
)
def test_embeddings_are_cut_by_words_and_padded_with_zeros(process, more):
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    torch.manual_seed(0)
    groups = 36 // more.get("embedding_group", 36)
    parts = parts_of(150, more.get("embedding_rows", []), more.get("embedding_bits", 8))
    stored = {p.leaf: torch.randint(256, (p.end - p.first, 36 * p.bits // 8), dtype=torch.uint8) for p in parts}
    packed = row_parts([*stored.values()], scale := torch.rand(150, groups), parts)
    dense, stored["scale"] = torch.cat([lut_linear_torch.dense(p, 36, torch.float32) for p in packed]), scale
    if "embedding_factors" in more:
        stored["factors"] = torch.tensor([0.75, 1, 2.5] * 12, dtype=torch.bfloat16)
        dense = dense * stored["factors"]
    x = torch.randn(4, 36)
    for rank in range(2):
        process(rank, 2)
        embedding = VocabParallelEmbedding(150, 36, params_dtype=x.dtype, quant_config=config(**more))
        head = ParallelLMHead(150, 36, params_dtype=x.dtype, quant_config=config(**more), prefix="lm_head")
        for leaf, tensor in stored.items():
            parameter = getattr(embedding, leaf)
            parameter.weight_loader(parameter, tensor)
        head = head.tie_weights(embedding)
        own = dense[96 * rank : 96 * (rank + 1)]
        ids = torch.tensor([0, 5, len(own) - 1])
        assert torch.equal(finished(embedding).quant_method.embedding(embedding, ids), own[ids])
        logits = finished(head).quant_method.apply(head, x)
        torch.testing.assert_close(logits[:, : len(own)], x @ own.T, rtol=1e-5, atol=1e-4)
        assert not bool(logits[:, len(own) :].any())


def test_what_was_not_loaded_or_is_not_a_number_is_named(process):
    from vllm.model_executor.layers.linear import RowParallelLinear

    process(0, 1)
    tensors, _ = stored(24, 36, 3, "row:1", 0)

    def layer(given):
        made = RowParallelLinear(36, 24, quant_config=config(), prefix="l.o_proj", params_dtype=torch.float32)
        fill(made, given)
        return finished(made)

    with pytest.raises(UserError, match=r"l\.o_proj\.indices is missing from the checkpoint"):
        layer({"lut": tensors["lut"]})
    tensors["lut"][3, 2] = float("nan")
    with pytest.raises(UserError, match=r"l\.o_proj\.lut must be finite, but holds NaN or Inf"):
        layer(tensors)
    with pytest.raises(UserError, match=r"l\.o_proj\.lut must be \(24, 8\), got \(23, 8\)"):
        layer({"lut": tensors["lut"][1:]})


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """whole(granularity): a tiny compressed model with a bias, of 3 and 4 bits; parts of its columns end inside a byte."""
    made = {}

    def write(granularity, **more):
        if granularity not in made:
            inner = 44 if granularity.startswith("block") else 42  # halves of 42 end inside a byte at 3 and at 4 bits
            model = tiny_llama(hidden=64, inner=inner, bias=True, head_dim=32)
            mixed = {"module_bits": {f"model.layers.0.{name}": 4 for name in ("self_attn.o_proj", "mlp.down_proj")}}
            model, spec = cluster(model, granularity=granularity, mixed=mixed, **more)
            made[granularity] = export(model, spec, tmp_path_factory.mktemp("served") / granularity.replace(":", ""))
            byte_tokenizer().save_pretrained(made[granularity])
        return made[granularity]

    return write


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """mixture(kind): a tiny compressed model; of experts one stayed dense and two differ from the others."""
    made = {}

    def write(kind):
        if kind not in made:
            sizes = {"hidden_size": 64, "intermediate_size": 44, "moe_intermediate_size": 44, "num_attention_heads": 2}
            model = family(kind, **sizes | ({} if kind == "gpt_neox" else {"head_dim": 32}))
            up, down = (f"model.layers.1.mlp.experts.{leaf}_proj" for leaf in ("gate_up", "down"))
            mixed = {"module_bits": {f"{down}.2": 4}, "module_granularity": {f"{up}.1": "row:4"}}
            more = {"mixed": mixed, "skip": (f"{up}.3",)} if kind in MIXTURES else {}
            model, spec = cluster(model, **more)
            made[kind] = export(model, spec, tmp_path_factory.mktemp("served") / kind)
            byte_tokenizer().save_pretrained(made[kind])
        return made[kind]

    return write


def start(directory, **options):
    from vllm import LLM

    common = {"dtype": "float32", "max_model_len": 128, "kv_cache_memory_bytes": 2**26, "seed": 0}
    return LLM(str(directory), **common, **options)


def assert_writes_what_transformers_writes(llm, directory, lora=None):
    """Greedy tokens are those that the packed model of transformers finds likeliest, and so are their probabilities."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=24, logprobs=1, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], sampling, use_tqdm=False, lora_request=lora)
    model = load(directory, dtype=torch.float32) if isinstance(directory, os.PathLike) else directory
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        written = list(output.outputs[0].token_ids)
        with torch.no_grad():
            logits = model(torch.tensor([prompt + written])).logits[0, len(prompt) - 1 : -1]
        found = logits.log_softmax(-1)[range(len(written)), written]
        told = torch.tensor(
            [step[token].logprob for step, token in zip(output.outputs[0].logprobs, written, strict=True)]
        )
        torch.testing.assert_close(told, found, rtol=0, atol=1e-3)
        torch.testing.assert_close(found, logits.log_softmax(-1).amax(-1), rtol=0, atol=1e-4)


@pytest.mark.parametrize("granularity", ["tensor", "row:1", "row:2", "block:4x2"])
def test_two_processes_write_what_one_writes(whole, granularity, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")  # else each process wants a memory node of its own
    directory = whole(granularity, lut_dtype="float8_e3m4") if granularity == "row:2" else whole(granularity)
    llm = start(directory, tensor_parallel_size=2, enforce_eager=True)
    assert_writes_what_transformers_writes(llm, directory)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("mixtral", {"enforce_eager": True}),
        ("mixtral", {"enforce_eager": True, "tensor_parallel_size": 2}),
        ("qwen3_moe", {}),
        ("gemma2", {"enforce_eager": True}),  # whose input embedding gets no configuration, as Mixtral's
        ("glm4", {"enforce_eager": True}),  # whose files hold joined what vLLM joins
        ("stablelm", {"enforce_eager": True}),  # of which vLLM does not say what it joins
    ],
)
def test_packed_families_write_what_transformers_writes(mixture, kind, options, monkeypatch):
    if "tensor_parallel_size" in options:
        monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")  # else each process wants a memory node of its own
    llm = start(mixture(kind), **options)
    assert_writes_what_transformers_writes(llm, mixture(kind))


@pytest.mark.parametrize(("kind", "rule"), [("olmoe", "experts of .*, got Ol"), ("gpt_neox", "each head in turn")])
def test_a_family_that_vllm_would_not_serve_right_is_refused_before_anything_is_loaded(mixture, kind, rule):
    with pytest.raises(UserError, match=rule):
        start(mixture(kind))


def test_compiled_graphs_write_what_transformers_writes_and_chats_end_where_edkm_generate_ends(whole, tmp_path):
    from vllm import SamplingParams

    directory = spoilt(whole("row:1"), tmp_path / "chat", lambda tensors, settings: None)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
    tokenizer.save_pretrained(directory)
    prompt = tokenizer("[user]Hello[assistant]", return_tensors="pt")
    whole_text = load(directory, dtype=torch.float32).generate(**prompt, do_sample=False, max_new_tokens=24)
    written = whole_text[0, prompt["input_ids"].shape[1] :].tolist()
    stop = next(i for i in range(3, len(written)) if written[i] not in written[:i])  # from now on this one ends a text
    settings = json.loads((directory / "generation_config.json").read_text()) | {"eos_token_id": [256, written[stop]]}
    (directory / "generation_config.json").write_text(json.dumps(settings))
    llm = start(directory)
    assert_writes_what_transformers_writes(llm, directory)
    sampling = SamplingParams(temperature=0, max_tokens=24)
    answer = llm.chat([{"role": "user", "content": "Hello"}], sampling, use_tqdm=False)[0].outputs[0]
    assert list(answer.token_ids) == written[: stop + 1]
    assert answer.finish_reason == "stop"
    writer = load_writer(resolve(str(directory)), chat=True, dequantize=False, dtype="float32", device="cpu")
    assert generate_text(writer, "Hello", Manner(24), chat=True)["new_tokens"] == stop + 1


def test_an_adapter_is_served_on_packed_layers(whole, tmp_path):
    from peft import LoraConfig, get_peft_model
    from vllm.lora.request import LoRARequest

    adapted = get_peft_model(
        load(whole("row:1"), dtype=torch.float32),
        LoraConfig(r=8, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"]),
    )
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    adapted.save_pretrained(tmp_path)
    llm = start(whole("row:1"), enable_lora=True, max_lora_rank=8)
    assert_writes_what_transformers_writes(llm, whole("row:1"))
    assert_writes_what_transformers_writes(llm, adapted.eval(), lora=LoRARequest("a", 1, str(tmp_path)))


def spoilt(directory, target, change):
    """A copy of a checkpoint whose tensors and configuration `change` alters in place, without its checksums."""
    target.mkdir()
    for file in directory.iterdir():
        if file.name not in ("checksums.json", "tensors.json", "model.safetensors"):
            (target / file.name).write_bytes(file.read_bytes())
    tensors, settings = load_file(directory / "model.safetensors"), json.loads((directory / "config.json").read_text())
    change(tensors, settings)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text(json.dumps(settings))
    return target


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda t, c: t.pop("model.norm.weight"), "tensor model.norm.weight must be floating (64,), got nothing"),
        (lambda t, c: t.pop("model.layers.1.mlp.up_proj.lut"), "tensor model.layers.1.mlp.up_proj.lut must be"),
        (lambda t, c: c["quantization_config"].update(format_version=7), "format_version must be 3, got 7"),
    ],
    ids=["norm", "table", "version"],
)
def test_a_directory_that_is_not_whole_is_refused_before_anything_is_loaded(whole, tmp_path, change, told):
    with pytest.raises(UserError) as error:
        start(spoilt(whole("row:1"), tmp_path / "spoilt", change))
    assert told in str(error.value)
    assert "\n" not in str(error.value)

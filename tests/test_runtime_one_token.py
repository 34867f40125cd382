"""A decoder's shortcut for one token gives what transformers' own forward gives, and steps aside for everything else."""

import copy
import functools
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import transformers
from torch.nn.modules.module import register_module_forward_hook
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, Qwen3Config, Qwen3ForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

import edkm_cli
from edkm_cli.kernels import build
from edkm_cli.runtime import one_token
from edkm_cli.runtime.decoder_step_c import attend
from edkm_cli.runtime.palettized import PalettizedLinear
from families import family
from helpers import cluster, export, tiny_llama

pytestmark = pytest.mark.skipif(build.library() is None, reason="no C compiler here")
PROMPT = torch.randint(0, 250, (1, 9), generator=torch.Generator().manual_seed(0))
MIXED = {"model.layers.0.self_attn.q_proj": 2, "model.layers.0.mlp.up_proj": 4} | {
    f"model.layers.1.self_attn.{name}_proj": bits for name, bits in (("q", 4), ("v", 4), ("o", 2))
}
TOKENS = (3, 250, 17, 17, 99)


def tiny_qwen3():
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=257, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=128, initializer_range=0.3,
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    base = tmp_path_factory.mktemp("one_token")
    llama = tiny_llama(hidden=128, inner=176, bias=True)
    return {
        "llama": export(*cluster(llama), base / "llama"),
        "qwen3": export(*cluster(tiny_qwen3(), bits=4), base / "qwen3"),
        "mixed bits": export(*cluster(tiny_llama(hidden=128, inner=176), mixed={"module_bits": MIXED}), base / "mixed"),
    }


@pytest.fixture
def llama(directories):
    return edkm_cli.load(directories["llama"], dtype="float32")


def run(model, monkeypatch, *, shortcut, tokens=TOKENS, **options):
    """(logits (steps, vocabulary) after each token, the cache), with the shortcut or by transformers alone."""
    with monkeypatch.context() as patch, torch.no_grad():
        if not shortcut:
            patch.setattr(one_token._Shortcut, "forward", lambda self, decoder, given: None)
        cache, logits = model(PROMPT, use_cache=True).past_key_values, []
        for token in tokens:
            out = model(torch.tensor([[token]]), past_key_values=cache, use_cache=True, **options)
            logits.append(out.logits[0, -1])
    return torch.stack(logits), cache


@pytest.mark.parametrize("family", ["llama", "qwen3", "mixed bits"])
def test_logits_and_cache_are_those_of_transformers(family, directories, monkeypatch):
    model = edkm_cli.load(directories[family], dtype="float32")
    expected, cache = run(model, monkeypatch, shortcut=False)
    found, quick = run(model, monkeypatch, shortcut=True)
    assert model.base_model._shortcut._step is not None
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    for one, other in zip(cache.layers, quick.layers, strict=True):
        torch.testing.assert_close(one.keys, other.keys, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(one.values, other.values, rtol=1e-4, atol=1e-4)
    half = edkm_cli.load(directories[family], dtype="bfloat16")
    plain, short = (run(half, monkeypatch, shortcut=s)[0].float() for s in (False, True))
    assert (short - expected).abs().max() <= 2 * (plain - expected).abs().max()


def test_generate_writes_the_same(llama, monkeypatch):
    options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    found = llama.generate(PROMPT, **options)
    monkeypatch.setattr(one_token._Shortcut, "forward", lambda self, decoder, given: None)
    assert torch.equal(found, llama.generate(PROMPT, **options))


def test_what_differs_goes_to_transformers(llama, monkeypatch):
    plain, seen = run(llama, monkeypatch, shortcut=False)[0], []
    run(llama, monkeypatch, shortcut=True)
    monkeypatch.setattr(one_token._Shortcut, "_run", lambda *arguments: pytest.fail("the shortcut was taken"))
    hook = llama.model.layers[1].mlp.up_proj.register_forward_hook(lambda *arguments: seen.append(1))
    torch.testing.assert_close(run(llama, monkeypatch, shortcut=True)[0], plain)
    assert len(seen) == 1 + len(TOKENS)
    hook.remove()
    with pytest.raises(pytest.fail.Exception):  # nobody watches any more
        run(llama, monkeypatch, shortcut=True)
    handle = register_module_forward_hook(lambda *arguments: seen.append(2))
    run(llama, monkeypatch, shortcut=True)
    handle.remove()
    assert len(seen) > 40  # of all modules
    AttentionInterface.register("halved", lambda *given, **how: (sdpa_attention_forward(*given, **how)[0] / 2, None))
    AttentionMaskInterface.register("halved", sdpa_mask)
    llama.set_attn_implementation("halved")
    assert not torch.allclose(run(llama, monkeypatch, shortcut=True)[0], plain)
    llama.set_attn_implementation("sdpa")
    with torch.no_grad():
        first = llama(PROMPT, use_cache=True)
        mask = torch.ones(1, PROMPT.shape[1] + 1, dtype=torch.long)
        mask[0, 0] = 0
        llama(torch.tensor([[5]]), past_key_values=first.past_key_values, attention_mask=mask)
        pair = llama(PROMPT.repeat(2, 1), use_cache=True).past_key_values
        llama(torch.tensor([[5], [6]]), past_key_values=pair)
        out = llama(torch.tensor([[5]]), past_key_values=first.past_key_values, output_hidden_states=True)
        assert len(out.hidden_states) == 3
    cache = llama(PROMPT, use_cache=True).past_key_values
    llama(torch.tensor([[5]]), past_key_values=cache)  # with gradients


def test_tables_that_are_given_other_memory_are_read_there(llama, monkeypatch):
    run(llama, monkeypatch, shortcut=True)
    for module in llama.modules():
        if isinstance(module, PalettizedLinear):
            module.lut.data = module.lut.data * 1.25
    expected = run(llama, monkeypatch, shortcut=False)[0]
    torch.testing.assert_close(run(llama, monkeypatch, shortcut=True)[0], expected, rtol=1e-4, atol=1e-4)


def test_tables_made_of_parts_that_are_changed_in_place_are_made_again(tmp_path, monkeypatch):
    packed = cluster(tiny_llama(hidden=128, inner=176), lut_dtype="float8_e4m3fn")
    model = edkm_cli.load(export(*packed, tmp_path), dtype="float32")
    before = run(model, monkeypatch, shortcut=True)[0]
    assert model.base_model._shortcut._step is not None
    for module in model.modules():
        if isinstance(module, PalettizedLinear):
            module.lut_scale.mul_(1.25)
    found, expected = (run(model, monkeypatch, shortcut=shortcut)[0] for shortcut in (True, False))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(found, before, atol=1e-2)


def test_a_window_of_mistral_s_is_kept_to(tmp_path, monkeypatch):
    mistral = family(
        "mistral", hidden_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=32, sliding_window=8
    )
    model = edkm_cli.load(export(*cluster(mistral), tmp_path / "out"), dtype="float32")
    ids = torch.cat([PROMPT, torch.tensor([TOKENS])], 1)
    with torch.no_grad():
        cache, expected = DynamicCache(), model(ids, use_cache=False).logits[0, -len(TOKENS) :]
        model(PROMPT, past_key_values=cache)
        found = [model(torch.tensor([[token]]), past_key_values=cache).logits[0, -1] for token in TOKENS]
    torch.testing.assert_close(torch.stack(found), expected, rtol=1e-4, atol=1e-4)


def test_caches_that_are_copied_or_cropped_stay_their_own(llama, monkeypatch):
    expected = run(llama, monkeypatch, shortcut=False)[0]
    _, cache = run(llama, monkeypatch, shortcut=True, tokens=TOKENS[:2])
    layers = [copy.copy(layer) for layer in cache.layers]  # share their memory with those of `cache`
    deep = copy.deepcopy(cache)
    with torch.no_grad():
        for other in (cache, deep):
            llama(torch.tensor([[200]]), past_key_values=other)
        shared = DynamicCache()
        shared.layers = layers
        found = llama(torch.tensor([[TOKENS[2]]]), past_key_values=shared).logits[0, -1]
        torch.testing.assert_close(found, expected[2], rtol=1e-4, atol=1e-4)
        cache.crop(-1)
        found = llama(torch.tensor([[TOKENS[2]]]), past_key_values=cache).logits[0, -1]
        torch.testing.assert_close(found, expected[2], rtol=1e-4, atol=1e-4)


def test_a_cache_gets_more_room_when_it_is_full(llama, monkeypatch):
    monkeypatch.setattr(one_token, "_ROOM", 2)
    expected, found = (run(llama, monkeypatch, shortcut=s, tokens=range(40, 60))[0] for s in (False, True))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_models_are_copied_pickled_and_cast_with_their_shortcut(llama, monkeypatch):
    expected = run(llama, monkeypatch, shortcut=True)[0]
    for other in (copy.deepcopy(llama), pickle.loads(pickle.dumps(llama))):  # noqa: S301 - our own bytes
        assert torch.equal(run(other, monkeypatch, shortcut=True)[0], expected)
        assert other.base_model._shortcut is not llama.base_model._shortcut
    cast = run(llama.to(torch.bfloat16), monkeypatch, shortcut=True)[0]
    assert cast.dtype == torch.bfloat16
    assert (cast.float() - expected).abs().max() < 0.1 * expected.abs().max()


def test_the_number_of_threads_changes_no_bit(llama, monkeypatch):
    before, results = torch.get_num_threads(), []
    _, cache = run(llama, monkeypatch, shortcut=True, tokens=range(40, 80))
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            with torch.no_grad():
                results.append(llama.model(torch.tensor([[7]]), past_key_values=copy.deepcopy(cache)).last_hidden_state)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*results)


def test_threads_that_share_a_model_write_what_each_writes_alone(llama):
    prompts = [torch.randint(0, 250, (1, count)) for count in (5, 9, 17, 30)]
    options = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    wanted = [llama.generate(prompt, **options) for prompt in prompts]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda prompt: llama.generate(prompt, **options), 3 * prompts))
    assert all(torch.equal(one, other) for one, other in zip(found, 3 * wanted, strict=True))


@pytest.mark.parametrize(
    ("part", "name", "value"), [("self_attn", "scaling", 0.05), ("input_layernorm", "variance_epsilon", 0.5)]
)
def test_numbers_of_layers_that_are_changed_are_computed_with(llama, monkeypatch, part, name, value):
    before = run(llama, monkeypatch, shortcut=True)[0]
    for layer in llama.model.layers:
        setattr(getattr(layer, part), name, value)
    expected = run(llama, monkeypatch, shortcut=False)[0]
    assert not torch.allclose(before, expected, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(run(llama, monkeypatch, shortcut=True)[0], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(6, 6, 32), (9, 3, 64), (14, 2, 96), (4, 1, 256)])
@pytest.mark.parametrize("tokens", [1, 16, 77])
def test_many_sequences_attend_as_torch_does(dtype, heads, kv_heads, size, tokens):
    torch.manual_seed(0)
    query = torch.randn(5, heads, 1, size).to(dtype)
    keys, values = (torch.randn(5, kv_heads, 80, size).to(dtype)[:, :, :tokens] for _ in range(2))
    exact = torch.nn.functional.scaled_dot_product_attention(
        query.double(), keys.double(), values.double(), scale=0.3, enable_gqa=True
    )
    unit = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    torch.testing.assert_close(attend(query, keys, values, 0.3).double(), exact, rtol=unit, atol=1e-5)


def test_attention_of_other_tensors_is_left_to_torch():
    query, keys = torch.randn(2, 4, 1, 32), torch.randn(2, 2, 9, 32)
    assert attend(query, keys, keys, 1.0) is not None
    assert attend(query.to("meta"), keys.to("meta"), keys.to("meta"), 1.0) is None
    assert attend(query.expand(2, 4, 3, 32), keys, keys, 1.0) is None
    assert attend(query, keys, torch.randn(2, 2, 9, 64), 1.0) is None
    assert attend(query, keys[:1], keys[:1], 1.0) is None
    assert attend(query[:, :3], keys, keys, 1.0) is None
    assert attend(query, keys.bfloat16(), keys.bfloat16(), 1.0) is None
    assert attend(query.double(), keys.double(), keys.double(), 1.0) is None
    assert attend(query, keys.transpose(1, 2).contiguous().transpose(1, 2), keys, 1.0) is None
    assert attend(query[..., :24], keys[..., :24], keys[..., :24], 1.0) is None


def _pruned(model):
    model.model.layers = model.model.layers[:1]
    model.config.num_hidden_layers = 1


def _swapped(model):
    layers = model.model.layers
    layers[0], layers[1] = layers[1], layers[0]


def _replaced(model):
    model.model.layers = torch.nn.ModuleList([*model.model.layers][::-1])
    for index, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = index


@pytest.mark.parametrize("change", [_pruned, _swapped, _replaced])
def test_layers_that_are_exchanged_are_those_that_are_computed_with(llama, monkeypatch, change):
    run(llama, monkeypatch, shortcut=True)
    change(llama)
    found, expected = (run(llama, monkeypatch, shortcut=shortcut)[0] for shortcut in (True, False))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("before", [True, False])
def test_a_class_whose_forward_somebody_changed_is_asked(directories, monkeypatch, before, wrapped):
    kind = transformers.models.llama.modeling_llama.LlamaAttention
    plain, calls = kind.forward, []

    def changed(self, *args, **kwargs):
        calls.append(1)
        return plain(self, *args, **kwargs)

    changed = functools.wraps(plain)(changed) if wrapped else changed
    if before:
        monkeypatch.setattr(kind, "forward", changed)
    model = edkm_cli.load(directories["llama"], dtype="float32")
    run(model, monkeypatch, shortcut=True)
    monkeypatch.setattr(kind, "forward", changed)
    calls.clear()
    run(model, monkeypatch, shortcut=True)
    assert len(calls) == 2 * (1 + len(TOKENS))
    decoder = transformers.LlamaModel
    monkeypatch.setattr(decoder, "forward", lambda self, *args, **kwargs: calls.append("decoder"))
    assert model.model(PROMPT) is None


def test_a_decoder_whose_forward_somebody_changed_is_asked_for_one_token_too(llama, monkeypatch):
    _, cache = run(llama, monkeypatch, shortcut=True)
    monkeypatch.setattr(transformers.LlamaModel, "forward", lambda self, *args, **kwargs: None)
    with torch.no_grad():
        assert llama.model(input_ids=torch.tensor([[3]]), past_key_values=cache, use_cache=True) is None


def test_the_shortcut_can_be_turned_off(directories, monkeypatch):
    monkeypatch.setenv("EDKM_ONE_TOKEN", "0")
    assert not hasattr(edkm_cli.load(directories["llama"]).base_model, "_shortcut")


def test_the_default_device_is_not_asked(llama):
    with torch.no_grad():
        cache = llama(PROMPT, use_cache=True).past_key_values
        with torch.device("meta"):
            logits = llama(torch.tensor([[3]], device="cpu"), past_key_values=cache).logits
    assert logits.device.type == "cpu"


def test_an_attention_function_that_somebody_put_in_the_table_is_called(llama, monkeypatch):
    plain = run(llama, monkeypatch, shortcut=True)[0]

    @functools.wraps(sdpa_attention_forward)
    def halved(*given, **how):
        return sdpa_attention_forward(*given, **how)[0] / 2, None

    monkeypatch.setitem(transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", halved)
    found, expected = (run(llama, monkeypatch, shortcut=shortcut)[0] for shortcut in (True, False))
    assert torch.equal(found, expected)
    assert not torch.allclose(found, plain)


class _Wrapper(torch.nn.Module):
    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, *args, **kwargs):
        return self.block(*args, **kwargs) * 1.5


def test_a_layer_inside_somebodys_wrapper_goes_to_transformers_and_comes_back(llama, monkeypatch):
    plain = run(llama, monkeypatch, shortcut=True)[0]
    inner = llama.model.layers[1]
    llama.model.layers[1] = _Wrapper(inner)
    found, expected = (run(llama, monkeypatch, shortcut=shortcut)[0] for shortcut in (True, False))
    assert torch.equal(found, expected)
    llama.model.layers[1] = inner
    assert torch.equal(run(llama, monkeypatch, shortcut=True)[0], plain)


def test_a_bias_that_is_added_later_is_added(llama, monkeypatch):
    linear = llama.model.layers[1].mlp.down_proj
    linear.bias = None
    plain = run(llama, monkeypatch, shortcut=True)[0]
    linear.bias = torch.nn.Parameter(torch.ones(linear.out_features))
    found, expected = (run(llama, monkeypatch, shortcut=shortcut)[0] for shortcut in (True, False))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(found, plain, atol=1e-2)


def test_tensors_beside_the_tokens_go_to_transformers(llama, monkeypatch):
    plain = run(llama, monkeypatch, shortcut=False)[0]
    found = run(llama, monkeypatch, shortcut=True, token_type_ids=torch.zeros(1, 10, dtype=torch.int64))[0]
    torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-4)

"""Tiny random models of the families that transformers has, each as `edkm compress --model DIR` gets it."""

from __future__ import annotations

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

_SIZES = {
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": 256,
    "pad_token_id": None,
    "initializer_range": 0.2,
}
_EXPERTS = {
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
_HEAD = {"head_dim": 8}
_LINEAR_ATTENTION = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}

# model type -> what its configuration has beside `_SIZES`.
FAMILIES: dict[str, dict] = {
    "llama": {},
    "mistral": _HEAD,
    "qwen2": {},
    "qwen3": _HEAD,
    "gemma": _HEAD,
    "gemma2": _HEAD,
    "gemma3_text": _HEAD,
    "vaultgemma": _HEAD,
    "minicpm3": _LATENT,
    "llama4_text": {**_HEAD, "num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 48},
    "deepseek_v2": {**_LATENT, **_EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1},
    "deepseek_v3": {**_LATENT, **_EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1},
    "phi": {},
    "phi3": {**_ROPE},
    "olmo": {},
    "olmo2": {},
    "olmo3": {},
    "cohere": {},
    "cohere2": _HEAD,
    "granite": {},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "stablelm": {},
    "mixtral": {"num_local_experts": 4},
    "phimoe": {"num_local_experts": 4},
    "qwen2_moe": {**_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 16},
    "qwen3_moe": {**_EXPERTS, **_HEAD, "num_experts": 4},
    "olmoe": {**_EXPERTS, "num_experts": 4},
    "gpt_oss": {**_HEAD, "num_local_experts": 4, "num_experts_per_tok": 2, **_ROPE},
    "glm4_moe": {**_EXPERTS, **_HEAD, "n_routed_experts": 4, "n_shared_experts": 1},
    "gpt_neox": {},
    "falcon": {},
    "smollm3": {},
    "helium": _HEAD,
    "glm": _HEAD,
    "glm4": _HEAD,
    "starcoder2": {},
    "nemotron": {},
    "exaone4": _HEAD,
    "seed_oss": _HEAD,
    "arcee": _HEAD,
    "hunyuan_v1_dense": _HEAD,
    "ernie4_5": _HEAD,
    "bloom": {},
    "opt": {"word_embed_proj_dim": 32, "ffn_dim": 48, "do_layer_norm_before": True},
    "persimmon": {},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2},
    "lfm2": {},
    "biogpt": {},
    "nanochat": {},
    "ministral": _HEAD,
    "diffllama": _HEAD,
    "qwen3_next": {
        **_EXPERTS,
        **_HEAD,
        "num_experts": 4,
        "shared_expert_intermediate_size": 16,
        **_LINEAR_ATTENTION,
    },
    "jamba": {"num_experts": 2, "mamba_d_state": 8, "mamba_dt_rank": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
    "falcon_h1": {**_HEAD, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8},
    "gemma3n_text": {
        **_HEAD,
        "intermediate_size": [48, 48],
        "layer_types": ["sliding_attention", "full_attention"],
        "vocab_size_per_layer_input": 257,
        "hidden_size_per_layer_input": 8,
        "num_kv_shared_layers": 0,
        "altup_num_inputs": 2,
        "laurel_rank": 4,
        "activation_sparsity_pattern": [0.0, 0.0],
    },
}


def family(model_type: str, dtype: torch.dtype = torch.float32, **sizes):
    """A tiny random model of a family in `dtype`, in evaluation mode; norms and biases are moved off one and zero."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[model_type](**{**_SIZES, **FAMILIES[model_type], **sizes})
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


_IMAGE_TOKEN = 256
_SEES = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "intermediate_size": 48}
_PATCHES = {**_SEES, "image_size": 16, "patch_size": 8}
_SIGLIP = {"model_type": "siglip_vision_model", **_PATCHES}
_GRID = {"depth": 2, "num_heads": 4, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 32, "patch_size": 8}
_MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}}

# model type -> (its language model, what sees, tokens an image takes, or 0 where no image is tried, what else is said).
SEEING: dict[str, tuple[dict, dict, int, dict]] = {
    "llava": ({"model_type": "llama"}, {"model_type": "clip_vision_model", **_PATCHES, "projection_dim": 32}, 4, {}),
    "llava_next": ({"model_type": "mistral"}, {"model_type": "clip_vision_model", **_PATCHES}, 0, {}),
    "gemma3": (_HEAD, _SIGLIP, 4, {"mm_tokens_per_image": 4}),
    "paligemma": ({"model_type": "gemma", **_HEAD}, _SIGLIP, 4, {"projection_dim": 32}),
    "aya_vision": ({"model_type": "cohere2", **_HEAD}, _SIGLIP, 1, {}),
    "smolvlm": ({"model_type": "llama"}, _PATCHES, 1, {"scale_factor": 2}),
    "idefics3": ({"model_type": "llama"}, _PATCHES, 0, {"scale_factor": 2}),
    "internvl": (
        {"model_type": "qwen2"},
        {**_SEES, "image_size": [16, 16], "patch_size": [8, 8]},
        1,
        {"downsample_ratio": 0.5},
    ),
    "mistral3": ({"model_type": "mistral", **_HEAD}, {"model_type": "pixtral", **_PATCHES, "head_dim": 8}, 0, {}),
    "qwen2_5_vl": (_MROPE, _GRID, 0, {}),
    "qwen3_vl": ({**_HEAD, **_MROPE}, {**_GRID, "deepstack_visual_indexes": [0], "num_position_embeddings": 16}, 0, {}),
    "glm4v": ({**_HEAD, **_MROPE}, {**_GRID, "image_size": 16}, 0, {}),
    "llama4": (
        {**FAMILIES["llama4_text"]},
        {**_PATCHES, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32},
        0,
        {},
    ),
    "qwen3_5": ({**_HEAD, **_LINEAR_ATTENTION}, {**_GRID, "num_position_embeddings": 16}, 0, {}),
}


def seeing_family(model_type: str):
    """A tiny random model that reads images, too, and what it is called with beside ids of which some are an image."""
    torch.manual_seed(0)
    text, sees, tokens, more = SEEING[model_type]
    marks = {"image_token_id": _IMAGE_TOKEN, "image_token_index": _IMAGE_TOKEN}
    config = CONFIG_MAPPING[model_type](text_config={**_SIZES, **text}, vision_config=sees, **marks, **more)
    ids = torch.randint(0, 255, (1, 12))
    ids[:, 2 : 2 + tokens] = _IMAGE_TOKEN
    pixels = torch.randn(1, 1, 3, 16, 16) if model_type == "smolvlm" else torch.randn(1, 3, 16, 16)
    image = {"pixel_values": pixels} if tokens else {}
    if model_type == "gemma3":
        image["token_type_ids"] = (ids == _IMAGE_TOKEN).long()
    return AutoModelForImageTextToText.from_config(config).eval(), ids, image

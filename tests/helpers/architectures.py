"""Tiny models of the families of `AutoModelForCausalLM`: 2 layers, 32 wide, 9 tokens, windows of 8 tokens."""

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.helpers.models import WORDS

# fmt: off
RIGHT = [
    "afmoe", "apertus", "arcee", "aria_text", "axk1", "axk2", "bailing_hybrid", "bamba", "bart", "beam",
    "bert-generation", "bigbird_pegasus", "biogpt", "bitnet", "blenderbot", "blenderbot-small", "bloom", "codegen",
    "cohere", "cohere2", "cohere2_moe", "cohere_compass_text", "ctrl", "cwm", "dbrx", "deepseek_v2", "deepseek_v3",
    "deepseek_v32", "deepseek_v4", "diffllama", "doge", "dots1", "dots3_note_text", "emu3", "ernie4_5",
    "ernie4_5_moe", "exaone4", "exaone_moe", "falcon", "falcon_h1", "falcon_mamba", "flex_olmo", "flint", "gemma",
    "gemma2", "gemma3_text", "gemma3n_text", "gemma4_text", "gemma4_unified_text", "glm", "glm4", "glm4_moe",
    "glm4_moe_lite", "glm_moe_dsa", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gpt_neox_japanese", "gpt_oss",
    "gptj", "granite", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared",
    "helium", "hrm_text", "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "hy_v4", "hyperclovax", "inkling2_text",
    "inkling_text", "jais2", "jamba", "jetmoe", "kimi_linear", "kolibri1", "laguna", "lfm2", "lfm2_moe", "lfm3",
    "llama", "llama4_text", "longcat_flash", "mamba", "mamba2", "marian", "mbart", "mellum", "mimo_v2_flash",
    "minicpm3", "minimax", "minimax_m2", "minimax_m3_vl_text", "ministral", "ministral3", "mistral", "mixtral",
    "mllama", "moshi", "mpt", "mvp", "nanochat", "nemotron", "nemotron_h", "olmo", "olmo2", "olmo3", "olmo_hybrid",
    "olmoe", "openai-gpt", "opt", "pegasus", "persimmon", "phi", "phi3", "phimoe", "plbart", "qwen2", "qwen2_moe",
    "qwen3", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next", "qwen4_exp_text", "recurrent_gemma",
    "rwkv", "seed_oss", "smollm3", "solar_open", "stablelm", "starcoder2", "trocr", "vaultgemma", "whisper", "xglm",
    "xlstm", "youtu", "zamba", "zamba2", "zaya",
]
"""Families that act and score as a plain pass of their own does."""

UNCACHED = (
    dict.fromkeys(
        ["axk2", "deepseek_v32", "deepseek_v4", "dots3_note_text", "glm_moe_dsa", "hy_v4", "qwen4_exp_text"],
        "chooses keys by an index or compresses them, with a cache of its own",
    )
    | dict.fromkeys(
        [
            "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "mvp", "pegasus", "plbart",
            "trocr",
        ],
        "counts positions from the length of the cache, the same in all rows",
    )
    | dict.fromkeys(["nemotron_h", "zamba2"], "its step of one token ignores the limit of its time steps")
    | dict.fromkeys(["minimax", "xlstm"], "has a cache of its own")
    | {
        "gpt_neo": "its local attention makes its own mask, of the number of keys",
        "gpt_neox_japanese": "cannot read keys that are not contiguous",
        "inkling_text": "counts distances from one position, the same in all rows",
        "inkling2_text": "counts distances from one position, the same in all rows",
        "moshi": "its plain pass ignores the window that its cache has",
        "openai-gpt": "has no cache",
        "recurrent_gemma": "keeps its states in its own modules",
    }
)
"""Families that read the whole prefix again at every step, and why."""

HEAD, AHEAD = "are not its output layer applied to its trunk", "is not causal"
REFUSED = dict.fromkeys(
    [
        "bert", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert", "modernbert-decoder",
        "prophetnet", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl",
        "xmod",
    ],
    HEAD,
) | {
    "musicgen": "cannot read a text",  # four tokens at every place
    "rembert": "cannot read a text",  # an output layer wider than the trunk
    "reformer": "cannot sample texts",  # its attention draws random numbers
    "xlm": AHEAD,
    "xlnet": AHEAD,
}
"""Families that are refused, and what the sentence says."""

LAYERS, HEADS, WIDTH = 2, 4, 32
USUAL = dict.fromkeys(
    ["dropout", "attention_dropout", "hidden_dropout", "activation_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop",
     "hidden_dropout_prob", "attention_probs_dropout_prob", "embed_dropout"], 0.0,
) | dict(
    vocab_size=len(WORDS), bos_token_id=7, eos_token_id=7, pad_token_id=8, is_decoder=True,
    hidden_size=WIDTH, d_model=WIDTH, n_embd=WIDTH, emb_dim=WIDTH, embedding_size=WIDTH,
    intermediate_size=64, n_inner=64, ffn_dim=64, decoder_ffn_dim=64, encoder_ffn_dim=64, ffn_hidden_size=64, dff=64,
    num_hidden_layers=LAYERS, n_layer=LAYERS, n_layers=LAYERS, num_layers=LAYERS, decoder_layers=LAYERS,
    encoder_layers=LAYERS,
    num_attention_heads=HEADS, n_head=HEADS, n_heads=HEADS, num_heads=HEADS, decoder_attention_heads=HEADS,
    encoder_attention_heads=HEADS, num_key_value_heads=2, head_dim=8, rotary_dim=4,
    max_position_embeddings=64, n_positions=64, max_seq_len=64, model_max_length=64,
    initializer_range=0.2, init_std=0.2, logit_scale=1.0,
    sliding_window=8, window_size=8, attention_window_size=8, attention_chunk_size=8,
    moe_intermediate_size=16, shared_expert_intermediate_size=16, moe_shared_expert_intermediate_size=16,
    num_experts=4, num_local_experts=4, n_routed_experts=4, num_experts_per_tok=2, num_experts_per_token=2,
    top_k_experts=2, n_group=1, topk_group=1, n_shared_experts=1, first_k_dense_replace=1,
    q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8,
    index_topk=8, index_head_dim=8, index_n_heads=16,  # of few heads many scores are 0, and which count is chance
    state_size=8, conv_kernel=4, mamba_d_state=8, mamba_d_conv=4, mamba_expand=2, mamba_n_heads=8, mamba_d_head=8,
    mamba_n_groups=1, mamba_dt_rank=4, mamba_num_heads=8, mamba_head_dim=8, ssm_state_size=8, mamba_headdim=8,
    n_mamba_heads=8, mamba_ngroups=1, n_groups=1, lru_width=WIDTH, chunk_size=8, mamba_chunk_size=8,
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8,
    linear_head_dim=8, linear_num_heads=4, vocab_size_per_layer_input=len(WORDS), hidden_size_per_layer_input=8,
)
"""Settings by the names that configurations have for them; each takes those that it knows."""

LATENT = dict(num_key_value_heads=HEADS, head_dim=4)
"""Attention by latent keys and values, whose ``head_dim`` is that of the rotated part."""
BOTH = dict(layer_types=["linear_attention", "full_attention"])
OWN = dict.fromkeys(
    ["axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "youtu"],
    LATENT,
) | dict.fromkeys(["qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"], BOTH) | {
    "bailing_hybrid": LATENT | BOTH | dict(layer_group_size=2),
    "bamba": dict(attn_layer_indices=[1]),
    "bart": dict(is_encoder_decoder=False),
    "cohere_compass_text": dict(
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters=dict(
            sliding_attention=dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 1, 1]), full_attention=None,
        ),
    ),
    "dbrx": dict(attn_config=dict(rope_theta=1e4, kv_n_heads=2, clip_qkv=8.0), ffn_config=dict(ffn_hidden_size=32)),
    "dots3_note_text": dict(num_key_value_heads=HEADS),
    "falcon": dict(head_dim=None),
    "falcon_h1": dict(mamba_d_ssm=64, lm_head_multiplier=0.5),
    "gemma2": dict(final_logit_softcapping=2.0),
    "gemma3n_text": dict(num_kv_shared_layers=0),
    "gpt_neo": dict(attention_types=[[["global", "local"], 1]]),
    "granite": dict(logits_scaling=0.5),
    "granitemoehybrid": dict(layer_types=["mamba", "attention"]),
    "jamba": dict(attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=0),
    "kimi_linear": LATENT | BOTH,
    "lfm2_moe": dict(layer_types=["conv", "full_attention"], num_dense_layers=1),
    "lfm3": dict(layer_types=["conv", "full_attention"]),
    "llama4_text": dict(layer_types=["chunked_attention", "full_attention"]),
    "longcat_flash": LATENT | dict(num_layers=1, zero_expert_num=2, moe_topk=2, expert_ffn_hidden_size=16),
    "mamba2": dict(num_heads=8, expand=2),
    "minicpm3": LATENT | dict(dim_model_base=WIDTH // 2),
    "prophetnet": dict(
        num_hidden_layers=None, num_encoder_layers=LAYERS, num_decoder_layers=LAYERS, num_encoder_attention_heads=HEADS,
        num_decoder_attention_heads=HEADS,
    ),
    "qwen4_exp_text": dict(
        layer_types=["linear_attention", "indexed_attention"], indexer_n_heads=4, indexer_kv_heads=1,
        indexer_head_dim=8, indexer_budget=8, indexer_compress_ratio=2, hc_lowrank=4, ple_embed_dim=8,
        ngram_vocab_size_base=31, heads_per_ngram=2,
    ),
    "recurrent_gemma": dict(block_types=["recurrent", "attention"], logits_soft_cap=2.0),
    "reformer": dict(
        axial_pos_embds=False, attn_layers=["local", "lsh"], attention_head_size=8, feed_forward_size=64,
        local_attn_chunk_length=8, lsh_attn_chunk_length=8, num_buckets=4, num_hidden_layers=None,
    ),
    "roc_bert": dict(pronunciation_vocab_size=9, pronunciation_embed_dim=8, shape_vocab_size=9, shape_embed_dim=8),
    "xlnet": dict(max_position_embeddings=None, d_inner=64, d_head=8),
    "xlstm": dict(hidden_size=64, embedding_dim=64, qk_dim_factor=1.0, num_blocks=LAYERS, v_head_dim=None),
    "xmod": dict(default_language="en_XX"),
    "zamba": dict(
        num_hidden_layers=4, layers_block_type=["linear_attention", "hybrid"] * 2, attention_hidden_size=64,
        attention_head_dim=16, n_mamba_heads=2, num_key_value_heads=HEADS,
    ),
    "zamba2": dict(
        layers_block_type=["linear_attention", "hybrid"], num_key_value_heads=HEADS, attention_head_dim=16,
        attention_hidden_size=64, kv_channels=8, num_query_groups=HEADS, hybrid_layer_ids=[1], adapter_rank=4,
    ),
    "zaya": dict(num_experts_per_tok=1),
}
"""What a family needs beside; None takes its own default."""
# fmt: on


def make_family(family, **options):
    """A model with random weights, spread out so that its logits are not all alike."""
    model_type = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family])
    kind = model_type.config_class
    known, names = kind(), kind.attribute_map or {}
    settings = known.to_dict()
    wanted = {name: x for name, x in USUAL.items() if name in settings or name in names or hasattr(known, name)}
    wanted |= OWN.get(family, {}) | options
    wanted = {name: x for name, x in wanted.items() if x is not None and names.get(name) not in wanted}
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = model_type(kind(**wanted))
        for p in model.parameters():  # or what begins at 0 (biases, the embedding of the pad token) would do nothing
            p += 0.05 * torch.randn_like(p)
    return model

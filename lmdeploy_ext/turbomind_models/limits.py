"""What DeepSeek-VL2's language half on TurboMind takes. Anything else is refused before the engine starts: its own
checks end the process, or there are none and the answers are wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from turbovit.lmdeploy_ext.turbomind_models.kernels import Kernels

if TYPE_CHECKING:
    from turbovit.lmdeploy_ext.deepseek_vl2_config import DeepseekVL2LanguageConfig

LATENT, ROPE = 512, 64  # TurboMind's attention over a latent is compiled for these, together 576
# Entries of ``language_config`` and the values that are served.
_TAKEN: dict[str, tuple[Any, ...]] = {
    "q_lora_rank": (None,),
    "n_group": (None, 1),
    "moe_layer_freq": (1,),
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "tie_word_embeddings": (False,),
}
_ROUTING = {"greedy": "softmax", "noaux_tc": "sigmoid"}  # topk_method to scoring_func
_HALF_BYTES = 2
_WIDTH = 32  # the grouped products of experts sum over both widths, in steps of it (not on sm90)


def language_config(config: Any) -> DeepseekVL2LanguageConfig:
    """The language half's config with the code's defaults.

    Args:
        config: a DeepSeek-VL2 checkpoint's, as its JSON or as LMDeploy loads it.

    Raises:
        StrictDataclassError: an entry has another type than the original's code takes, or does not fit another.
    """
    from turbovit.lmdeploy_ext.deepseek_vl2_config import DeepseekVL2LanguageConfig

    given: Any = config.get("language_config") if isinstance(config, Mapping) else config.language_config
    return given if isinstance(given, DeepseekVL2LanguageConfig) else DeepseekVL2LanguageConfig(**given)


def config_problems(config: Mapping[str, Any], kernels: Kernels | None) -> list[str]:
    """Why TurboMind cannot run the language half of a checkpoint, one line each; empty where it can.

    Args:
        config: its config.json.
        kernels: what the installed TurboMind holds; None where it has no extension, and that is not looked at.
    """
    from huggingface_hub.errors import StrictDataclassError

    try:
        text = language_config(config)
    except (StrictDataclassError, ValueError, TypeError, LookupError, ArithmeticError) as error:  # as transformers may
        return [f"its language_config cannot be read: {' '.join(str(error).split())}"]
    problems = ["its weights are quantised; TurboMind's half takes 16-bit and 32-bit ones"] * _is_quantised(config)
    for name, taken in _TAKEN.items():
        value = getattr(text, name)
        if value not in taken:
            problems.append(f"its {name} is {value!r}, expected {' or '.join(map(repr, taken))}")
    if _rope_type(text) != "default":
        problems.append(f"its rope is scaled ({_rope_type(text)!r}), expected none of that")
    problems += _latent_problems(text) if text.use_mla else []
    problems += _routing_problems(text, kernels) if text.n_routed_experts else []
    if kernels is not None:
        size = LATENT + ROPE if text.use_mla else text.hidden_size // text.num_attention_heads
        if size not in kernels.head_sizes:
            known = ", ".join(map(str, sorted(kernels.head_sizes)))
            problems.append(f"its attention has heads of {size}; this TurboMind has kernels for {known}")
    return problems


def dtype_problem(dtype: str, capability: tuple[int, int]) -> str | None:
    """Why the experts cannot run in ``float16`` or ``bfloat16`` on a GPU of this compute capability, if so.

    As the wheel's own plans say for capabilities 7.5, 8.0, 8.9, 9.0 and 12.0.
    """
    if dtype == "float16" and capability[0] == 9:
        return "TurboMind has no float16 kernels for experts on GPUs of compute capability 9.0: use --dtype bfloat16"
    if dtype == "bfloat16" and capability < (8, 0):
        number = ".".join(map(str, capability))
        return f"TurboMind has no bfloat16 kernels for GPUs of compute capability {number}: use --dtype float16"
    return None


def stored_dtype(config: Mapping[str, Any]) -> str | None:
    """The dtype that a config.json names; transformers called the entry ``torch_dtype`` before 4.56."""
    return config.get("dtype") or config.get("torch_dtype")


def dtype_on(capability: tuple[int, int], wanted: str, stored: str | None) -> str:
    """The dtype that LMDeploy's TurboMind takes on a GPU.

    Args:
        wanted: ``auto``, ``float16`` or ``bfloat16``.
        stored: as `stored_dtype` gives it.
    """
    if capability < (8, 0):
        return "float16"
    dtype = stored if wanted == "auto" else wanted
    return dtype if dtype in ("float16", "bfloat16") else "bfloat16"


def folded_bytes(config: Mapping[str, Any]) -> int:
    """What the language half needs on the GPUs beyond what is stored.

    With MLA the second factors of keys and values are multiplied into the projections of queries and outputs, which
    get wider by it.
    """
    text = language_config(config)
    if not text.use_mla:
        return 0
    rank, rope, nope, value = text.kv_lora_rank, text.qk_rope_head_dim, text.qk_nope_head_dim, text.v_head_dim
    assert rank is not None
    heads = text.num_attention_heads
    wider = text.hidden_size * heads * ((rank - nope) + (rank + rope - value))
    return _HALF_BYTES * text.num_hidden_layers * (wider - rank * heads * (nope + value))


def _latent_problems(text: DeepseekVL2LanguageConfig) -> list[str]:
    if (text.kv_lora_rank, text.qk_rope_head_dim) == (LATENT, ROPE):
        return []
    return [
        f"its keys have a latent of {text.kv_lora_rank} and a rope of {text.qk_rope_head_dim}; TurboMind's attention "
        f"takes {LATENT} and {ROPE}"
    ]


def _routing_problems(text: DeepseekVL2LanguageConfig, kernels: Kernels | None) -> list[str]:
    experts, chosen = text.n_routed_experts, text.num_experts_per_tok
    widths = {name: getattr(text, name) for name in ("hidden_size", "moe_intermediate_size")}
    uneven = [f"its {name} is {width}" for name, width in widths.items() if width % _WIDTH]
    if uneven:
        return [f"{' and '.join(uneven)}; TurboMind's experts take multiples of {_WIDTH}"]
    if _ROUTING.get(str(text.topk_method)) != text.scoring_func or not experts or not chosen:
        known = " or ".join(f"{method} with {scores}" for method, scores in _ROUTING.items())
        return [f"its experts are chosen by {text.topk_method} with {text.scoring_func}, expected {known}"]
    if kernels is None:
        return []
    what = f"it chooses {chosen} of {experts} experts"
    if text.topk_method == "noaux_tc" and (experts, chosen) not in kernels.biased_routers:
        known = " or ".join(f"{of} of {most}" for most, of in sorted(kernels.biased_routers)) or "none"
        return [f"{what} with a correction bias; this TurboMind has kernels for {known}"]
    if text.topk_method == "greedy" and not kernels.route_by_softmax(experts, chosen):
        known = ", ".join(f"{of} of {most}" for most, of in sorted(kernels.routers)) or "none"
        return [f"{what}; this TurboMind has kernels for at most {known}, and whole fours of experts"]
    if chosen not in kernels.sums:
        known = ", ".join(map(str, sorted(kernels.sums)))
        return [f"{what}; this TurboMind adds up {known} of them"]
    return []


def _rope_type(text: DeepseekVL2LanguageConfig) -> str:
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    return str(rope.get("rope_type") or rope.get("type") or "default")


def _is_quantised(config: Any) -> bool:
    """Whether there is a ``quantization_config`` at any depth; null is none."""
    if not isinstance(config, Mapping):
        return False
    own = config.get("quantization_config") is not None
    return own or any(_is_quantised(value) for value in config.values())

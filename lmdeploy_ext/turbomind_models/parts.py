"""What of TurboMind's Python side the language halves are made of, as it was seen in lmdeploy 0.18.0.

Read from its files: importing them takes the CUDA extension, which is not everywhere that this is asked.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

# Every function that is called, and every method that is called or takes another's place: file below
# ``lmdeploy/turbomind``, name, and its parameters, all of them.
PARTS: dict[str, tuple[str, ...]] = {
    "supported_models.py:is_supported": ("model_path", "trust_remote_code"),
    "converter.py:get_tm_config": ("model_path", "engine_config", "group_size", "trust_remote_code"),
    "weight_format.py:WeightFormatResolver.resolve": ("self", "pfx", "index", "optional"),
    "weight_format.py:TrivialFormat.normalize": ("self", "tensor", "kind"),
    "checkpoint.py:Prefix.__add__": ("self", "key"),
    "checkpoint.py:Prefix.pop": ("self", "name", "sep", "index"),
    "checkpoint.py:Prefix.slices": ("self", "begin", "end"),
    "text_model.py:TextModel.__init__": ("self", "cfg", "resolver"),
    "text_model.py:TextModel.bind_runtime": (
        *("self", "ctx", "root_handles", "attn_tp", "mlp_tp", "ep", "model_tp", "dense_tp"),
    ),
    "text_model.py:TextModel._linear": ("self", "pfx", "optional"),
    "text_model.py:TextModel.norm": ("self", "pfx", "transform", "zero_centered"),
    "models/utils.py:make_model_weight_config": ("cfg",),
    "models/utils.py:make_attention_config": ("cfg", "head_dim"),
    "models/utils.py:make_mla_config": ("cfg",),
    "models/utils.py:make_moe_config": (
        *("cfg", "experts_per_token", "act_type", "norm_topk_prob", "topk_method", "scoring_func", "routed_scale"),
        *("topk_group", "n_group", "router_n_groups"),
    ),
    "models/utils.py:make_ffn_config": ("cfg", "act_type", "inter_size"),
    "models/utils.py:reorder_rotary_emb": ("x", "head_dim", "rope_dim", "dtype"),
    "builders/_base.py:_act_type_id": ("act_str",),
    "builders/_base.py:Context.__init__": ("self", "devices", "gemm", "data_type", "gemm_input_dtype"),
    "builders/_base.py:Builder.__init__": ("self", "config", "ctx"),
    "builders/_base.py:Builder.build": ("self",),
    "builders/_base.py:Builder._add_linear": ("self", "name", "linear", "split_side", "plan"),
    "builders/attention.py:AttentionBuilder.__init__": ("self", "config", "ctx", "tp"),
    "builders/attention.py:AttentionBuilder.add_qkv_proj": ("self", "q", "k", "v", "gate"),
    "builders/attention.py:AttentionBuilder.add_o_proj": ("self", "o"),
    "builders/mla.py:fold_kv_b": ("q_b", "kv_b", "wo", "cfg"),
    "builders/mla.py:pad_wo_input": ("wo", "cfg"),
    "builders/mla.py:MLABuilder.__init__": ("self", "config", "ctx", "tp"),
    "builders/ffn.py:FfnBuilder.__init__": ("self", "config", "ctx", "tp"),
    "builders/ffn.py:FfnBuilder.add_ffn": ("self", "w1", "w2", "w3"),
    "builders/moe.py:MoeBuilder.__init__": ("self", "config", "ctx", "ep"),
    "builders/moe.py:MoeBuilder.add_gate": ("self", "name", "linear"),
    "builders/moe.py:MoeBuilder.add_param": ("self", "name", "tensor", "split_side"),
    "builders/moe.py:MoeBuilder.range": ("self", "num_experts"),
    "builders/module_list.py:ModuleListBuilder.__setitem__": ("self", "index", "value"),
    "builders/text_model.py:TextModelBuilder.__init__": ("self", "config", "ctx", "root_handles", "tp", "vocab_size"),
    "builders/text_model.py:TextModelBuilder.add_token_embeds": ("self", "tensor"),
    "builders/text_model.py:TextModelBuilder.add_lm_head": ("self", "linear"),
}


def part_problems(folder: Path) -> list[str]:
    """What of `PARTS` is not as it was, one line each; empty where all is well.

    Args:
        folder: that of the installed ``lmdeploy.turbomind``.
    """
    problems = []
    for path, expected in PARTS.items():
        file, name = path.split(":")
        parameters = _signatures(folder / file).get(name)
        if parameters is None:
            problems.append(f"{path} is gone")
        elif parameters != expected:
            problems.append(f"{path} takes ({', '.join(parameters)}), expected ({', '.join(expected)})")
    return problems


def _signatures(file: Path) -> dict[str, tuple[str, ...]]:
    return _signatures_as_of(file, file.stat().st_mtime_ns) if file.is_file() else {}


@cache
def _signatures_as_of(file: Path, _: int) -> dict[str, tuple[str, ...]]:
    """Functions, and methods as ``Class.method``, to the names of their parameters."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    owners = [("", tree.body), *((f"{node.name}.", node.body) for node in tree.body if isinstance(node, ast.ClassDef))]
    return {
        f"{owner}{node.name}": _parameters(node.args)
        for owner, body in owners
        for node in body
        if isinstance(node, ast.FunctionDef)
    }


def _parameters(arguments: ast.arguments) -> tuple[str, ...]:
    return tuple(one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs))

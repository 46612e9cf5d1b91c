"""DeepSeek-VL2's language half for TurboMind: DeepSeek-V2 with MHA (tiny), with MLA without a latent of the queries
(small), and with experts chosen by sigmoid and a correction bias (base).

Reference: the original's ``modeling_deepseek.py`` (github.com/deepseek-ai/DeepSeek-VL2). LMDeploy's own models for
TurboMind are made likewise of its builders.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from turbovit.engines.errors import UnsupportedBackendError
from turbovit.lmdeploy_ext.turbomind_models import adapter
from turbovit.lmdeploy_ext.turbomind_models.limits import config_problems


class DeepseekVL2Language:
    """A source model of TurboMind's, in front of its `TextModel`: from the checkpoint's config and tensors to builders.

    Args:
        cfg: the whole checkpoint's config, as LMDeploy loads it.
        resolver: LMDeploy's; gives tensors as [in, out], in the engine's dtype.

    Raises:
        UnsupportedBackendError: this is no DeepSeek-VL2, or one that TurboMind cannot run; says why.
    """

    cfg: Any
    _ctx: Any
    _root_handles: Any
    _attn_tp: Any
    _mlp_tp: Any
    _ep: Any
    _model_tp: Any
    _dense_tp: Any
    _linear: Callable[[Any], Any]
    norm: Callable[[Any], Any]

    def __init__(self, cfg: Any, *, resolver: Any):
        if getattr(cfg, "model_type", None) != "deepseek_vl_v2":
            raise UnsupportedBackendError(
                f"turbovit's language half for TurboMind is DeepSeek-VL2's, and this config is of "
                f"{getattr(cfg, 'model_type', None)!r}: use LMDeploy's PyTorch engine for it"
            )
        problems = config_problems(cfg.to_dict(), adapter.installed_kernels()) + adapter.field_problems()
        problems += adapter.format_problems(resolver)
        if problems:
            raise UnsupportedBackendError(f"TurboMind cannot run this DeepSeek-VL2: {'; '.join(problems)}")
        super().__init__(cfg.language_config, resolver=resolver)  # type: ignore[call-arg]  # TextModel's
        self._tm = adapter.turbomind_parts()

    def bind_runtime(self, *, ctx: Any, **groups: Any) -> None:
        """What LMDeploy calls once the engine's contexts are there.

        Raises:
            UnsupportedBackendError: the GPU has no kernels for experts of this dtype.
        """
        adapter.require_expert_kernels(ctx)
        super().bind_runtime(ctx=ctx, **groups)  # type: ignore[misc]  # TextModel's

    def model(self, pfx: Any) -> None:
        """Build everything, consuming the tensors below ``language``."""
        pfx = pfx + "language"
        root = self._tm.TextModelBuilder(
            self._tm.make_model_weight_config(self.cfg),
            self._ctx,
            root_handles=self._root_handles,
            tp=self._model_tp,
            vocab_size=self.cfg.vocab_size,
        )
        root.add_token_embeds(pfx.pop("model.embed_tokens.weight"))
        root.norm = self.norm(pfx + "model.norm")
        root.add_lm_head(self._linear(pfx + "lm_head"))
        root.layers = self._layers(pfx + "model.layers")
        root.build()

    def _layers(self, pfx: Any) -> Any:
        layers = self._list()
        for index, own in pfx.slices(0, self.cfg.num_hidden_layers):
            layer = self._tm.DecoderLayerBuilder(self._tm.DecoderLayerConfig(), self._ctx)
            layer.attention_norm = self.norm(own + "input_layernorm")
            layer.attention = (self._latent_attention if self.cfg.use_mla else self._attention)(own + "self_attn")
            layer.ffn_norm = self.norm(own + "post_attention_layernorm")
            if self.cfg.n_routed_experts and index >= self.cfg.first_k_dense_replace:
                layer.moe_ffn = self._experts(own + "mlp")
            else:
                layer.feed_forward = self._ffn(own + "mlp", self.cfg.intermediate_size, self._dense_tp)
            layers[index] = layer.build()
        return layers.build()

    def _attention(self, pfx: Any) -> Any:
        """Plain attention; the checkpoint turns the two halves of a head, TurboMind's rope neighbours."""
        config = self._tm.make_attention_config(self.cfg, head_dim=self.cfg.hidden_size // self.cfg.num_attention_heads)
        q, k, v, o = (self._linear(pfx + f"{name}_proj") for name in "qkvo")
        q, k = (
            self._tm.reorder_rotary_emb(part, config.head_dim, config.rope.dim, dtype=self._ctx.dtype)
            for part in (q, k)
        )
        attention = self._tm.AttentionBuilder(config, self._ctx, tp=self._attn_tp)
        attention.add_qkv_proj(q, k, v)
        attention.add_o_proj(o)
        return attention.build()

    def _latent_attention(self, pfx: Any) -> Any:
        """Attention over a latent; the checkpoint's rope turns neighbours, as TurboMind's does."""
        config = self._tm.make_mla_config(self.cfg)
        attention = self._tm.MLABuilder(config.clone(), self._ctx, tp=self._attn_tp)
        q, o = self._folded(config, *(self._linear(pfx + f"{name}_proj") for name in ("q", "kv_b", "o")))
        kv_a = self._linear(pfx + "kv_a_proj_with_mqa")
        for name, part, side in (
            ("q_proj", q, self._tm.SplitSide.OUTPUT),
            ("kv_a_proj", kv_a, None),
            ("wo", o, self._tm.SplitSide.INPUT),
        ):
            attention._add_linear(name, part, split_side=side)
        attention.kv_a_layernorm = self.norm(pfx + "kv_a_layernorm")
        return attention.build()

    def _folded(self, config: Any, q: Any, kv_b: Any, o: Any) -> tuple[Any, Any]:
        """The projections of queries and outputs with those of keys and values multiplied in, in float32.

        LMDeploy's own folding takes queries as they come from their latent; here that is the hidden state.
        """
        config.q_lora_rank = self.cfg.hidden_size
        wide = (
            self._tm.Linear({"weight": part.tensors["weight"].to(torch.float32)}, part.weight_format)
            for part in (q, kv_b, o)
        )
        q, o = self._tm.fold_kv_b(*wide, cfg=config)
        return q, self._tm.pad_wo_input(o, cfg=config)

    def _experts(self, pfx: Any) -> Any:
        config = self._tm.make_moe_config(
            self.cfg,
            experts_per_token=self.cfg.num_experts_per_tok,
            norm_topk_prob=bool(self.cfg.norm_topk_prob),
            topk_method=self.cfg.topk_method,
            scoring_func=self.cfg.scoring_func,
            routed_scale=self.cfg.routed_scaling_factor,
        )
        config.expert_num = self.cfg.n_routed_experts
        moe = self._tm.MoeBuilder(config, self._ctx, ep=self._ep)
        moe.add_gate("gate", self._linear(pfx + "gate"))
        if self.cfg.topk_method == "noaux_tc":
            bias = pfx.pop("gate.e_score_correction_bias")
            moe.add_param("score_correction_bias", bias.to(torch.float32))  # of any other dtype it ends the process
        experts, inner = self._list(), self.cfg.moe_intermediate_size
        for index in moe.range(config.expert_num):
            experts[index] = self._ffn(pfx + "experts" + index, inner, self._mlp_tp, is_expert=True)
        moe.experts = experts.build()
        if self.cfg.n_shared_experts:
            moe.shared = self._ffn(pfx + "shared_experts", inner * self.cfg.n_shared_experts, self._mlp_tp)
        return moe.build()

    def _ffn(self, pfx: Any, inner: int, tp: Any, *, is_expert: bool = False) -> Any:
        config = self._tm.make_ffn_config(self.cfg, act_type=self._tm._act_type_id("silu"), inter_size=inner)
        config.is_expert = is_expert
        gate, down, up = (self._linear(pfx + f"{name}_proj") for name in ("gate", "down", "up"))
        ffn = self._tm.FfnBuilder(config, self._ctx, tp=tp)
        ffn.add_ffn(gate, down, up)
        return ffn.build()

    def _list(self) -> Any:
        return self._tm.ModuleListBuilder(self._tm.ModuleListConfig(), self._ctx)

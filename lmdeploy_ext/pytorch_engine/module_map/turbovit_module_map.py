"""Architecture to class, as `lmdeploy.pytorch.models.patch.update_custom_module_map` reads it."""

CUSTOM_MODULE_MAP = {
    "Gemma3ForConditionalGeneration": "turbovit.lmdeploy_ext.pytorch_engine.models.Gemma3ForConditionalGeneration",
    "Llama4ForConditionalGeneration": "turbovit.lmdeploy_ext.pytorch_engine.models.Llama4ForConditionalGeneration",
    "Qwen3VLForConditionalGeneration": "turbovit.lmdeploy_ext.pytorch_engine.models.Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration": (
        "turbovit.lmdeploy_ext.pytorch_engine.models.Qwen3VLMoeForConditionalGeneration"
    ),
    "DeepseekVLV2ForCausalLM": "turbovit.lmdeploy_ext.pytorch_engine.models.DeepseekVLV2ForCausalLM",
}

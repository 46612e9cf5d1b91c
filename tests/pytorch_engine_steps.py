"""LMDeploy's PyTorch engine step by step, with its own classes, as far as a CPU takes it: model, input processor,
scheduler, inputs maker and step context. What runs a decoder's kernels there is `pytorch_decoder_child.py`."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from turbovit.lmdeploy_ext.bundle_choice import BUNDLE_VARIABLE
from turbovit.lmdeploy_ext.pytorch_engine import CUSTOM_MODULE_MAP_FILE

BLOCK = 64  # tokens of a block of the key-value cache
UNSET = float("nan")


class EngineSteps:
    """An engine for one checkpoint.

    Args:
        bundle: whose tower runs; None leaves LMDeploy's own model.
        max_prefill: the most tokens of one prefill.

    Attributes:
        not_loaded: parameters that no tensor of the checkpoint went into.
    """

    def __init__(self, checkpoint: Path, bundle: Path | None, max_prefill: int = 8192):
        from lmdeploy.pytorch.config import CacheConfig, ModelConfig
        from lmdeploy.pytorch.model_inputs import BuildModelContext
        from lmdeploy.pytorch.models.patch import build_patched_model

        self.config = ModelConfig.from_pretrained(str(checkpoint), device_type="cuda", block_size=BLOCK)
        self.config.dtype = torch.float32
        with module_map(bundle), pretended_gpu():
            self.model = build_patched_model(self.config, torch.device("cpu"), BuildModelContext())
        self.not_loaded = self._load(checkpoint)
        self.cache = CacheConfig(8, BLOCK, num_cpu_blocks=0, num_gpu_blocks=256, max_prefill_token_num=max_prefill)
        self._schedule(max_prefill)

    def add(self, request: Mapping[str, Any]) -> Any:
        """Take a request as the engine takes it; gives LMDeploy's sequence."""
        ids, entries = request["input_ids"], copy.deepcopy(request.get("multimodal"))
        if entries:
            result = self.model.get_input_processor().preprocess_input(ids, entries)
            ids, entries = result.input_ids, result.input_multimodals
        session = len(self.scheduler.sessions)
        self.scheduler.add_session(session)
        return self.scheduler.sessions[session].add_sequence(ids, multimodals=entries)

    def prefill(self) -> Any:
        """The `ModelInputs` of what was added."""
        running = self.scheduler.schedule(is_prefill=True).running
        return self.maker.create_model_inputs(running, is_prefill=True)

    def chunks(self) -> Iterator[Any]:
        """The `ModelInputs` of the one request that was added, in chunks."""
        (sequence,) = self.scheduler.schedule(is_prefill=True).running
        chunker = self.maker.long_context_chunker
        chunker.set_seq(sequence)
        while not chunker.is_last_chunk():
            inputs = self.maker.create_model_inputs_long_context(sequence, *chunker.next_chunk_size())
            yield inputs
            chunker.update_step(inputs)
        yield self.maker.create_model_inputs([sequence], is_prefill=True)

    def model_inputs(self, inputs: Any, caches: Sequence[Any] = ()) -> dict[str, Any]:
        """What `prepare_inputs_for_generation` makes of them."""
        with self.context(inputs, caches) as context:
            return self.model.prepare_inputs_for_generation(past_key_values=caches, context=context)

    def language_inputs(self, inputs: Any) -> dict[str, Any]:
        """What the model gives its language half, by name."""
        recorded: dict[str, Any] = {}

        def record(*args: Any, **kwargs: Any) -> torch.Tensor:
            recorded.update(kwargs)
            if args and args[0].is_floating_point():  # Llama 4 gives its embeddings by position
                recorded["inputs_embeds"] = args[0]
            return torch.zeros(1)

        language = getattr(self.model, "language_model", None) or self.model.language
        with torch.inference_mode(), patch.object(language, "forward", record):
            self.model(**self.model_inputs(inputs))
        return recorded

    @contextmanager
    def context(self, inputs: Any, caches: Sequence[Any] = ()) -> Iterator[Any]:
        from lmdeploy.pytorch.model_inputs import step_ctx_manager

        manager = self.model.ctx_mgr
        with torch.inference_mode(), step_ctx_manager(manager):
            context = manager.build_context(inputs, self.config, self.cache, kv_caches=list(caches))
            with manager.context(context):
                yield context

    @torch.inference_mode()
    def _load(self, checkpoint: Path) -> list[str]:
        from lmdeploy.pytorch.weight_loader.model_weight_loader import ModelWeightLoader, load_model_weights

        for parameter in self.model.parameters():
            parameter.data.fill_(UNSET)
        ModelWeightLoader(str(checkpoint)).load_model_weights(self.model, torch.device("cpu"))
        missing = [name for name, parameter in self.model.named_parameters() if parameter.isnan().any()]
        for name in missing:  # the norms of Llama 4 that are ones and in no checkpoint
            self.model.get_parameter(name).data.fill_(1)
        load_model_weights(self.model, str(checkpoint), device=torch.device("cpu"))
        return missing

    def _schedule(self, max_prefill: int) -> None:
        from lmdeploy.pytorch.config import MiscConfig, SchedulerConfig
        from lmdeploy.pytorch.engine.inputs_maker import InputsMakerAsync, InputsMakerConfig
        from lmdeploy.pytorch.messages import SequenceMeta
        from lmdeploy.pytorch.paging.scheduler import Scheduler
        from lmdeploy.pytorch.strategies import build_strategy_factory

        factory = build_strategy_factory(self.config, MiscConfig(), None)
        sampling = factory.build_sampling_strategy()
        meta = SequenceMeta(
            BLOCK,
            strategy=factory.build_sequence_strategy(),
            sampling_strategy=sampling,
            use_mrope=self.config.use_mrope,
        )
        self.scheduler = Scheduler(SchedulerConfig(8, 16384), self.cache, seq_meta=meta)
        config = InputsMakerConfig(
            max_batches=8,
            max_prefill_token_num=max_prefill,
            role=self.cache.role,
            block_size=BLOCK,
            kernel_block_size=BLOCK,
            window_size=-1,
            enable_prefix_caching=False,
            prefix_cache_decode_state_interval=0,
            use_mrope=self.config.use_mrope,
        )
        executor, adapters = SimpleNamespace(device_type="cuda"), SimpleNamespace(num_adapters=lambda: 1)
        self.maker = InputsMakerAsync(executor, self.scheduler, None, adapters, None, sampling, None, config)


@contextmanager
def module_map(bundle: Path | None) -> Iterator[None]:
    """Within, LMDeploy builds models with the compiled tower of `bundle`, or its own where that is None."""
    from lmdeploy.pytorch.models.module_map import CUSTOM_MODULE_MAP
    from lmdeploy.pytorch.models.patch import update_custom_module_map

    with patch.dict(CUSTOM_MODULE_MAP, clear=True), patch.dict(os.environ):
        if bundle is not None:
            os.environ[BUNDLE_VARIABLE] = str(bundle)
            update_custom_module_map(str(CUSTOM_MODULE_MAP_FILE))
        yield


@contextmanager
def pretended_gpu() -> Iterator[None]:
    """LMDeploy asks for a device's properties to choose kernels and shape their launches; nothing runs on it."""
    properties = SimpleNamespace(major=8, minor=9, multi_processor_count=4)
    with (
        patch("torch.cuda.current_device", return_value=0),
        patch("torch.cuda.get_device_capability", return_value=(8, 9)),
        patch("torch.cuda.get_device_properties", return_value=properties),
    ):
        yield

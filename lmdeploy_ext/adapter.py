"""Every touch of LMDeploy's private parts, seen in lmdeploy 0.18.0.

`PRIVATE_PARTS` and `SERVER_PARTS` list them; `check()` fails where one is gone or takes other arguments than those that
are used here, and a test runs it against the installed LMDeploy.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from importlib import import_module
from typing import Any

import torch

from turbovit.engines.errors import CheckpointError, UnsupportedBackendError
from turbovit.engines.families import FAMILIES, FamilyRow, architecture_from_config, load
from turbovit.lmdeploy_ext import media_adapter

# What is used, as module:attribute, and the parameters that it must have.
PRIVATE_PARTS: dict[str, tuple[str, ...]] = {
    "lmdeploy.vl.model.base:VISION_MODELS.register_module": ("name", "force", "module"),
    "lmdeploy.vl.model.base:VisionModel.__init__": ("model_path", "with_llm", "max_memory", "hf_config", "backend"),
    "lmdeploy.serve.processors.multimodal:MultimodalProcessor._get_text_prompt_input": (
        "prompt",
        "do_preprocess",
        "adapter_name",
        "tools",
        "reasoning_effort",
        "chat_template_kwargs",
    ),
    "lmdeploy.serve.processors.multimodal:MultimodalProcessor._get_multimodal_prompt_input": (
        "messages",
        "do_preprocess",
        "tools",
        "chat_template_kwargs",
        "media_io_kwargs",
        "mm_processor_kwargs",
    ),
    "lmdeploy.serve.processors.multimodal:BaseChatTemplate.messages2prompt": ("messages",),
    "lmdeploy.vl.engine:_raise_exception_on_finish": ("task",),
    "lmdeploy.vl.engine:ImageEncoder.preprocess": ("messages", "input_prompt", "mm_processor_kwargs"),
    "lmdeploy.vl.engine:ImageEncoder._is_new_preprocess_api": ("model",),
    "lmdeploy.serve.core.async_engine:get_chat_template": ("model_path", "config"),
    "lmdeploy.archs:autoget_backend": ("model_path", "trust_remote_code"),
    "lmdeploy.archs:get_model_arch": ("model_path", "trust_remote_code"),
    "lmdeploy.model:HFChatTemplate.messages2prompt": ("messages",),
    "lmdeploy.model:BaseChatTemplate.messages2prompt": ("messages",),
    "lmdeploy.tokenizer:Tokenizer.encode": ("s", "add_bos", "add_special_tokens"),
    "lmdeploy.pipeline:autoget_backend_config": ("model_path", "backend_config", "trust_remote_code"),
    "lmdeploy.serve.core.async_engine:AsyncEngine.preprocess": (
        "messages",
        "session_id",
        "input_ids",
        "do_preprocess",
    ),
}
# What `turbovit serve` uses besides; importing these brings in all of LMDeploy's server.
SERVER_PARTS: dict[str, tuple[str, ...]] = {
    "lmdeploy.cli.serve:SubCliServe.add_parser_api_server": (),
    "lmdeploy.cli.serve:SubCliServe.api_server": ("args",),
    "lmdeploy.serve.openai.api_server:serve": ("model_path", "backend_config"),
    "lmdeploy.serve.openai.launch_server:launch_server": ("model_path", "backend_config"),
    "lmdeploy.turbomind:is_available": (),
    "lmdeploy.utils:get_model": ("pretrained_model_name_or_path", "download_dir", "revision"),
}


def check(parts: Mapping[str, tuple[str, ...]] = PRIVATE_PARTS) -> list[str]:
    """What of LMDeploy is not as it was in 0.18.0, one line each; empty where all is well."""
    problems = []
    for path, expected in parts.items():
        module, names = path.split(":")
        try:
            part: Any = functools.reduce(getattr, names.split("."), import_module(module))
        except (ImportError, AttributeError) as error:
            problems.append(f"{path} is gone: {error}")
            continue
        except Exception as error:  # whatever LMDeploy and all that it imports do at import
            problems.append(f"{module} cannot be imported ({type(error).__name__}: {' '.join(str(error).split())})")
            continue
        parameters = inspect.signature(part).parameters
        missing = [name for name in expected if name not in parameters]
        if missing:
            problems.append(f"{path} takes {list(parameters)}, expected {missing} too")
    return problems


def vision_model_class(row: FamilyRow) -> type:
    """The family's class over LMDeploy's own, which keeps doing what is not compiled (backend pytorch)."""
    return _vision_model_class(row.vision_model, row.registry_name)


@functools.cache  # families that share a class share the result; a second one would be joined with the first
def _vision_model_class(path: str, registry_name: str) -> type:
    import lmdeploy.vl.model.builder  # noqa: F401  (importing it registers LMDeploy's classes)
    from lmdeploy.vl.model.base import VISION_MODELS

    compiled = load(path)
    stock = VISION_MODELS.get(registry_name)
    return type(registry_name, (compiled, stock), {"__module__": compiled.__module__, "__doc__": compiled.__doc__})


def register_vision_models() -> None:
    """Put the compiled classes in the places of LMDeploy's; names, order and match rules stay."""
    from lmdeploy.vl.model.base import VISION_MODELS

    for row in FAMILIES:
        module = vision_model_class(row)
        VISION_MODELS.register_module(name=row.registry_name, module=module, force=True)


def patch_prompt_inputs(compiled_model: Callable[[Any], Any]) -> None:
    """Wrap what `MultimodalProcessor` does with prompts, those with images and those that have none.

    Args:
        compiled_model: gives the compiled vision model of an image encoder, or None where it has none.
    """
    from lmdeploy.serve.processors import multimodal
    from lmdeploy.serve.processors.multimodal import MultimodalProcessor

    text_input = MultimodalProcessor._get_text_prompt_input
    multimodal_input = MultimodalProcessor._get_multimodal_prompt_input

    @functools.wraps(text_input)
    async def text_input_of_model(
        self: Any, prompt: Any, do_preprocess: bool, adapter_name: str | None = None, **kwargs: Any
    ) -> dict:
        model = compiled_model(self.vl_encoder)
        if model is None:
            return await text_input(self, prompt, do_preprocess, adapter_name, **kwargs)
        options = dict(kwargs.get("chat_template_kwargs") or {})
        if kwargs.get("reasoning_effort") is not None:
            options["reasoning_effort"] = kwargs["reasoning_effort"]
        template = _template(self, do_preprocess, adapter_name)
        return model.text_request(prompt, template, self.tokenizer, kwargs.get("tools"), options)

    @functools.wraps(multimodal_input)
    async def multimodal_input_of_model(
        self: Any, messages: list[dict], do_preprocess: bool, *args: Any, media_io_kwargs: Any = None, **kwargs: Any
    ) -> dict:
        model = compiled_model(self.vl_encoder)
        if model is not None:
            given = {"mm_processor_kwargs": kwargs.get("mm_processor_kwargs"), "media_io_kwargs": media_io_kwargs}
            template = _template(self, do_preprocess)
            tools, template_options = kwargs.get("tools"), kwargs.get("chat_template_kwargs")
            model.check_messages(messages, template, tools, template_options, given)
            media_io_kwargs = media_adapter.for_one_request(media_io_kwargs or {})
        return await multimodal_input(self, messages, do_preprocess, *args, media_io_kwargs=media_io_kwargs, **kwargs)

    multimodal.BaseChatTemplate = _raw_template_class()  # it makes one for ``do_preprocess=False`` alone
    MultimodalProcessor._get_text_prompt_input = text_input_of_model
    MultimodalProcessor._get_multimodal_prompt_input = multimodal_input_of_model


def patch_encoder_options(compiled_model: Callable[[Any], Any]) -> None:
    """Let ``mm_processor_kwargs`` reach the models of LMDeploy's older kind, for which `ImageEncoder` drops them."""
    from lmdeploy.vl import engine

    preprocess = engine.ImageEncoder.preprocess

    @functools.wraps(preprocess)
    async def preprocess_with_options(
        self: Any, messages: list[dict], input_prompt: Any = None, mm_processor_kwargs: Any = None
    ) -> Any:
        model = compiled_model(self)
        if model is None or self._uses_new_preprocess:
            return await preprocess(self, messages, input_prompt, mm_processor_kwargs)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.executor, model.preprocess, messages, mm_processor_kwargs)

    engine.ImageEncoder.preprocess = preprocess_with_options


def patch_chat_template(refusal: Callable[[str], str | None]) -> None:
    """Refuse a checkpoint without a chat template where an engine is about to start and none is given.

    Args:
        refusal: gives the message for a model folder that LMDeploy has no template for, else None.
    """
    engine: Any = import_module("lmdeploy.serve.core.async_engine")
    find = engine.get_chat_template

    @functools.wraps(find)
    def find_or_refuse(model_path: str, config: Any = None, *args: Any, **kwargs: Any) -> Any:
        template = find(model_path, config, *args, **kwargs)
        message = refusal(model_path) if config is None and is_raw(template) else None
        if message:
            raise CheckpointError(message)
        return template

    engine.get_chat_template = find_or_refuse


def has_chat_template(model_path: str) -> bool:
    """Whether LMDeploy finds a chat template for a model folder."""
    from lmdeploy.model import get_chat_template

    return not is_raw(get_chat_template(model_path))


def quiet_refusals() -> None:
    """A refused request raises where it is awaited; LMDeploy's callback would also log it as a crash of the loop."""
    from lmdeploy.vl import engine

    engine._raise_exception_on_finish = lambda task: task.cancelled() or task.exception()


def patch_backend_choice(refusal: Callable[[str, Mapping[str, Any]], str | None]) -> None:
    """Refuse where LMDeploy would silently fall back from TurboMind to its PyTorch engine.

    Args:
        refusal: gives the message for an architecture of the table of families, and a config of it, that TurboMind
            cannot run, else None.
    """
    from lmdeploy import archs

    choose = archs.autoget_backend

    @functools.wraps(choose)
    def choose_or_refuse(model_path: str, *args: Any, **kwargs: Any) -> str:
        config = archs.get_model_arch(model_path, *args, **kwargs)[1].to_dict()
        message = refusal(architecture_from_config(config) or "", config)
        if message:
            raise UnsupportedBackendError(message)
        return choose(model_path, *args, **kwargs)

    archs.autoget_backend = choose_or_refuse


def patch_pipeline_config(prepare: Callable[[str, Any], Any]) -> None:
    """Let `prepare` have a say in the engine config that a pipeline starts one of LMDeploy's engines with.

    Args:
        prepare: gives the config to use for a model folder and a config.
    """
    pipeline: Any = import_module("lmdeploy.pipeline")  # `lmdeploy.pipeline`, as an attribute, is the function
    choose = pipeline.autoget_backend_config

    @functools.wraps(choose)
    def choose_and_prepare(model_path: str, *args: Any, **kwargs: Any) -> tuple[str, Any]:
        backend, config = choose(model_path, *args, **kwargs)
        return backend, prepare(model_path, config)

    pipeline.autoget_backend_config = choose_and_prepare


def patch_bare_ids(compiled_model: Callable[[Any], Any]) -> None:
    """Take token ids that come without messages through the vision model's checks, as those beside images are."""
    from lmdeploy.serve.core.async_engine import AsyncEngine

    preprocess = AsyncEngine.preprocess

    @functools.wraps(preprocess)
    async def preprocess_with_checks(self: Any, messages: Any, *args: Any, **kwargs: Any) -> Any:
        if messages is None and kwargs.get("input_ids") and compiled_model(getattr(self, "vl_encoder", None)):
            ids = {"type": "text", "text": kwargs["input_ids"]}
            messages = [{"role": "user", "content": [ids]}]
            kwargs |= {"input_ids": None, "do_preprocess": False}
        return await preprocess(self, messages, *args, **kwargs)

    AsyncEngine.preprocess = preprocess_with_checks


def server_parser() -> Any:
    """The parser of ``lmdeploy serve api_server``."""
    from lmdeploy.cli.serve import SubCliServe

    if "api_server" not in SubCliServe.subparsers.choices:
        SubCliServe.add_parser_api_server()
    return SubCliServe.subparsers.choices["api_server"]


def model_folder(options: Any) -> str:
    """The folder of the model that `server_parser`'s options name, fetched as LMDeploy fetches it."""
    from lmdeploy.utils import get_model

    if os.path.exists(options.model_path):
        return options.model_path
    return get_model(options.model_path, download_dir=options.download_dir, revision=options.revision)


def turbomind_problem() -> str | None:
    """Why TurboMind's CUDA extension cannot be loaded here; None where it is."""
    from lmdeploy import turbomind

    return None if turbomind.is_available() else str(turbomind._import_error)


def start_server(options: Any, prepare: Callable[[str, Any], Any]) -> None:
    """Run ``lmdeploy serve api_server``; returns when the server has ended.

    Args:
        options: what `server_parser` made of its arguments.
        prepare: gives the config to start LMDeploy's engine with, for a model folder and a config.
    """
    from lmdeploy.cli.serve import SubCliServe

    # One process, or one for each of several groups of GPUs.
    starts = {"api_server": "serve", "launch_server": "launch_server"}
    places = [(import_module(f"lmdeploy.serve.openai.{module}"), name) for module, name in starts.items()]

    with ExitStack() as originals:

        def prepared(start: Callable[..., None]) -> Callable[..., None]:
            def start_prepared(*args: Any, backend_config: Any, **kwargs: Any) -> None:
                originals.close()  # a server runs long, and this was for its start
                start(*args, backend_config=prepare(options.model_path, backend_config), **kwargs)

            return start_prepared

        for module, name in places:
            original = getattr(module, name)
            originals.callback(setattr, module, name, original)
            setattr(module, name, prepared(original))
        SubCliServe.api_server(options)


def is_raw(chat_template: Any) -> bool:
    """Whether this is the empty template that LMDeploy uses for ``do_preprocess=False``, or for lack of any other.

    A template that a user wrote in a JSON file is a BaseChatTemplate too, with something in it.
    """
    from lmdeploy.model import BaseChatTemplate

    return sent_raw(chat_template) or (
        type(chat_template) is BaseChatTemplate and vars(chat_template) == vars(BaseChatTemplate())
    )


def sent_raw(chat_template: Any) -> bool:
    """Whether this stands for a request with ``do_preprocess=False``."""
    return isinstance(chat_template, _raw_template_class())


def is_unedited(chat_template: Any, names: Collection[str]) -> bool:
    """Whether this is a template of LMDeploy's own, by one of these names, as LMDeploy has it.

    Stop words may be others: they are no part of the prompt.
    """
    from lmdeploy.model import MODELS

    def texts(template: Any) -> dict[str, Any]:
        return {name: value for name, value in vars(template).items() if name != "stop_words"}

    own = [MODELS.get(name) for name in names]
    return any(type(chat_template) is one and texts(chat_template) == texts(one()) for one in own)


def takes_parts(chat_template: Any) -> bool:
    """Whether a template takes contents as lists of parts (a Hugging Face one), and not as strings."""
    from lmdeploy.model import HFChatTemplate

    return isinstance(chat_template, HFChatTemplate)


def grid_entry(
    kind: str, patches: torch.Tensor, grid: tuple[int, int], place: tuple[int, int], token: int
) -> dict[str, Any]:
    """An image or temporal step of a video as LMDeploy's new-style models give it to its PyTorch engine.

    Args:
        patches: [patches, values of one].
        grid: rows and columns of patches.
        place: [begin, end) in the prompt.
    """
    from lmdeploy.vl.constants import Modality

    entry: dict[str, Any] = {"modality": Modality(kind), "offset": place, f"{kind}_token_id": token}
    # Cloned, as a view is pickled with the whole of what it is a view of.
    entry["pixel_values" if kind == "image" else "pixel_values_videos"] = patches.clone()
    return {**entry, f"{kind}_grid_thw": torch.tensor([1, *grid])}


def tokenizer(model_path: str) -> Any:
    """LMDeploy's tokenizer of a model."""
    from lmdeploy.tokenizer import Tokenizer

    return Tokenizer(model_path)


def _template(processor: Any, do_preprocess: bool, adapter_name: str | None = None) -> Any:
    """The chat template that LMDeploy would use; an adapter can be named after one of its own."""
    from lmdeploy.model import MODELS

    if not do_preprocess:
        return _raw_template_class()()
    return MODELS.module_dict[adapter_name]() if adapter_name in MODELS.module_dict else processor.chat_template


@functools.cache
def _raw_template_class() -> type:
    from lmdeploy.model import BaseChatTemplate

    class RawTemplate(BaseChatTemplate):
        """The empty template of a request with ``do_preprocess=False``, told from that of a model that has none."""

    return RawTemplate

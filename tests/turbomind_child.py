"""The child of `turbomind_intake`: passes saved requests to the real TurboMind engine instance.

Usage: turbomind_child.py REQUESTS INTAKES DTYPE, with a libcuda.so.1 on LD_LIBRARY_PATH. Every step up to
the C++ request is LMDeploy's own code; only that request, which needs a GPU, is replaced by a recorder.
"""

import asyncio
import inspect
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from lmdeploy import turbomind
from lmdeploy.messages import GenerationConfig, TurbomindEngineConfig
from lmdeploy.serve.core.async_engine import AsyncEngine

# `lmdeploy.turbomind.turbomind` cannot be imported at all without the extension, so the functions here
# import it, after check_engine has said what is missing.

STATUS_FINISHED = 7  # `errcode_map` in TurboMindInstance
NEEDED_PARAMETERS = {"input_ids", "input_embeddings", "input_embedding_ranges"}


class RecordingRequest:
    """Stands in for `_tm.ModelRequest`: keeps its tensor map and reports that generation is finished."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    def forward(
        self,
        inputs: Any,
        mm_inputs: Any,
        session: Any,
        gen_config: Any,
        stream_output: bool,
        enable_metrics: bool,
        signal: Callable[[], None],
    ) -> tuple[Any, Any, None]:
        from lmdeploy.turbomind.turbomind import _np_dict_to_tm_dict, _tm_dict_to_torch_dict

        # Cloned because the map only borrows memory that LMDeploy frees when the request is over.
        self.tensors = {name: tensor.clone() for name, tensor in _tm_dict_to_torch_dict(inputs).items()}
        input_ids = self.tensors["input_ids"]
        state = SimpleNamespace(status=STATUS_FINISHED, seq_len=len(input_ids))
        signal()
        return _np_dict_to_tm_dict({"output_ids": input_ids}), SimpleNamespace(consume=lambda: state), None

    def cancel(self) -> None:
        """LMDeploy cancels a request that it refused; there is nothing to stop here."""


def check_engine() -> None:
    """Raise unless TurboMind is importable and still names the parameters that carry the images."""
    if not turbomind.is_available():
        raise RuntimeError("TurboMind's extension did not import") from turbomind._import_error
    missing = NEEDED_PARAMETERS - engine_parameters()
    if missing:
        # They would end in **kwargs, where they are lost without a word.
        raise RuntimeError(f"async_stream_infer has {sorted(engine_parameters())}, lacks {sorted(missing)}")


def engine_parameters() -> set[str]:
    """The parameters that `async_stream_infer` names, so those it does not drop in **kwargs."""
    from lmdeploy.turbomind.turbomind import TurboMindInstance

    parameters = inspect.signature(TurboMindInstance.async_stream_infer).parameters.values()
    return {parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD}


def build_instance(dtype: str) -> Any:
    """A `TurboMindInstance` of an engine without weights."""
    engine = turbomind.TurboMind.__new__(turbomind.TurboMind)
    # empty_init leaves out the C++ request; metrics are filled in by C++.
    engine.engine_config = TurbomindEngineConfig(dtype=dtype, empty_init=True, enable_metrics=False)
    engine.source_model = None  # no TurboMind model takes a `multimodal` key for these architectures
    return engine.create_instance()


async def take(prompt_input: dict[str, Any], dtype: str) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Pass one request on as `AsyncEngine.generate` does; give its tensors and the keys left unread."""
    instance = build_instance(dtype)
    instance._model_inst = recorder = RecordingRequest()
    prompt_input["input_ids"].copy()  # `generate` does this, so the ids must be a list
    run = AsyncEngine.__new__(AsyncEngine).safe_run(
        instance,
        session=SimpleNamespace(session_id=1),
        **prompt_input,
        gen_config=GenerationConfig(max_new_tokens=1, top_k=1),
        adapter_name=None,
        stream_output=True,
    )
    async with run as outputs:
        async for _ in outputs:
            pass
    return recorder.tensors, sorted(prompt_input.keys() - engine_parameters())


def main(sent: str, received: str, dtype: str) -> None:
    check_engine()
    answers = []
    for index, prompt_input in enumerate(torch.load(sent, weights_only=False)):
        try:
            answers.append(asyncio.run(take(prompt_input, dtype)))
        except Exception as error:
            raise RuntimeError(f"request {index} with the keys {sorted(prompt_input)} was refused") from error
    torch.save(answers, received)


if __name__ == "__main__":
    main(*sys.argv[1:])

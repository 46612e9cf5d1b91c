"""`turbovit serve`: LMDeploy's own server, with the compiled vision towers in place."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from turbovit.engines.bundle import MANIFEST, open_bundle
from turbovit.engines.errors import CheckpointError, RuntimeUnavailableError, UnsupportedBackendError, UsageError
from turbovit.engines.families import family_from_architecture
from turbovit.lmdeploy_ext import adapter, media_adapter
from turbovit.lmdeploy_ext.bundle_choice import BUNDLE_VARIABLE, COMPILED_VISION_VARIABLE
from turbovit.lmdeploy_ext.capability import turbomind_lacks, turbomind_refusal
from turbovit.lmdeploy_ext.chat_template import template_refusal
from turbovit.lmdeploy_ext.engine_config import prepared_engine_config
from turbovit.lmdeploy_ext.local_media import OPTION, AllowedMedia
from turbovit.lmdeploy_ext.memory import gpus
from turbovit.lmdeploy_ext.plugin import install
from turbovit.lmdeploy_ext.pytorch_capability import pytorch_refusal

Report = Callable[[str], None]


def serve(
    model: str,
    arguments: Sequence[str],
    *,
    backend: str | None = None,
    engines: Path | None = None,
    auto_build: bool = False,
    compiled_vision: bool = True,
    local_media: Path | None = None,
    report: Report = lambda line: None,
) -> None:
    """Serve `model` until the server ends.

    Args:
        model: a checkpoint folder or hub id.
        arguments: options of ``lmdeploy serve api_server``, as they are written there.
        backend: ``turbomind``, ``pytorch``, or None for the first of these that can run the model.
        engines: a bundle's folder, or a folder of bundles to look in; None looks in ``$TURBOVIT_BUNDLE``, then in the
            store.
        auto_build: whether to build the bundle first where there is none.
        compiled_vision: False leaves everything to LMDeploy (backend pytorch).
        local_media: the folder whose files requests may name as images and videos; None: they may name none.
        report: called with a line about each thing that was decided.

    Raises:
        UsageError: an option is not LMDeploy's, or does not go with another.
        UnsupportedBackendError: the backend has no language model for the architecture; says what is missing.
        RuntimeUnavailableError: LMDeploy or a GPU is missing.
        BundleError: no bundle fits the model; gives the command that builds one.
        CheckpointError, UnsupportedModelError: the model cannot be used; says why.
    """
    from turbovit.export.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(model)
    architecture = str(checkpoint.architecture)
    family_from_architecture(architecture)
    _require_lmdeploy()
    options = _parsed(model, arguments)
    options.allowed_media_domains = _allowed_media(options.allowed_media_domains, local_media)
    options.backend = _backend(architecture, checkpoint.config, backend, compiled_vision, report)
    _require_device(options)
    options.model_name = options.model_name or model  # as LMDeploy's own command does
    options.model_path = adapter.model_folder(options)
    if compiled_vision:
        _require_chat_template(options)
    if compiled_vision and not options.language_model_only:
        bundle = open_bundle(_bundle(options, engines, auto_build, report))
        have = ", ".join(f"{engine.runtime} {engine.precision}" for engine in bundle.manifest.engines)
        report(f"compiled vision tower: {bundle.path} ({have})")
        os.environ[BUNDLE_VARIABLE] = str(bundle.path)  # for this process and all that it starts
    else:
        report("vision half: LMDeploy's own" if not options.language_model_only else "vision half: left out")
    os.environ[COMPILED_VISION_VARIABLE] = "1" if compiled_vision else "0"
    if compiled_vision:
        install()
    else:
        media_adapter.patch_url_loading()
    adapter.start_server(options, prepared_engine_config)


def _require_lmdeploy() -> None:
    if importlib.util.find_spec("lmdeploy") is None:
        raise RuntimeUnavailableError("serving needs LMDeploy, which is not here: pip install 'turbovit[lmdeploy]'")
    problems = adapter.check(adapter.SERVER_PARTS | media_adapter.PRIVATE_PARTS)
    if problems:
        raise RuntimeUnavailableError(
            f"turbovit serve needs lmdeploy 0.18 (pip install 'turbovit[lmdeploy]'); in the one here "
            f"{'; '.join(problems)}"
        )


def _parsed(model: str, arguments: Sequence[str]) -> Any:
    def refuse(message: str) -> NoReturn:
        raise UsageError(f"{message} (the options of LMDeploy's server: lmdeploy serve api_server --help)")

    parser = adapter.server_parser()
    parser.error = refuse
    return parser.parse_args([model, *arguments])


def _allowed_media(domains: list[str] | None, local_media: Path | None) -> AllowedMedia:
    if local_media is not None and not local_media.is_dir():
        raise UsageError(f"{OPTION} {local_media} is no folder: name the one whose files requests may read")
    return AllowedMedia(domains or (), local_media)


def _backend(
    architecture: str, config: Mapping[str, Any], wanted: str | None, compiled_vision: bool, report: Report
) -> str:
    refusals: dict[str, Callable[[], str | None]] = {
        "turbomind": lambda: turbomind_refusal(architecture, config),
        "pytorch": lambda: pytorch_refusal(architecture),
    }
    if wanted is not None and wanted not in refusals:
        raise UsageError(f"unknown backend {wanted!r}; available: {', '.join(refusals)}")
    if wanted == "turbomind" and not compiled_vision:
        raise UsageError(
            "--no-compiled-vision goes with --backend pytorch: for TurboMind, LMDeploy has no vision half of its own "
            "for this model"
        )
    lacks = turbomind_lacks(architecture, config)
    chosen = wanted or ("pytorch" if lacks or not compiled_vision else "turbomind")
    refusal = refusals[chosen]()
    if refusal:
        raise UnsupportedBackendError(refusal)
    report(f"backend: {chosen}{f' ({lacks})' if lacks and not wanted else ''}")
    return chosen


def _require_device(options: Any) -> None:
    if options.backend == "turbomind":
        problem = adapter.turbomind_problem()
        if problem:
            raise RuntimeUnavailableError(
                f"LMDeploy's TurboMind cannot be loaded here: {problem}. The other route is --backend pytorch"
            )
    elif options.device == "cuda" and not gpus():
        raise RuntimeUnavailableError(
            "LMDeploy's PyTorch engine runs language models on a GPU, and torch sees no CUDA device here. Without "
            "one, `turbovit encode` runs the vision half, and load_vision_model() makes its requests"
        )


def _require_chat_template(options: Any) -> None:
    if options.chat_template is None:
        refusal = template_refusal(options.model_path)
        if refusal and not adapter.has_chat_template(options.model_path):
            raise CheckpointError(refusal)


def _bundle(options: Any, engines: Path | None, auto_build: bool, report: Report) -> Path:
    from turbovit.export.build import build
    from turbovit.export.plan import find_bundle, no_bundle, require_fit

    model, name = options.model_path, options.model_name
    named = engines or os.environ.get(BUNDLE_VARIABLE)
    if named and (engines is None or (engines / MANIFEST).is_file()):
        require_fit(model, named)
        return Path(named)
    found = find_bundle(model, engines)
    if found is not None:
        return found
    if auto_build:
        return build(model, engines and engines / Path(name).name, report=report).bundle.path
    otherwise = ", or serve without one: --no-compiled-vision" if options.backend == "pytorch" else ""
    raise no_bundle(model, f" (or let --auto-build do it now{otherwise})")

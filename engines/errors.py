"""Every error that turbovit raises on purpose.

A message says what was got, what was expected and what to do. The command line prints it as one line and
exits with `exit_code`.
"""

from __future__ import annotations


class TurbovitError(Exception):
    """Base of all errors that are about the caller's input or machine, not about a fault in turbovit."""

    exit_code = 2


class UsageError(TurbovitError):
    """A command has options that do not exist, or do not go together."""


class UnsupportedModelError(TurbovitError):
    """No family is known for the architecture, or the family cannot do what its config asks for."""


class CheckpointError(TurbovitError):
    """The checkpoint folder, its config or its tensors are missing, damaged or not what the config says."""


class BuildError(TurbovitError):
    """The engine build could not be carried out (export, disk space, a runtime's compiler)."""


class CertificationError(TurbovitError):
    """An engine ran and its outputs are not close enough to the reference tower."""

    exit_code = 1


class BundleError(TurbovitError):
    """A bundle is missing, damaged, of another schema, or holds no engine for what was asked."""


class NoEngineError(BundleError):
    """A bundle is sound, and holds no engine for the runtime and device that were asked for."""


class RuntimeUnavailableError(TurbovitError):
    """The runtime or device asked for is not on this machine."""


class EngineInputError(TurbovitError, ValueError):
    """An engine input has the wrong name, dtype or shape, or lies outside the limits the bundle was built for."""


class EngineRunError(TurbovitError):
    """An engine that had loaded failed while it ran, or was closed; says what the runtime reported."""

    exit_code = 1


class InputError(TurbovitError, ValueError):
    """A request's image or message cannot be processed. As a ValueError LMDeploy's server answers it with a 4xx."""


class UnsupportedBackendError(TurbovitError, ValueError):
    """The installed LMDeploy backend has no language model for the architecture."""

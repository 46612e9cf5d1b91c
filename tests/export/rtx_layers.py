"""What TensorRT-RTX makes of a graph, by its own log: ``rtx_layers.py``, with a JSON object on stdin.

Takes ``graph``, ``capability`` (such as ``89``) and ``shapes``: one a profile, of (smallest, optimal, largest) by
input; the rest is configured as in `turbovit.export.compile_child`. Prints the names of the engine's layers and the
bytes of activations of each profile. In a process of its own, as a compiler may end its process.
"""

from __future__ import annotations

import json
import re
import sys

import tensorrt_rtx as trt


class _Log(trt.ILogger):
    def __init__(self) -> None:
        trt.ILogger.__init__(self)
        self.text = ""

    def log(self, severity: object, message: str) -> None:
        self.text += f"{message}\n"


def main() -> None:
    job = json.load(sys.stdin)
    log = _Log()
    builder = trt.Builder(log)
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, log)
    if not parser.parse_from_file(job["graph"]):
        sys.exit(log.text)
    config = builder.create_builder_config()
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED  # the log lists no layers otherwise
    config.clear_flag(trt.BuilderFlag.TF32)
    config.num_compute_capabilities = 1
    config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{job['capability']}"), 0)
    for shapes in job["shapes"]:
        profile = builder.create_optimization_profile()
        for name, sizes in shapes.items():
            profile.set_shape(name, *map(tuple, sizes))
        config.add_optimization_profile(profile)
    if builder.build_serialized_network(network, config) is None:
        sys.exit(log.text)
    layers = re.findall(r"^Name: (.+?), LayerType: ", log.text, re.MULTILINE)
    memory = [int(number) for number in re.findall(r"Total Activation Memory: (\d+) bytes", log.text)]
    print(json.dumps({"layers": layers, "activations": memory}))


if __name__ == "__main__":
    main()

"""From a checkpoint to ONNX to an engine bundle."""

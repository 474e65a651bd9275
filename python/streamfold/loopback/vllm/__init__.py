"""The engine's other tongue: vLLM's ``/inference/v1/generate`` and what belongs to it."""

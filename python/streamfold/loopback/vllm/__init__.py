"""Emulates vLLM: ``/inference/v1/generate``, ``/v1/completions``, and the control endpoints."""

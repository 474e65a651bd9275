"""Emulates SGLang: ``/generate``, its parameters, stream events and control endpoints."""

"""A real causal language model on torch and transformers: sampling, KV cache, routed experts, new weights."""

try:
    import safetensors as _safetensors
    import torch as _torch
    import transformers as _transformers
except ModuleNotFoundError as _error:
    _missing = (_error.name or "").partition(".")[0]
    if _missing not in {"safetensors", "tokenizers", "torch", "transformers"}:
        raise
    _message = f"a model of a directory needs {_missing}: pip install 'streamfold[hf]'"
    raise ImportError(_message, name=_missing) from _error

__all__: list[str] = []

del _safetensors, _torch, _transformers

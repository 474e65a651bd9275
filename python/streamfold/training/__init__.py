"""The training loop of ``streamfold demo --train`` and ``examples/tiny_moe``: a real model, on a CPU.

It needs the extras ``loopback`` and ``train``. ``loop.py`` is the loop: rollout, checks, optimizer step, weights to the
engine. What it is made of is written to be copied: ``replay.py`` (log-probabilities under the streamed experts and
top-p ids), ``loss.py`` (GRPO), ``weights.py`` (buckets of weights for the engine).
"""

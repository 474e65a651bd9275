"""Generates many samples: over-sampling, partial and fully asynchronous rollout, rewards, filters, a durable buffer."""

"""Many samples: over-sampling, partial rollout, rewards, filters, a durable buffer, fully asynchronous pools."""

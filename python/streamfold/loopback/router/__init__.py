"""Loopback router: load balancing over several workers, with retries, like SGLang's router."""

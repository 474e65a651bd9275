"""A router in front of several loopback engines."""

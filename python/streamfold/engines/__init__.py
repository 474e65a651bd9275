"""What differs between inference servers: payloads, abort requests, load, and how to detect which one a URL is."""

"""The HTTP server around the engine, with control over each byte of a response."""

"""HTTP for the loopback engine: a server in a thread, streamed responses, and control over each byte of a response."""

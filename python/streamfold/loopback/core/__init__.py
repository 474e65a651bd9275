"""Mock model, tokenizer, request parameters and the scheduler that batches requests: no wire format, no HTTP."""

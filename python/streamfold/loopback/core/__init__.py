"""The mock model, its tokenizer, and the scheduler that batches requests; knows no wire format."""

"""One sample: its fields, merging generations into it, completing it, stop detection, detokenizing, resetting."""

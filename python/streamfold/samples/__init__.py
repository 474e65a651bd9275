"""One sample to its end: merge generations into it, resume it, decide whether it has stopped, decode its text."""

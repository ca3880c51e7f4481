"""Measure decoding: every mode in one run, on the same prompts, with the tokens compared."""

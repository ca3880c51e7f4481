"""The DeepSeek-V4 model: modules, rotary tables, and its two forwards (cached and whole-sequence)."""

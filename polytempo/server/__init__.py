"""The HTTP server: OpenAI's routes over `AsyncLLM`, metrics, and a page to watch and try it."""

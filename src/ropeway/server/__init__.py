"""HTTP in front of an `AsyncLLM`: OpenAI's JSON, server-sent events, metrics, orderly shutdown."""

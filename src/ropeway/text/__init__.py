"""Text to token ids and back: tokenizer, chat template, incremental detokenizer. Knows no engine, model or HTTP."""

"""Text in and out: tokenizer files, the prompt format, tool calls, streaming text and compressed token ids."""

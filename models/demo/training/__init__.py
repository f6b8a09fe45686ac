"""Train the demo model: data, tokenizer, training, export, conversion and evaluation."""

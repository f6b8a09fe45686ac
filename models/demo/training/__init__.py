"""How the demo model was made: data, tokenizer, training, export, conversion, evaluation."""

"""What the experts of a model see while it reads a text, and what is made of it: importance
matrices, and the loss table of each expert and precision."""

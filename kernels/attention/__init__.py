"""Row softmax and causal attention, each with its gradient, written to be read line by line."""

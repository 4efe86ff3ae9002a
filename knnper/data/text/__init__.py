"""Text: an example is one character to predict from the characters before it."""

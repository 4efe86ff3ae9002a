"""The trained global model on its own: made, saved, loaded, told apart."""

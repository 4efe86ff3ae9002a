"""Vector indexes by name, through FAISS."""

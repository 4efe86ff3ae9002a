"""A client with data of its own: what it says of itself, trains on, and keeps."""

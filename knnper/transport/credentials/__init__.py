"""Certificates of the server and keys of the clients: made, read and checked."""

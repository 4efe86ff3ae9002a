"""From the neighbours to what a client serves."""

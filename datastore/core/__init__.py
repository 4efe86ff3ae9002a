"""What a store is made of: its rows, its view of them, its cache."""

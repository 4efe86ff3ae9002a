"""What a bounded memory keeps: one policy, one file."""

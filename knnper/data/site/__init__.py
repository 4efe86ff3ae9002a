"""A site's own data: where it lies, how its labels are called, how it is split."""

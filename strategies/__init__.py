"""The methods: one file each, and the table of all of them."""

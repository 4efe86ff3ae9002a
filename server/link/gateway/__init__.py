"""The only thing that clients can reach: lets through what a SuperNode needs."""

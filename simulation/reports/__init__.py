"""Reports and figures of finished runs."""

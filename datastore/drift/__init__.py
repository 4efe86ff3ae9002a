"""Whether what arrives still looks like what was stored."""

"""Many runs: what is run, how far it is, and what came of it."""

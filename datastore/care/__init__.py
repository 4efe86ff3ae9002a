"""Looking after a store on disk: checks, proofs, copies, advice."""

"""Speed and memory against stated baselines; each module is one command."""
